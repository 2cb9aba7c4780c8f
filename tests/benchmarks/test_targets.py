"""Which fixed chunk is the best one, which target is out of reach, and what is judged; and a whole run."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from benchmarks.harness import RATIOS, Bar, Results
from benchmarks.suites import targets
from benchmarks.suites.targets import (
    ARRIVALS,
    KEPT,
    LONE,
    OUT_OF_REACH,
    Arrival,
    Arrivals,
    Sizing,
    reading_gaps,
    share_within,
    sizings_of,
    sum_up,
)
from penstock.measure.growth import MeasurementError
from tests.benchmarks.made_up import results_of, run


def run_of(
    gaps: Sequence[float],
    first_token_s: float,
    index: int = 0,
    *,
    fixed: int | None = None,
    target_ms: int | None = None,
    decode_gap_s: float = 0.02,
    first_token: int = 7,
) -> Arrival:
    stamps = list(accumulate(gaps, initial=0.0))
    pairs = tuple(pairwise(stamps))
    sizing = Sizing(target_ms or fixed or 0, is_auto=target_ms is not None)
    return Arrival(sizing, index, first_token_s, first_token, decode_gap_s, pairs)


def gaps_with(num_late: int, late_s: float, num_all: int = 100, usual_s: float = 0.1) -> list[float]:
    return [usual_s] * (num_all - num_late) + [late_s] * num_late


def judged(runs: Sequence[Arrival]) -> tuple[Results, list[Bar]]:
    results = results_of("targets", targets_ms=[200], streams=4, prompt_tokens=8000)
    sum_up(Arrivals(list(runs)), results)
    return results, targets._bars(results)


FIXED = [
    run_of(gaps_with(0, 0.1), 30.0, fixed=8),
    run_of(gaps_with(5, 0.9), 22.0, fixed=64),  # just enough keep 200 ms
    run_of(gaps_with(6, 0.251), 18.0, fixed=128),  # just not enough
    run_of([0.5] * 20, 15.0, fixed=512),
]


def test_the_best_fixed_chunk_is_the_soonest_of_those_that_keep_the_target() -> None:
    results, _ = judged([*FIXED, run_of(gaps_with(5, 0.3), 20.0, target_ms=200)])
    (ratio,) = results.of(RATIOS)
    assert "auto over chunk 64" in ratio.system
    assert ratio.values == pytest.approx((20 / 22,))
    share, worst = results.of(KEPT)
    assert share.values == worst.values == pytest.approx((0.95,))


def test_a_gap_keeps_its_target_up_to_a_quarter_more() -> None:
    assert share_within([(0.0, 0.2499), (1.0, 1.2501)], 200) == 0.5
    auto = run_of(gaps_with(0, 0.0), 20.0, target_ms=200)
    runs = [run_of([0.2499] * 100, 9.0, fixed=256), run_of([0.2501] * 100, 8.0, fixed=512), auto]
    assert Arrivals(runs).best_fixed(200) == Sizing(256)


def test_gaps_of_all_rounds_count_and_times_are_compared_by_round() -> None:
    autos = [run_of(gaps_with(late, 0.9), 20.0 + i, i, target_ms=200) for i, late in enumerate((9, 0, 3))]
    fixed = [run_of(gaps_with(late, 0.9), 21.0, i, fixed=64) for i, late in enumerate((0, 9, 0))]
    results, _ = judged([*autos, *fixed])
    assert [figure.median for figure in results.of(KEPT)] == pytest.approx([0.96, 0.91])
    assert results.of(RATIOS)[0].values == pytest.approx((20 / 21, 1.0, 22 / 21))
    only, _ = judged([*autos, run_of(gaps_with(0, 0.9), 10.0, 1, fixed=64)])
    assert only.of(RATIOS)[0].values == pytest.approx((2.1,))  # of the round that both have


@pytest.mark.parametrize(
    ("fixed", "decode_gap_s", "auto_gap_s", "is_reachable"),
    [
        (8, 0.02, 0.3, False),  # not even the smallest chunk keeps it
        (32, 0.02, 0.3, True),  # nobody tried one so small
        (32, 0.26, 0.3, False),  # decoding alone does not keep it
        (32, 0.24, 0.3, True),
        (8, 0.02, 0.2, True),  # auto itself keeps it
    ],
)
def test_a_target_is_out_of_reach_only_where_that_is_known(
    fixed: int, decode_gap_s: float, auto_gap_s: float, is_reachable: bool
) -> None:
    runs = [
        run_of([0.3] * 9, 30.0, fixed=fixed, decode_gap_s=decode_gap_s),
        run_of([auto_gap_s] * 9, 30.0, target_ms=200, decode_gap_s=decode_gap_s),
    ]
    results, bars = judged(runs)
    assert bool(results.of(KEPT)) == is_reachable
    assert bool(results.of(OUT_OF_REACH)) != is_reachable
    assert [bar.is_met for bar in bars] == ([auto_gap_s <= 0.25] if is_reachable else [])


@pytest.mark.parametrize(
    ("auto", "missed"),
    [
        (run_of(gaps_with(5, 0.9), 23.1, target_ms=200), []),
        (run_of(gaps_with(6, 0.9), 23.1, target_ms=200), ["share of gaps that keep 200 ms"]),
        (
            run_of(gaps_with(0, 0.9), 23.2, target_ms=200),
            ["first token at 200 ms, auto over chunk 64, ratio"],
        ),
    ],
)
def test_bars_are_missed_one_by_one(auto: Arrival, missed: list[str]) -> None:
    results, bars = judged([*FIXED, auto])
    assert [bar.name for bar in bars if not bar.is_met] == missed
    assert all(fact.holds for fact in results.facts)


def test_first_tokens_must_be_the_same() -> None:
    results, _ = judged([*FIXED, run_of([0.1] * 9, 9.0, target_ms=200, first_token=8)])
    assert [fact.holds for fact in results.facts] == [False]


def test_prompts_alone_have_a_bar() -> None:
    results = results_of("targets", targets_ms=[])
    results.add(LONE, "2,048 tokens", "s", 3.16, system="auto")
    results.add(LONE, "2,048 tokens", "s", 3.0, system="chunk 512")
    results.add_ratio("auto over chunk 512", LONE, "2,048 tokens", "auto", "chunk 512")
    assert [bar.is_met for bar in targets._bars(results)] == [False]


def test_only_what_is_near_the_best_runs_again() -> None:
    autos = [run_of(gaps_with(0, 0.9), 20.0, target_ms=target) for target in (200, 300)]
    arrivals = Arrivals([*FIXED, *autos, run_of([0.3] * 9, 40.0, target_ms=50)])
    # No chunk keeps 50 ms. 64 keeps 200 ms, 128 nearly; 128 keeps 300 ms, and 512 is far from it.
    assert arrivals.contenders() == [
        Sizing(200, is_auto=True),
        Sizing(64),
        Sizing(128),
        Sizing(300, is_auto=True),
    ]


def test_automatic_sizes_run_among_fixed_ones() -> None:
    found = sizings_of((16, 32, 64, 128), (100, 200))
    assert [each.number for each in found] == [16, 32, 100, 64, 128, 200]
    assert [each.is_auto for each in found] == [False, False, True, False, False, True]


def test_gaps_are_those_of_the_steps_that_read() -> None:
    """Three chunks; the stream's token of the last step came just before the prompt's first token, or after it."""
    for jitter in (-0.001, 0.001):
        stamps = [-0.2, -0.1, 0.05, 0.3, 0.7, 1.2 + jitter, 1.25, 1.3]
        gaps = reading_gaps(stamps, 1.2, 3)
        assert [start for start, _ in gaps] == [0.05, 0.3, 0.7]
        assert gaps[-1][1] == 1.2 + jitter
    with pytest.raises(MeasurementError, match="ended too early"):
        reading_gaps([-0.1, 0.3], 1.2, 3)


QUICK = (
    "--targets 400 --fixed 32,64 --lone-lengths 70 --lone-chunks 32,64 --streams 2 --prompt 150 --repeats 2"
)


def test_a_whole_run(tiny: Path, tmp_path: Path) -> None:
    arguments = ["targets", "--model", str(tiny), "--dtype", "float32", *QUICK.split()]
    status, results = run(arguments, tmp_path / "targets.json")
    assert status == 0
    systems = {figure.system for figure in results.of(ARRIVALS)}
    assert systems == {"chunk 32", "chunk 64", "auto, 400 ms"}
    rounds = {figure.system: figure.rounds for figure in results.of(LONE)}
    assert rounds["Penstock, auto"] == (0, 1)
    assert set(rounds) == {"Penstock, auto", "Penstock, chunk 32", "Penstock, chunk 64"}
    assert results.traces["arrivals"][0]["target_ms"] == 400
    assert all(fact.holds for fact in results.facts)
    assert any("alone" in bar.name for bar in results.bars)
