"""Many users at once: laws of waiting, a whole run at a small size, and bars on made-up numbers."""

import threading
from dataclasses import asdict
from itertools import accumulate
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import RATIOS, Results
from benchmarks.suites import serve
from benchmarks.suites.serve import (
    ALL_DONE,
    AT_ONCE,
    BURSTS,
    IN_TURN,
    MIXED,
    STALLS,
    UNCHUNKED,
    VARIANTS,
    Stall,
    Watch,
    Workload,
    burst_name,
    fewest_equal,
    gaps_of,
    median_gap_s,
    percentile,
)
from penstock.engine.events import TokenGenerated
from penstock.errors import RequestFailedError
from penstock.measure.growth import MeasurementError
from tests.benchmarks.made_up import results_of, run

VALUES = st.lists(st.floats(0.001, 1e4), min_size=1, max_size=60)
QUICK = "--streams 2 --stream-prompt 8 --stream-tokens 20 --long-prompt 120 --long-tokens 2 --serve-chunk 32 "
QUICK += "--requests 3 --request-prompt 24 --request-tokens 4 --chunk 32 --dtype float32 --repeats 1"


@given(waits=VALUES)
def test_gaps_add_up(waits: list[float]) -> None:
    gaps = gaps_of(list(accumulate(waits, initial=0.0)))
    assert sum(end - start for start, end in gaps) == pytest.approx(sum(waits))
    assert len(gaps) == len(waits)
    assert gaps_of([1.0]) == gaps_of([]) == []


@given(values=VALUES, percent=st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], percent: int
) -> None:
    found = percentile(values, percent)
    assert found in values
    assert 100 * sum(value <= found for value in values) >= percent * len(values)
    assert 100 * sum(value < found for value in values) < percent * len(values)


def test_percentiles_of_known_values() -> None:
    hundred = [float(value) for value in range(100, 0, -1)]
    assert [percentile(hundred, percent) for percent in (50, 95, 99, 100)] == [50, 95, 99, 100]
    # One wait in a hundred is what p99 leaves out; two are not.
    assert percentile([1.0] * 99 + [60.0], 99) == 1.0
    assert percentile([1.0] * 98 + [60.0] * 2, 99) == 60.0
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


def stall(longest: float, seconds: float = 10.0) -> Stall:
    """Two streams that wait a tenth of a second, but once; the prompt is read for two seconds."""
    stamps = (-0.2, -0.1, 0.0, longest, longest + 0.1)
    return Stall((stamps, (-0.3, -0.2, -0.1)), 2.0, 7, seconds)


def test_gaps_while_the_prompt_is_read_are_those_that_reach_into_it() -> None:
    run = Stall(((-1.0, -0.5, 0.5, 1.9, 2.5, 9.0),), 2.0, 7, 10.0)
    assert run.gap_ms(100, while_read=True) == pytest.approx(1400)
    assert run.gap_ms(100, while_read=False) == pytest.approx(6500)
    assert run.gap_ms(1, while_read=True) == pytest.approx(600)
    assert run.num_outlasting == 1
    assert stall(1.0).num_outlasting == 0


def test_a_decode_step_is_told_where_nothing_else_runs() -> None:
    # While the second prompt is read the first stream waits long; when it has ended, the second decodes alone.
    first, second = [1.0, 5.0, 5.2, 5.4], [5.0, 5.2, 5.4, 5.41, 5.42]
    assert median_gap_s([first, second], 5.4) == pytest.approx(0.2)
    assert median_gap_s([first], -inf) == pytest.approx(0.2)
    # No time in which all decoded: all gaps.
    assert median_gap_s([[1.0, 2.0], [3.0, 5.0]], 2.0) == pytest.approx(1.5)


def test_answers_are_compared_in_the_worst_pair_of_runs() -> None:
    one, other = ((1, 2), (3, 4)), ((1, 2), (3, 5))
    assert fewest_equal([one, one], [one]) == 2
    assert fewest_equal([one, other], [one]) == 1


def test_a_watch_stamps_tokens_and_tells_failures() -> None:
    healthy: Any = SimpleNamespace(is_healthy=True)
    watch = Watch(2)
    for token in (5, 6):
        watch(TokenGenerated(token, ""))
    assert watch.settled.is_set()
    assert not watch.ended.is_set()
    watch._end("it ended with 'stop'")
    with pytest.raises(MeasurementError, match="ended with 'stop'"):
        watch.finish(healthy, 2)
    failed = Watch()
    failed._end(str(RequestFailedError("no room")))
    with pytest.raises(MeasurementError, match="no room"):
        failed.finish(healthy, 2)
    dead: Any = SimpleNamespace(is_healthy=False)
    with pytest.raises(MeasurementError, match="thread has died"):
        serve.wait(dead, threading.Event())


def test_a_whole_run(tiny: Path, tmp_path: Path) -> None:
    status, results = run(["serve", "--model", str(tiny), *QUICK.split(), "--check"], tmp_path / "serve.json")
    assert status == 0
    assert list(dict.fromkeys(figure.system for figure in results.of(STALLS))) == list(VARIANTS)
    bursts = {figure.system for figure in results.of(BURSTS)}
    assert bursts == {burst_name(each, strict) for each in (AT_ONCE, IN_TURN) for strict in (False, True)}
    assert len(results.of(RATIOS)) == 6
    assert [fact.name for fact in results.facts if not fact.holds] == []
    assert len(results.facts) == 2
    assert results.bars == []  # of other numbers than the default
    assert {each["variant"] for each in results.traces["stalls"]} == set(VARIANTS)
    assert all(len(stamps) == 20 for each in results.traces["stalls"] for stamps in each["stream_stamps_s"])


def made_up(longest: float = 1.0, seconds: float = 10.0, at_once: float = 4.0) -> Results:
    results = results_of("serve", workload=asdict(Workload()))
    for index in range(3):
        serve.add_stall(results, UNCHUNKED, index, stall(12.0), 1000)
        serve.add_stall(results, MIXED, index, stall(longest, seconds), 1000)
        for arrival, taken in ((AT_ONCE, at_once), (IN_TURN, 10.0)):
            results.add_row(BURSTS, {ALL_DONE: ("s", taken)}, arrival, index)
    serve.compare(results)
    return results


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"longest": 1.3}, [serve.STALL_RATIO]),
        ({"seconds": 11.2}, [serve.SPEED_RATIO]),
        ({"at_once": 5.1}, [serve.BURST_RATIO]),
    ],
)
def test_bars_are_missed_one_by_one(changes: dict[str, float], missed: list[str]) -> None:
    bars = serve._bars(made_up(**changes))
    assert len(bars) == 3
    assert [bar.name for bar in bars if not bar.is_met] == missed


def test_bars_are_for_the_default_numbers() -> None:
    results = made_up()
    assert len(serve._bars(results)) == 3
    results.settings["dtype"] = "float32"
    assert serve._bars(results) == []
