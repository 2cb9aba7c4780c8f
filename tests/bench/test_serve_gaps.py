"""Laws of waiting."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.serve_gaps import Gap, GapSummary, gaps_of, percentile

VALUES = st.lists(st.floats(0.001, 1e4), min_size=1, max_size=60)


def test_gaps_lie_between_tokens() -> None:
    assert gaps_of([1.0, 1.5, 4.0]) == [Gap(1.0, 1.5), Gap(1.5, 4.0)]
    assert [gap.seconds for gap in gaps_of([1.0, 1.5, 4.0])] == [0.5, 2.5]
    assert gaps_of([1.0]) == gaps_of([]) == []


@given(waits=VALUES)
def test_gaps_add_up(waits: list[float]) -> None:
    gaps = gaps_of(list(accumulate(waits, initial=0.0)))
    assert sum(gap.seconds for gap in gaps) == pytest.approx(sum(waits))
    assert all(one.end_s == other.start_s for one, other in pairwise(gaps))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 1, False), (1, 3, True), (2.5, 2.6, True), (0, 9, True), (3, 4, True), (4, 5, False), (0, 2, False)],
)
def test_a_gap_overlaps_a_time_that_it_shares_a_part_of(start: float, end: float, expected: bool) -> None:
    assert Gap(2.0, 4.0).overlaps(start, end) is expected


def test_percentiles_of_known_values() -> None:
    hundred = [float(value) for value in range(100, 0, -1)]
    assert [percentile(hundred, percent) for percent in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([3.0], 99) == 3.0
    # One wait in a hundred is what p99 leaves out; two are not.
    assert percentile([1.0] * 99 + [60.0], 99) == 1.0
    assert percentile([1.0] * 98 + [60.0] * 2, 99) == 60.0
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


@given(values=VALUES, percent=st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], percent: int
) -> None:
    found = percentile(values, percent)
    assert found in values
    assert 100 * sum(value <= found for value in values) >= percent * len(values)
    assert 100 * sum(value < found for value in values) < percent * len(values)


@given(values=VALUES)
def test_a_summary_is_in_order(values: list[float]) -> None:
    summary = GapSummary.of([Gap(0.0, value) for value in values])
    assert min(values) <= summary.p50_s <= summary.p95_s <= summary.p99_s <= max(values)
