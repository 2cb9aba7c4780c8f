"""Where passes are recorded over a cache, requests that follow on each other take the same one."""

import pytest

from penstock import LLM
from penstock.engine.space import CacheSpace
from tests.byte_models import model_of_bytes
from tests.oracle import random_prompt


@pytest.fixture(params=["llama", "qwen3_5_text"])
def llm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> LLM:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path_factory.getbasetemp() / "recorded-home"))
    return LLM(
        model_of_bytes(request.param, tmp_path_factory.mktemp("models") / request.param), dtype="float32"
    )


def test_a_cache_is_taken_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(length, 256, length) for length in (100, 30, 90)]
    plain = [llm.generate(prompt, max_tokens=12).token_ids for prompt in prompts]
    assert llm._recorded is None
    monkeypatch.setattr(llm.model.kernels, "can_capture", True)
    spaces: list[CacheSpace | None] = []
    for prompt, expected in zip(prompts, plain, strict=True):
        assert llm.generate(prompt, max_tokens=12).token_ids == expected
        spaces.append(llm._recorded)
    assert spaces[0] is not None
    assert spaces == [spaces[0]] * 3


def test_streams_at_the_same_time_have_caches_of_their_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(60, 256, seed) for seed in (1, 2)]
    plain = [llm.generate(prompt, max_tokens=8).token_ids for prompt in prompts]
    monkeypatch.setattr(llm.model.kernels, "can_capture", True)
    monkeypatch.setattr("penstock.engine.llm._RECORDED_GRID", 64)
    streams = [llm.stream(prompt, max_tokens=8) for prompt in prompts]
    for pieces in zip(*streams, strict=False):
        assert len(pieces) == 2
    for stream, expected in zip(streams, plain, strict=True):
        for _ in stream:
            pass
        assert stream.result.token_ids == expected


def test_a_request_in_the_kept_cache_does_not_free_another_s(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.model.kernels, "can_capture", True)
    monkeypatch.setattr("penstock.engine.llm._RECORDED_GRID", 64)
    first = llm.stream(random_prompt(60, 256, 1), max_tokens=8)
    llm._kept = llm._keep(100)
    llm.generate(random_prompt(50, 256, 2), max_tokens=8)
    llm._kept = None
    second = llm.stream(random_prompt(60, 256, 3), max_tokens=8)
    assert first._run.space is not second._run.space
