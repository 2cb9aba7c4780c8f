"""The time that a prompt will take is learned from its chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.progress import PrefillClock, Progress


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 500)), min_size=2, max_size=8),
    st.integers(1, 5000),
    st.floats(1e-4, 1e-2),
    st.floats(0, 1e-5),
)
def test_costs_that_grow_with_the_position_are_found(
    parts: list[tuple[int, int]], num_left: int, base: float, slope: float
) -> None:
    """A token costs base + slope * its position. Before any chunk, some tokens may be in the cache."""

    def seconds(start: int, end: int) -> float:
        return (end - start) * (base + slope * (start + end) / 2)

    num_cached, num_read = (sum(sizes) for sizes in zip(*parts, strict=True))
    end = num_cached + num_read
    clock = PrefillClock(end + num_left, len(parts) + 1)
    position, elapsed_s = 0, 0.0
    for num_skipped, size in parts:
        position += num_skipped
        clock.skip(position)
        took_s = seconds(position, position + size)
        clock.record(position, position + size, took_s)
        position, elapsed_s = position + size, elapsed_s + took_s
    progress = clock.progress()
    assert (progress.num_done, progress.num_tokens, progress.num_cached) == (end, end + num_left, num_cached)
    assert (progress.chunks_done, progress.num_chunks) == (len(parts), len(parts) + 1)
    assert progress.elapsed_s == pytest.approx(elapsed_s)
    assert progress.tokens_per_s == pytest.approx(num_read / elapsed_s)
    assert progress.eta_s == pytest.approx(seconds(end, end + num_left), rel=1e-4)


def test_before_the_first_chunk_nothing_is_known() -> None:
    clock = PrefillClock(100, 4)
    assert clock.progress() == Progress(0, 100, 0, 4, 0.0, None, 0)
    assert clock.progress().tokens_per_s == 0.0
    clock.skip(30)
    clock.skip(20)  # which lies before
    assert clock.progress() == Progress(30, 100, 0, 4, 0.0, None, 30)
    clock.record(30, 60, 3.0)
    assert clock.progress() == Progress(60, 100, 1, 4, 3.0, 40 * 0.1, 30)
    assert clock.progress().tokens_per_s == 10.0


def test_later_tokens_never_cost_less() -> None:
    clock = PrefillClock(100, 4)
    clock.record(0, 20, 6.0)
    clock.record(20, 40, 2.0)
    assert clock.progress().eta_s == pytest.approx(60 * 8 / 40)
    clock.record(40, 100, 6.0)
    assert clock.progress().eta_s == 0
