"""A step is a transaction; a request that cannot be run is refused before any work."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.space import CacheSpace
from penstock.engine.run import Run
from penstock.engine.sampler import SamplingParams
from penstock.errors import (
    CacheFullError,
    ContextLengthError,
    MemoryExhaustedError,
    PromptError,
    SettingError,
)
from penstock.models.decoder import Decoder
from penstock.plan import ChunkedPrefillConfig
from tests.engine.test_same_bits import assert_same_bits
from tests.oracle import canon_of, load_model, make_oracle, random_prompt, run_prompt


def small_model() -> Decoder:
    return load_model(make_oracle("llama").folder)


def start(prompt: list[int], chunk_size: int = 0, **settings: Any) -> Run:
    model = small_model()
    settings.setdefault("max_tokens", 8)
    return Run(model, prompt, config=ChunkedPrefillConfig(chunk_size), canon=canon_of(model), **settings)


class Failing:
    """Fails a pass in some layer, after others have written their keys and values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls_left: int | None = None
        kernels = small_model().kernels
        real = kernels.silu_and_mul

        def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
            if self.calls_left is not None:
                if self.calls_left == 0:
                    self.calls_left = None
                    raise RuntimeError("injected")
                self.calls_left -= 1
            return real(gate_up)

        monkeypatch.setattr(kernels, "silu_and_mul", silu_and_mul)


def test_no_token_is_run_twice_or_skipped() -> None:
    for chunk_size in (0, 1, 7, 64, 299, 300, 512):
        run = start(random_prompt(300), chunk_size)
        covered = []
        while not run.generated:
            covered.append(run.step().span)
        assert covered[0].start == 0
        assert all(a.end == b.start for a, b in pairwise(covered))
        assert run.cache.blocks.num_tokens == 300
        run.step()
        assert run.cache.blocks.num_tokens == 301


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_failed_steps_leave_no_trace(data: st.DataObject) -> None:
    """Any step may fail in any layer, any number of times: the rest goes on as if it had not happened."""
    prompt = random_prompt(200)
    chunk_size = data.draw(st.sampled_from([0, 31, 64, 100]))
    with pytest.MonkeyPatch.context() as monkeypatch:
        failing = Failing(monkeypatch)
        run = start(prompt, chunk_size)
        while len(run.generated) < 4:
            before = (list(run.tokens), run.cache.blocks.num_tokens, run.job.progress)
            failing.calls_left = data.draw(st.one_of(st.none(), st.integers(0, 1)))
            injected = failing.calls_left is not None
            try:
                run.step()
            except RuntimeError:
                assert injected
                assert (list(run.tokens), run.cache.blocks.num_tokens, run.job.progress) == before
                run.space.blocks.check_integrity()
            failing.calls_left = None
    expected = run_prompt(small_model(), prompt, num_tokens=4)
    assert run.generated == expected.generated
    assert run.logits is not None
    assert expected.logits is not None
    assert torch.equal(run.logits, expected.logits)


def test_a_failed_chunk_is_run_again_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch)
    run = start(random_prompt(300), 100)
    run.step()
    failing.calls_left = 0
    with pytest.raises(RuntimeError, match="injected"):
        run.step()
    while not run.generated:
        run.step()
    assert_same_bits(run, run_prompt(small_model(), random_prompt(300)))


def limit_rows(monkeypatch: pytest.MonkeyPatch, most: int, error: Exception) -> None:
    """Memory for passes of up to `most` rows only."""
    canon_of(small_model())  # probed while its kernels are whole
    kernels = small_model().kernels
    real = kernels.silu_and_mul

    def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.shape[0] > most:
            raise error
        return real(gate_up)

    monkeypatch.setattr(kernels, "silu_and_mul", silu_and_mul)


@pytest.mark.parametrize("overlap", [0, 5])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=repr,
)
def test_running_out_of_memory_halves_the_chunk(error: Exception, overlap: int) -> None:
    model, prompt = small_model(), random_prompt(300)
    with pytest.MonkeyPatch.context() as monkeypatch:
        limit_rows(monkeypatch, 40, error)
        run = Run(
            model, prompt, config=ChunkedPrefillConfig(100, overlap), canon=canon_of(model), max_tokens=4
        )
        spans = []
        while not run.generated:
            spans.append(run.step().span)
    assert run.num_shrinks == 2
    assert {len(span) for span in spans} == {25}
    assert not run.is_reading
    assert_same_bits(run, run_prompt(model, prompt))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: misaligned address"),
        ValueError("CUDA error: out of memory"),
    ],
    ids=repr,
)
def test_other_errors_are_not_taken_for_a_lack_of_memory(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_rows(monkeypatch, 40, error)
    run = start(random_prompt(300), 100)
    with pytest.raises(type(error), match=str(error)):
        run.step()
    assert run.num_shrinks == 0


def test_no_memory_for_a_single_token_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_rows(monkeypatch, 0, MemoryError())
    run = start(random_prompt(300), 100)
    with pytest.raises(MemoryExhaustedError, match="one token"):
        run.step()
    assert run.cache.blocks.num_tokens == 0
    run.space.blocks.check_integrity()


def test_cancel_frees_everything() -> None:
    run = start(random_prompt(300), 64)
    run.step()
    assert run.space.blocks.num_free < run.space.blocks.num_blocks
    run.cancel()
    assert run.space.blocks.num_free == run.space.blocks.num_blocks
    run.space.blocks.check_integrity()
    assert run.finish_reason == "cancelled"
    with pytest.raises(SettingError, match="has ended"):
        run.step()


def test_ends_at_max_tokens_and_at_end_of_sequence() -> None:
    prompt = random_prompt(50)
    run = start(prompt, max_tokens=5)
    while run.finish_reason is None:
        run.step()
    assert (run.finish_reason, len(run.generated)) == ("length", 5)
    third = run.generated[2]
    run = start(prompt, max_tokens=5, eos_ids=frozenset([third]))
    while run.finish_reason is None:
        run.step()
    assert run.finish_reason == "stop"
    assert run.generated[-1] == third
    assert run.space.blocks.num_free == run.space.blocks.num_blocks


def test_too_long_for_the_context() -> None:
    with pytest.raises(ContextLengthError, match=r"4000 tokens and max_tokens is 97.*4097.*4096"):
        start(random_prompt(4000), max_tokens=97)
    assert start(random_prompt(4000), max_tokens=96).finish_reason is None


@pytest.mark.parametrize("prompt", [[], [211], [-1, 5]])
def test_bad_prompts(prompt: list[int]) -> None:
    with pytest.raises(PromptError):
        start(prompt)


@pytest.mark.parametrize("max_tokens", [-1, 1.5, True, None])
def test_bad_max_tokens(max_tokens: Any) -> None:
    with pytest.raises(SettingError, match="max_tokens"):
        start([1, 2], max_tokens=max_tokens)


def test_cache_too_small_is_an_error_and_changes_nothing() -> None:
    space = CacheSpace.for_tokens(small_model(), 128)
    with pytest.raises(CacheFullError):
        start(random_prompt(300), 100, space=space)
    assert space.blocks.num_free == space.blocks.num_blocks
    space.blocks.check_integrity()


def test_overlap_covers_the_prompt() -> None:
    model = small_model()
    run = Run(
        model, random_prompt(300), config=ChunkedPrefillConfig(64, 16), canon=canon_of(model), max_tokens=2
    )
    spans = []
    while not run.generated:
        spans.append(run.step().span)
    assert [span.start for span in spans] == [index * 48 for index in range(len(spans))]
    assert spans[-1].end == 300
    assert run.cache.blocks.num_tokens == 300


def test_sampling_is_repeatable_across_chunks() -> None:
    params = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=3)
    answers = []
    for chunk_size in (0, 7, 64):
        run = start(random_prompt(100), chunk_size, sampling=params, max_tokens=20)
        while run.finish_reason is None:
            run.step()
        answers.append(run.generated)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_blocks"), [(1, 0, 1), (1, 64, 1), (1, 65, 2), (64, 1, 1), (65, 1, 2)]
)
def test_a_run_has_room_for_its_tokens_and_no_more(length: int, max_tokens: int, num_blocks: int) -> None:
    """The last token is never run."""
    run = start(random_prompt(length), max_tokens=max_tokens)
    assert run.space.blocks.num_blocks == num_blocks


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("overlap", [0, 8])
def test_a_run_has_a_state_to_read_and_one_for_each_step_to_write(depth: int, overlap: int) -> None:
    model = load_model(make_oracle("qwen3_5_text").folder)
    config = ChunkedPrefillConfig(64, overlap)
    run = Run(model, random_prompt(100), config=config, canon=canon_of(model), depth=depth)
    assert run.space.slots is not None
    assert run.space.slots.num_slots == (4 if overlap else 2) + depth - 1
