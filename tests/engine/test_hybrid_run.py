"""A hybrid's step is a transaction over blocks and states; running out of memory keeps to the grid where it can."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.engine.run import Run
from penstock.errors import MemoryExhaustedError
from penstock.plan import STATE_GRID, ChunkedPrefillConfig
from tests.engine.hybrids import (
    assert_all_close,
    assert_all_equal,
    assert_all_free,
    hybrid,
    keys_and_values_of,
    states_of,
)
from tests.oracle import canon_of, random_prompt, run_prompt

NAMES = ("qwen3_5", "qwen3_5, state in the last layer", "qwen3_next")
KERNELS = ("causal_conv", "gated_delta_rule", "gated_delta_steps", "gated_norm", "silu_and_mul")
PROMPT = random_prompt(450)


def start(name: str, chunk_size: int, overlap: int = 0, **settings: Any) -> Run:
    model = hybrid(name)
    settings.setdefault("max_tokens", 8)
    config = ChunkedPrefillConfig(chunk_size, overlap)
    return Run(model, settings.pop("prompt", PROMPT), config=config, canon=canon_of(model), **settings)


def contents(run: Run) -> list[torch.Tensor]:
    """Logits, and all that the cache holds of the prompt, after its first token was sampled."""
    assert run.logits is not None
    assert run.cache.num_tokens == run.prompt_length
    cached = keys_and_values_of(run.space, run.cache, run.prompt_length)
    return [run.logits, *cached, *states_of(run.space, run.cache)]


def whole(name: str) -> list[torch.Tensor]:
    return contents(run_prompt(hybrid(name), PROMPT))


class InjectedError(RuntimeError):
    """Of a kernel that was made to fail."""


class Failing:
    """Fails the pass in one of its kernels' calls, before or after that has written what it writes."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls_left: int | None = None
        self.is_late = False
        canon_of(hybrid(name))  # probed while its kernels are whole
        kernels = hybrid(name).kernels
        for kernel in KERNELS:
            monkeypatch.setattr(kernels, kernel, self._wrapped(getattr(kernels, kernel)))

    def _wrapped(self, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def kernel(*parts: Any, **named: Any) -> torch.Tensor:
            fails = self.calls_left == 0
            if self.calls_left is not None:
                self.calls_left -= 1
            if fails and not self.is_late:
                raise InjectedError
            out = real(*parts, **named)
            if fails:
                raise InjectedError
            return out

        return kernel


def trace(run: Run) -> tuple[Any, ...]:
    """Everything of a request but tensors."""
    state = run.cache.state
    assert state is not None
    assert run.space.slots is not None
    return (
        list(run.tokens),
        run.cache.num_tokens,
        run.cache.blocks.extents,
        run.space.blocks.num_free,
        state.positions,
        state.slot,
        run.space.slots.num_free,
        run.job.progress,
        run.is_reading,
        run.num_shrinks,
    )


def held(run: Run) -> list[torch.Tensor]:
    """What no step may change: the state where the sequence stands, and all of tokens that are not run again."""
    state = run.cache.state
    assert state is not None
    settled = min(state.positions, default=0)
    return [*states_of(run.space, run.cache), *keys_and_values_of(run.space, run.cache, settled)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_failed_steps_leave_no_trace(data: st.DataObject) -> None:
    """Any step may fail in any layer, with some slots written and some half: the rest goes on to the same bits."""
    name = data.draw(st.sampled_from(NAMES))
    chunks = data.draw(st.sampled_from([(0, 0), (64, 0), (100, 0), (128, 64), (192, 32), (100, 37)]))
    num_calls = 45 if name == "qwen3_next" else 20  # about as many as a pass makes
    with pytest.MonkeyPatch.context() as monkeypatch:
        failing = Failing(name, monkeypatch)
        run = start(name, *chunks)
        while len(run.generated) < 3:
            before, tensors = trace(run), held(run)
            injected = data.draw(st.one_of(st.none(), st.integers(0, num_calls)))
            failing.calls_left, failing.is_late = injected, data.draw(st.booleans())
            try:
                run.step()
            except InjectedError:
                assert injected is not None
                assert trace(run) == before
                assert_all_equal(held(run), tensors)
                assert run.space.slots is not None
                run.space.slots.check_integrity()
                run.space.blocks.check_integrity()
            failing.calls_left = None
    expected = run_prompt(hybrid(name), PROMPT, chunk_size=chunks[0], overlap=chunks[1], num_tokens=3)
    assert run.generated == expected.generated
    assert run.logits is not None
    assert expected.logits is not None
    assert torch.equal(run.logits, expected.logits)
    assert_all_equal(states_of(run.space, run.cache), states_of(expected.space, expected.cache))
    run.cancel()
    assert_all_free(run.space)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_can_fail(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in the middle of a step, and the request is cancelled then: all is given back."""
    run = start("qwen3_5", 128, 64)
    run.step()
    while kernel == "gated_delta_steps" and not run.generated:
        run.step()
    before = trace(run)

    def fail(*parts: Any, **named: Any) -> torch.Tensor:
        raise InjectedError

    with monkeypatch.context() as context:
        context.setattr(run.model.kernels, kernel, fail)
        with pytest.raises(InjectedError):
            run.step()
    assert trace(run) == before
    run.cancel()
    assert_all_free(run.space)


class Limited:
    """Memory for passes of up to `most` rows only."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 1 << 30
        canon_of(hybrid(name))  # probed while its kernels are whole
        kernels = hybrid(name).kernels
        real = kernels.add_norm
        calls = 0

        # Once in four: layers before have written their states by then.
        def add_norm(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal calls
            calls += 1
            if x.shape[0] > self.most and calls % 4 == 0:
                raise MemoryError
            return real(x, *rest)

        monkeypatch.setattr(kernels, "add_norm", add_norm)


@pytest.mark.parametrize("overlap", [0, 64, 32])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_running_out_of_memory_halves_the_chunk(name: str, overlap: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        limited = Limited(name, monkeypatch)
        limited.most = 64
        run = start(name, 256, overlap)
        spans = []
        while not run.generated:
            spans.append(run.step().span)
    assert run.num_shrinks == 2
    assert [span.end for span in spans] == [*range(64, 450, 64), 450]
    assert run.lies_on(STATE_GRID)
    assert_all_equal(contents(run), whole(name))
    run.cancel()
    assert_all_free(run.space)


@pytest.mark.parametrize(("overlap", "is_on_grid"), [(0, True), (64, True), (32, False)])
def test_out_of_memory_after_some_chunks(overlap: int, is_on_grid: bool) -> None:
    """A state that was kept off the grid, where the next chunk was to begin, is not forgotten."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        limited = Limited("qwen3_5", monkeypatch)
        run = start("qwen3_5", 256, overlap)
        first = run.step().span
        limited.most = 128
        second = run.step().span
        assert (first.end, second.start, second.end) == (256, 256, 384)
        while not run.generated:
            run.step()
    assert run.num_shrinks == 1
    assert run.lies_on(STATE_GRID) == is_on_grid
    (assert_all_equal if is_on_grid else assert_all_close)(contents(run), whole("qwen3_5"))


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    chunks=st.sampled_from([(0, 0), (100, 0), (256, 0), (256, 64), (256, 32), (192, 100), (128, 64)]),
    limits=st.lists(st.sampled_from([1 << 30, 256, 128, 64, 40]), max_size=4),
)
@example(name="qwen3_5", chunks=(256, 32), limits=[1 << 30, 128])
@example(name="qwen3_5", chunks=(256, 32), limits=[128])
@example(name="qwen3_5", chunks=(256, 64), limits=[1 << 30, 64, 40])
def test_memory_may_run_out_at_any_step(name: str, chunks: tuple[int, int], limits: list[int]) -> None:
    """The bits are those of the whole prompt whenever the schedule says that it lies on the grid."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        limited = Limited(name, monkeypatch)
        run = start(name, *chunks)
        coming = iter(limits)
        while not run.generated:
            limited.most = min(next(coming, limited.most), limited.most)
            run.step()
    (assert_all_equal if run.lies_on(STATE_GRID) else assert_all_close)(contents(run), whole(name))
    assert not run.is_reading
    run.cancel()
    assert_all_free(run.space)


@pytest.mark.parametrize("overlap", [0, 32])
def test_no_memory_for_a_single_token_is_a_clear_error(overlap: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        limited = Limited("qwen3_5", monkeypatch)
        run = start("qwen3_5", 128, overlap)
        run.step()
        limited.most = 0
        with pytest.raises(MemoryExhaustedError, match="one token after 128"):
            run.step()
        assert run.cache.num_tokens == 128
        limited.most = 1 << 30
        while not run.generated:
            run.step()
    assert_all_close(contents(run), whole("qwen3_5"))
    run.cancel()
    assert_all_free(run.space)


def test_no_memory_for_a_decode_is_a_clear_error() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        limited = Limited("qwen3_5", monkeypatch)
        run = start("qwen3_5", 128)
        while not run.generated:
            run.step()
        before = trace(run)
        limited.most = 0
        with pytest.raises(MemoryExhaustedError, match="one token after 450"):
            run.step()
        assert trace(run) == before
    run.cancel()
    assert_all_free(run.space)


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
@pytest.mark.parametrize("overlap", [0, 64])
def test_cancel_frees_everything(overlap: int, num_steps: int) -> None:
    run = start("qwen3_5", 128, overlap)
    for _ in range(num_steps):
        run.step()
    assert run.space.slots is not None
    assert (run.space.slots.num_free < run.space.slots.num_slots) == (num_steps > 0)
    run.cancel()
    assert_all_free(run.space)


def test_ends_at_max_tokens_and_at_end_of_sequence() -> None:
    run = start("qwen3_5", 128, max_tokens=5)
    while run.finish_reason is None:
        run.step()
    assert (run.finish_reason, len(run.generated)) == ("length", 5)
    assert_all_free(run.space)
    third = run.generated[2]
    run = start("qwen3_5", 128, max_tokens=5, eos_ids=frozenset([third]))
    while run.finish_reason is None:
        run.step()
    assert run.finish_reason == "stop"
    assert run.generated[-1] == third
    assert_all_free(run.space)


@pytest.mark.parametrize(
    ("chunk", "overlap", "num_tokens", "keeps"),
    [
        (128, 0, 1000, True),
        (128, 64, 1000, True),
        (0, 0, 1000, True),
        (100, 0, 100, True),  # the whole prompt in one chunk
        (100, 0, 101, False),
        (128, 32, 1000, False),
    ],
)
def test_a_state_cut_inside_a_block_may_change_bits(
    chunk: int, overlap: int, num_tokens: int, keeps: bool
) -> None:
    prompt = random_prompt(num_tokens)
    run = run_prompt(hybrid("qwen3_5"), prompt, chunk_size=chunk, overlap=overlap)
    assert run.lies_on(STATE_GRID) == keeps


def test_bits_are_not_promised_once_a_block_was_halved() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        limited = Limited("qwen3_5", monkeypatch)
        run = start("qwen3_5", 128)
        for most, keeps in ((64, True), (32, False)):
            limited.most = most
            run.step()
            assert run.lies_on(STATE_GRID) == keeps
