"""Memory that runs out, at any step: the answer is the same, the reason is recorded, nobody else loses anything."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from penstock.engine.events import Failed, Finished, GenerationRequest
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.errors import MemoryExhaustedError
from penstock.plan.policy import ScheduleConfig
from tests.byte_models import model_of_bytes
from tests.engine.listening import Listening
from tests.oracle import random_prompt, run_prompt

Forward = Callable[[object, object], torch.Tensor | None]


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32")  # automatic chunks


@pytest.fixture
def service(llm: LLM) -> Iterator[Service]:
    schedule = ScheduleConfig(chunk_size=192, grid=llm.chunk.grid, max_running=4, auto_chunk=True)
    with Service(llm, ServiceConfig(schedule, 4096)) as service:
        yield service
        service.check_integrity()
        assert service.is_healthy


class Failing:
    """A forward pass that runs out of memory at the k-th call that reads a part of a prompt, after it has written to
    the cache."""

    def __init__(self, llm: LLM, patch: pytest.MonkeyPatch, fails_at: int | None = None) -> None:
        self.num_reading = 0
        self._fails_at = fails_at
        self._forward: Forward = llm.model.forward  # type: ignore[assignment]
        patch.setattr(llm.model, "forward", self.forward)

    def forward(self, batch: object, caches: object) -> torch.Tensor | None:
        logits = self._forward(batch, caches)
        if batch.num_tokens > 2:  # type: ignore[attr-defined]
            self.num_reading += 1
            if self.num_reading - 1 == self._fails_at:
                raise MemoryError
        return logits


@pytest.mark.parametrize("fails_at", range(3))
def test_chunks_that_were_said_are_halved_and_end_where_they_were_to(llm: LLM, fails_at: int) -> None:
    prompt, ends = random_prompt(900, 256), [320, 640, 900]
    whole = run_prompt(llm.model, prompt, num_tokens=4)
    with pytest.MonkeyPatch.context() as patch:
        Failing(llm, patch, fails_at)
        run = run_prompt(llm.model, prompt, num_tokens=4, chunk_ends=ends)
    assert run.generated == whole.generated
    assert run.num_shrinks == 1
    cuts = [chunk.end for chunk in run.chunks]
    assert {*ends} <= {*cuts}
    for chunk in run.chunks:
        is_halved = len(chunk) <= 160
        assert is_halved == (chunk.start >= [0, *ends][fails_at])
        assert (chunk.rule == "halved") == (is_halved and chunk.end not in ends)


def test_at_every_step_of_a_prefill_the_answer_is_the_same(llm: LLM) -> None:
    prompt, num_tokens = random_prompt(1700, 256), 6
    whole = llm.generate(prompt, max_tokens=num_tokens)
    num_chunks = whole.prefill.chunks
    assert num_chunks == len(whole.prefill.records) == 4
    for fails_at in range(num_chunks):
        with pytest.MonkeyPatch.context() as patch:
            Failing(llm, patch, fails_at)
            result = llm.generate(prompt, max_tokens=num_tokens)
        assert result.token_ids == whole.token_ids, fails_at
        assert result.prefill.reason.endswith("; halved 1x when memory ran out")
        records = result.prefill.records
        assert [record.rule for record in records[:fails_at]] == ["default"] * fails_at
        failed = whole.prefill.records[fails_at]
        half = -(-len(failed) // 2)
        assert len(records[fails_at]) <= max(half, 64) + llm.chunk.grid
        assert records[fails_at].rule in ("halved", "balanced")
        assert [record.start for record in records] == [0, *(record.end for record in records[:-1])]
        assert records[-1].end == 1700
        assert result.prefill.same_bits == whole.prefill.same_bits


def test_at_every_step_of_a_service_every_answer_is_the_same(llm: LLM, service: Service) -> None:
    """One stream decodes while a prompt is read: what fails is a chunk, or a chunk and a decode."""
    long, short = random_prompt(700, 256, 1), random_prompt(40, 256, 2)
    expected = [llm.generate(long, max_tokens=4).token_ids, llm.generate(short, max_tokens=12).token_ids]
    fails_at, num_reading = 0, 1
    while fails_at < num_reading:
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(llm, patch, fails_at)
            listeners = [Listening(), Listening()]
            ids = [
                service.submit(request, listener)
                for request, listener in zip(
                    (
                        GenerationRequest(short, 12, ignore_eos=True, cache_salt=str(fails_at)),
                        GenerationRequest(long, 4, ignore_eos=True, cache_salt=str(fails_at)),
                    ),
                    reversed(listeners),
                    strict=True,
                )
            ]
            for listener, tokens in zip(listeners, expected, strict=True):
                assert isinstance(listener.end, Finished), fails_at
                assert tuple(listener.tokens) == tokens, fails_at
            num_reading = failing.num_reading
        for request_id in ids:
            records = service.explain(request_id)
            assert records is not None
            assert [record.start for record in records] == [0, *(record.end for record in records[:-1])]
        fails_at += 1
    assert num_reading >= 4


def test_at_the_smallest_size_only_that_request_fails(llm: LLM, service: Service) -> None:
    """No pass with a certain token in it has memory, however few tokens it has; the streams beside it go on, the one
    that came later, too."""
    poison = 7
    bad = [*(token for token in random_prompt(100, 256, 5) if token != poison), poison]
    clean = [token for token in random_prompt(100, 256, 6) if token != poison]
    alone = llm.generate(clean, max_tokens=30).token_ids
    assert poison not in alone
    forward: Forward = llm.model.forward  # type: ignore[assignment]

    def fail_on_poison(batch: object, caches: object) -> torch.Tensor | None:
        if poison in batch.token_ids[: batch.num_tokens].tolist():  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("no memory for this one")
        return forward(batch, caches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.model, "forward", fail_on_poison)
        listeners = [Listening() for _ in range(3)]
        service.submit(GenerationRequest(clean, 30, ignore_eos=True), listeners[0])
        service.submit(GenerationRequest(bad, 4, ignore_eos=True), listeners[1])
        service.submit(GenerationRequest(clean, 30, ignore_eos=True), listeners[2])
        end = listeners[1].end
        assert isinstance(end, Failed)
        assert isinstance(end.error, MemoryExhaustedError)
        assert f"no memory left to run one token after {len(bad) - 1}" in str(end.error)
        for listener in (listeners[0], listeners[2]):
            assert isinstance(listener.end, Finished)
            assert tuple(listener.tokens) == alone


def test_no_memory_for_one_token_ends_a_run_with_a_clear_error(llm: LLM) -> None:
    def fail(batch: object, caches: object) -> torch.Tensor | None:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.model, "forward", fail)
        with pytest.raises(MemoryExhaustedError, match="no memory left to run one token after 0"):
            llm.generate(random_prompt(600, 256), max_tokens=2)
    assert llm.generate(random_prompt(600, 256), max_tokens=2).finish_reason == "length"
