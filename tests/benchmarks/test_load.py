"""Requests under load: what arrives when, what follows from the stamps, and the suite on a tiny model."""

import argparse
from typing import Any

import pytest

from benchmarks.harness import OURS, RATIOS, Bench
from benchmarks.suites import load
from benchmarks.suites.load import (
    CAPACITY,
    READY,
    SCENARIOS,
    STALL,
    VLLM,
    Size,
    Watched,
    arriving,
    bars,
    compare,
)
from tests.benchmarks.gpu_tiny import TINY
from tests.benchmarks.made_up import results_of

SMALL = Size(
    bursts=((4, 64, 4),),
    streams=(2, 32, 24),
    long=(300, 2),
    settle_tokens=2,
    request=(64, 4),
    num_saturating=4,
    num_varied=4,
    varied=((10, 200), (2, 8)),
    max_running=4,
    cache_tokens=2048,
    load_s=1.0,
    rates=(4.0, 8.0),
)


def test_as_many_arrive_in_a_second_as_are_asked_for() -> None:
    found = arriving([(0.0, 10, 2)] * 50, 5.0, seed=3)
    times = [at for at, _, _ in found if at is not None]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(50 / 5.0)
    assert arriving([(0.0, 10, 2)] * 50, 5.0, seed=3) == found


def test_gaps_are_those_that_reach_into_the_time() -> None:
    run = Watched((0.0, 1.0), ((0.5, 1.0, 3.0), (4.0, 4.5)))
    assert run.gaps_ms(1.5, 3.5) == [2000.0]
    assert run.gaps_ms() == [500.0, 2000.0, 500.0]
    assert run.first_ms() == [500.0, 3000.0]
    assert run.whole_ms() == [3000.0, 3500.0]
    assert run.seconds == 4.5


def test_every_scenario_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PLAN", TINY)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options: dict[str, Any] = {"shapes": "8B", "budgets": (128,), "device": "cpu", "repeats": 1}
    options |= {"cases": SCENARIOS, "strict": False, "vllm": None, "load_seconds": None}
    results = results_of("load")
    load.measure(argparse.Namespace(**options), Bench(results, lambda line: None), SMALL)
    sections = {figure.section for figure in results.figures}
    assert {f"{STALL}, budget 128", f"{CAPACITY}, budget 128", READY} <= sections
    assert "vLLM cannot be imported: it was not measured" in results.notes
    assert all(value > 0 for figure in results.figures for value in figure.values)


@pytest.mark.parametrize(("ours", "theirs", "is_met"), [(1.0, 1.1, True), (1.2, 1.1, False)])
def test_what_is_slower_than_vllm_misses_its_bar(ours: float, theirs: float, is_met: bool) -> None:
    results = results_of("load")
    for system, value in ((OURS, ours), (VLLM, theirs)):
        results.add_row("varied, budget 2,048", {"next token p50": ("ms", value)}, system, 0)
    compare(results)
    (ratio,) = results.of(RATIOS)
    assert ratio.median == pytest.approx(ours / theirs)
    (bar,) = bars(results)
    assert bar.is_met is is_met
