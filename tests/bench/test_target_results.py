"""Which fixed chunk is the best one, which target is out of reach, and what is judged, on made-up results."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from penstock.bench.serve_gaps import Gap
from penstock.bench.target_bars import check_bars
from penstock.bench.target_benchmark import contenders, lone_contenders
from penstock.bench.target_report import render
from penstock.bench.target_results import ArrivalRun, LoneRun, TargetResults, TargetSettings
from penstock.bench.target_runs import reading_gaps
from penstock.bench.target_workload import Sizing, TargetWorkload
from penstock.engine.explain import ChunkRecord
from penstock.measure.growth import MeasurementError
from tests.bench.made_up import MACHINE

CHUNK = ChunkRecord(0, 64, 0, "latency", 0.1, 0.11, None)


def run_of(
    gaps: Sequence[float],
    first_token_s: float,
    round_index: int = 0,
    *,
    fixed: int | None = None,
    target_ms: int | None = None,
    decode_gap_s: float = 0.02,
    first_token: int = 7,
) -> ArrivalRun:
    stamps = accumulate(gaps, initial=0.0)
    return ArrivalRun(
        Sizing(fixed, target_ms),
        round_index,
        first_token_s,
        first_token,
        decode_gap_s,
        tuple(Gap(start, end) for start, end in pairwise(stamps)),
        (CHUNK,) * len(gaps),
    )


def results_of(
    arrivals: Sequence[ArrivalRun], lone: Sequence[LoneRun] = (), *, targets: tuple[int, ...] = (200,)
) -> TargetResults:
    settings = TargetSettings("model.gguf", "bfloat16", TargetWorkload(targets_ms=targets), 3)
    return TargetResults(MACHINE, settings, False, tuple(arrivals), tuple(lone), 60.0)


def gaps_with(num_late: int, late_s: float, num_all: int = 100, usual_s: float = 0.1) -> list[float]:
    return [usual_s] * (num_all - num_late) + [late_s] * num_late


FIXED = [
    run_of(gaps_with(0, 0.1), 30.0, fixed=8),
    run_of(gaps_with(5, 0.9), 22.0, fixed=64),  # just enough keep 200 ms
    run_of(gaps_with(6, 0.251), 18.0, fixed=128),  # just not enough
    run_of([0.5] * 20, 15.0, fixed=512),
]


def test_the_best_fixed_chunk_is_the_soonest_of_those_that_keep_the_target() -> None:
    auto = run_of(gaps_with(5, 0.3), 20.0, target_ms=200)
    (verdict,) = results_of([*FIXED, auto]).verdicts
    assert (verdict.best_fixed, verdict.is_reachable) == (64, True)
    assert verdict.share == pytest.approx(0.95)
    assert verdict.ratio is not None
    assert verdict.ratio.values == pytest.approx([20 / 22])


def test_a_gap_keeps_its_target_up_to_a_quarter_more() -> None:
    """A millisecond in a hundred gaps decides."""
    auto = run_of(gaps_with(0, 0.0), 20.0, target_ms=200)
    runs = [run_of([0.2499] * 100, 9.0, fixed=256), run_of([0.2501] * 100, 8.0, fixed=512), auto]
    (verdict,) = results_of(runs).verdicts
    assert verdict.best_fixed == 256


def test_gaps_of_all_rounds_count_and_times_are_compared_by_round() -> None:
    autos = [run_of(gaps_with(late, 0.9), 20.0 + i, i, target_ms=200) for i, late in enumerate((9, 0, 3))]
    fixed = [run_of(gaps_with(late, 0.9), 21.0, i, fixed=64) for i, late in enumerate((0, 9, 0))]
    (verdict,) = results_of([*autos, *fixed]).verdicts
    assert verdict.share == pytest.approx(0.96)
    assert verdict.worst_share == pytest.approx(0.91)
    assert verdict.best_fixed == 64
    assert verdict.ratio is not None
    assert verdict.ratio.values == pytest.approx([20 / 21, 1.0, 22 / 21])


def test_a_round_that_only_one_of_them_ran_is_compared_with_nothing() -> None:
    autos = [run_of(gaps_with(0, 0.9), 20.0, i, target_ms=200) for i in range(3)]
    (verdict,) = results_of([*autos, run_of(gaps_with(0, 0.9), 10.0, 1, fixed=64)]).verdicts
    assert verdict.ratio is not None
    assert verdict.ratio.values == pytest.approx([2.0])


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
    results = results_of(runs)
    (verdict,) = results.verdicts
    assert (verdict.is_reachable, verdict.best_fixed, verdict.ratio) == (is_reachable, None, None)
    judged = [bar for bar in check_bars(results) if "share of gaps" in bar.name]
    assert [bar.is_met for bar in judged] == ([auto_gap_s <= 0.25] if is_reachable else [])
    assert ("out of reach" in render(results).split("Each target")[1].split("A gap keeps")[0]) != is_reachable


@pytest.mark.parametrize(
    ("auto", "missed"),
    [
        (run_of(gaps_with(5, 0.9), 23.1, target_ms=200), []),
        (run_of(gaps_with(6, 0.9), 23.1, target_ms=200), ["share of gaps that keep 200 ms"]),
        (run_of(gaps_with(0, 0.9), 23.2, target_ms=200), ["first token at 200 ms, auto over chunk 64"]),
        (
            run_of(gaps_with(0, 0.9), 9.0, target_ms=200, first_token=8),
            ["share of runs with the same first token of the long prompt"],
        ),
    ],
)
def test_bars_are_missed_one_by_one(auto: ArrivalRun, missed: list[str]) -> None:
    bars = check_bars(results_of([*FIXED, auto]))
    assert [bar.name for bar in bars if not bar.is_met] == missed


def lone_runs(seconds: dict[int | None, list[float]], length: int = 2048) -> list[LoneRun]:
    return [
        LoneRun(chunk, length, index, value)
        for chunk, values in seconds.items()
        for index, value in enumerate(values)
    ]


def test_alone_auto_is_compared_with_the_soonest() -> None:
    lone = lone_runs({128: [4.0], 512: [3.0, 3.2, 3.1], 2048: [3.3], None: [3.1, 3.3, 3.2]})
    results = results_of([], lone)
    (verdict,) = results.lone_verdicts
    assert verdict.best_fixed == 512
    assert verdict.ratio.median == pytest.approx(3.2 / 3.1)
    (bar,) = check_bars(results)
    assert (bar.name, bar.is_met) == ("first token of 2,048 tokens alone, auto over chunk 512", True)
    slow = results_of([], lone_runs({512: [3.0], None: [3.16]}))
    assert [bar.is_met for bar in check_bars(slow)] == [False]
    assert results_of([], lone_runs({None: [3.0]})).lone_verdicts == []


def test_only_what_is_near_the_best_runs_again() -> None:
    autos = [run_of(gaps_with(0, 0.9), 20.0, target_ms=target) for target in (200, 300)]
    results = results_of([*FIXED, *autos, run_of([0.3] * 9, 40.0, target_ms=50)], targets=(50, 200, 300))
    # No chunk keeps 50 ms. 64 keeps 200 ms, 128 nearly; 128 keeps 300 ms, and 512 is far from it.
    assert contenders(results) == [
        Sizing(target_ms=200),
        Sizing(fixed=64),
        Sizing(fixed=128),
        Sizing(target_ms=300),
    ]
    lone = results_of([], lone_runs({128: [4.0], 512: [3.0], 1024: [2.9], 2048: [3.3], None: [3.1]}))
    assert lone_contenders(lone, 2048) == [None, 1024, 512]


def test_gaps_are_those_of_the_steps_that_read() -> None:
    """Three chunks; the stream's token of the last step came just before the prompt's first token, or after it."""
    for jitter in (-0.001, 0.001):
        stamps = [-0.2, -0.1, 0.05, 0.3, 0.7, 1.2 + jitter, 1.25, 1.3]
        gaps = reading_gaps(stamps, 1.2, 3)
        assert [gap.start_s for gap in gaps] == [0.05, 0.3, 0.7]
        assert gaps[-1].end_s == 1.2 + jitter
    with pytest.raises(MeasurementError, match="ended too early"):
        reading_gaps([-0.1, 0.3], 1.2, 3)


def test_a_page_and_plain_values_hold_all_of_it() -> None:
    autos = [run_of(gaps_with(2, 0.9), 20.0 + i, i, target_ms=200) for i in range(3)]
    fixed = [replace(run, round_index=i) for i in range(3) for run in FIXED[1:2]]
    results = results_of([*FIXED[2:], *fixed, *autos], lone_runs({512: [3.0, 3.1], None: [3.2, 3.1]}))
    page = render(results)
    for text in (
        "A prompt of 8,000 tokens arrives while 4 streams decode, a token every 20.0 ms",
        "<= 250 ms",
        "0.955 (0.909 to 1.000)",  # auto over the best fixed chunk
        "1.033 (1.000 to 1.067), chunk 512",
        "starts from nothing",
    ):
        assert text in page
    assert max(map(len, page.splitlines())) < 130
    plain = results.to_dict()
    assert plain["targets"][0]["ratio"]["values"] == pytest.approx([20 / 22, 21 / 22, 1.0])
    run = plain["arrival_runs"][-1]
    assert (run["num_gaps"], run["share_within"]) == (100, {"200": 0.98})
    assert run["gap_s"]["p50"] == pytest.approx(0.1)
    assert run["gap_s"]["max"] == pytest.approx(0.9)
    assert run["chunk_tokens"] == [64] * 100
