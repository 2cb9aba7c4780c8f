"""Log-probabilities of prompts, and vectors of them: transformers', with the same bits whatever the chunks, the
neighbours, the cache and the stages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM
from penstock.engine.events import Finished, GenerationRequest, PromptScored
from penstock.engine.prompt_rows import SLICE_ROWS
from penstock.engine.sampler import TokenLogprobs
from penstock.engine.service import Service, ServiceConfig
from penstock.errors import SettingError
from penstock.models.decoder import Decoder
from tests.byte_models import CONTEXT, model_of_bytes
from tests.engine.listening import Listening
from tests.oracle import make_oracle, random_prompt

PROMPT = random_prompt(330, 256, 5)
Scores = tuple[TokenLogprobs | None, ...]


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes(family, tmp_path_factory.mktemp("models") / family)


@pytest.fixture(scope="module")
def whole(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", chunk=0)


@pytest.fixture(scope="module")
def expected(whole: LLM) -> Scores:
    scores = whole.generate(PROMPT, max_tokens=0, prompt_logprobs=3).prompt_logprobs
    assert scores is not None
    return scores


@pytest.fixture(params=[64, 192])
def chunked(request: pytest.FixtureRequest, folder: Path) -> LLM:
    return LLM(folder, dtype="float32", chunk=request.param)


def hidden(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' last hidden states [tokens, hidden] and logits [tokens, vocab]."""
    model = make_oracle(family, vocab_size=256, max_position_embeddings=CONTEXT).model
    with torch.inference_mode():
        out = model(torch.tensor([PROMPT]), output_hidden_states=True)
    return out.hidden_states[-1][0].double(), out.logits[0].double()


def served(service: Service, request: GenerationRequest) -> Listening:
    listener = Listening()
    service.submit(request, listener)
    return listener


def scores_of(listener: Listening) -> Scores:
    assert isinstance(listener.end, Finished)
    events = [event for event in listener.events if isinstance(event, PromptScored)]
    return tuple(score for event in events for score in event.logprobs)


def test_they_are_those_of_transformers(family: str, expected: Scores) -> None:
    logprobs = hidden(family)[1].log_softmax(-1)
    assert expected[0] is None
    assert len(expected) == len(PROMPT)
    for position, score in enumerate(expected[1:]):
        assert score is not None
        row = logprobs[position]
        assert score.logprob == pytest.approx(float(row[PROMPT[position + 1]]), abs=1e-4)
        assert [each.logprob for each in score.most_likely] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )


def test_chunks_change_no_bit_of_them_nor_of_the_answer(chunked: LLM, whole: LLM, expected: Scores) -> None:
    result = chunked.generate(PROMPT, max_tokens=4, prompt_logprobs=3, num_logprobs=2)
    assert result.prompt_logprobs == expected
    plain = whole.generate(PROMPT, max_tokens=4, num_logprobs=2)
    assert plain.prefill.chunks == 1
    assert (result.token_ids, result.logprobs) == (plain.token_ids, plain.logprobs)


def test_the_head_has_no_more_rows_than_a_slice(chunked: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    nums_rows: list[int] = []
    logits = Decoder.logits

    def counted(self: Decoder, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        nums_rows.append(len(x))
        return logits(self, x, **settings)

    monkeypatch.setattr(Decoder, "logits", counted)
    chunked.generate(PROMPT, max_tokens=0, prompt_logprobs=0)
    # Each token but the first, and the row that is sampled from.
    assert (max(nums_rows), sum(nums_rows)) == (SLICE_ROWS, len(PROMPT))


def test_a_prompt_that_is_in_the_cache_is_scored_all_the_same(chunked: LLM, expected: Scores) -> None:
    """Served with others beside it, in a cache that is too small for all of them, and has the prompt already."""
    config = ServiceConfig(cache_tokens=1024)
    with Service(chunked, config) as service:
        assert isinstance(served(service, GenerationRequest(PROMPT, 1)).end, Finished)
        request = GenerationRequest(PROMPT, 5, prompt_logprobs=3, ignore_eos=True)
        others = [GenerationRequest(PROMPT[:200], 100, ignore_eos=True) for _ in range(3)]
        listeners = [served(service, each) for each in (others[0], request, *others[1:], request)]
        assert [scores_of(listeners[index]) for index in (1, 4)] == [expected, expected]
        assert [len(listeners[index].tokens) for index in (1, 4)] == [5, 5]
        # What was scored is there for others.
        end = served(service, GenerationRequest(PROMPT, 0)).end
        assert isinstance(end, Finished)
        assert (end.reason, end.usage.completion_tokens) == ("length", 0)
        assert end.usage.cached_tokens >= 256


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors(family: str, chunked: LLM, whole: LLM, pooling: Any) -> None:
    vector = whole.embed(PROMPT, pooling=pooling)
    assert chunked.embed(PROMPT, pooling=pooling) == vector
    rows = hidden(family)[0]
    pooled = rows.mean(0) if pooling == "mean" else rows[-1]
    theirs = torch.nn.functional.normalize(pooled, dim=0).tolist()
    assert vector == pytest.approx(theirs, abs=1e-5)
    with Service(chunked, ServiceConfig(cache_tokens=2048)) as service:
        ends = [served(service, GenerationRequest(PROMPT, 0, pooling=pooling)).end for _ in range(2)]
    assert [end.vector for end in ends if isinstance(end, Finished)] == [vector, vector]


@pytest.fixture(scope="module")
def staged(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", chunk=64, stages=2) as llm:
        yield llm


def test_stages_change_no_bit_of_them(staged: LLM, whole: LLM, expected: Scores) -> None:
    assert staged.generate(PROMPT, max_tokens=0, prompt_logprobs=3).prompt_logprobs == expected
    assert staged.embed(PROMPT) == whole.embed(PROMPT)


def test_what_cannot_be_is_refused(whole: LLM, folder: Path) -> None:
    for wrong in (GenerationRequest([1], 1, pooling="mean"), GenerationRequest([1], 0, pooling="max")):  # type: ignore[arg-type]
        with pytest.raises(SettingError, match="pooling"):
            wrong.check(whole.model.config)
    with pytest.raises(SettingError, match="overlap"):
        LLM(folder, dtype="float32", chunk=64, overlap=1).generate(PROMPT, prompt_logprobs=0)
