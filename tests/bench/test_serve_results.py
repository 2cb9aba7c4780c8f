"""What follows from chosen numbers: ratios, bars, the page, the JSON, the picture."""

import json
from pathlib import Path

import pytest

from penstock.bench.serve_bars import check_answers, check_bars, check_speed
from penstock.bench.serve_plot import draw
from penstock.bench.serve_report import render
from penstock.bench.serve_results import AT_ONCE_OVER_IN_TURN, Arrival, ServeResults, StallRun, to_json
from penstock.bench.serve_workload import Variant, Workload
from tests.bench.made_up_serve import good_serve, made_up_burst, made_up_stall

ANSWERS = ["share of runs with the same first token of the long prompt"]
ANSWERS += ["share of requests with the same tokens, strict"]


def missed(results: ServeResults) -> list[str]:
    return [bar.name for bar in check_bars(results) if not bar.is_met]


def stalls(unchunked: StallRun, mixed: StallRun) -> ServeResults:
    return good_serve(stalls=[unchunked, mixed], bursts=[])


def test_good_results_meet_every_bar() -> None:
    assert missed(good_serve()) == []
    assert len(check_speed(good_serve())) == 3
    assert [bar.name for bar in check_answers(good_serve())] == ANSWERS


@pytest.mark.parametrize(("stall", "expected"), [(0.49, []), (0.51, ["longest stall, unchunked over mixed"])])
def test_a_stall_must_be_ten_times_shorter(stall: float, expected: list[str]) -> None:
    whole = made_up_stall(Variant.UNCHUNKED, [0.5, 0.5, 5.0, 0.1])
    assert missed(stalls(whole, made_up_stall(Variant.MIXED, [0.1] * 9 + [stall] * 9))) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(33.0, []), (34.0, ["tokens/s of everything, mixed over unchunked"])]
)
def test_throughput_must_be_kept(seconds: float, expected: list[str]) -> None:
    whole = made_up_stall(Variant.UNCHUNKED, [9.0], seconds=30.0)
    assert missed(stalls(whole, made_up_stall(Variant.MIXED, [0.1] * 20, seconds=seconds))) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(14.9, []), (15.1, [AT_ONCE_OVER_IN_TURN])])
def test_at_once_must_take_half(seconds: float, expected: list[str]) -> None:
    bursts = [made_up_burst(Arrival.AT_ONCE, seconds), made_up_burst(Arrival.IN_TURN, 30.0)]
    assert missed(good_serve(stalls=[], bursts=bursts)) == expected


def test_speed_has_bars_only_for_the_usual_work() -> None:
    assert check_speed(good_serve(dtype="float32")) == []
    assert check_speed(good_serve(Workload(requests=15))) == []
    # Answers must be right whatever the work.
    assert [bar.name for bar in check_answers(good_serve(Workload(requests=15), dtype="float32"))] == ANSWERS


def test_ratios_are_made_round_by_round() -> None:
    bursts = [
        made_up_burst(arrival, seconds, index)
        for index, pair in enumerate([(10.0, 20.0), (30.0, 100.0), (40.0, 50.0)])
        for arrival, seconds in zip(Arrival, pair, strict=True)
    ]
    # A strict run in a round of its own has no partner.
    bursts.append(made_up_burst(Arrival.AT_ONCE, 1.0, 7, strict=True))
    (ratio,) = good_serve(stalls=[], bursts=bursts).ratios
    assert (ratio.name, ratio.spread.values) == (AT_ONCE_OVER_IN_TURN, (0.5, 0.3, 0.8))


def test_another_first_token_is_an_error() -> None:
    runs = [made_up_stall(variant, [9.0]) for variant in Variant]
    runs.append(made_up_stall(Variant.MIXED, [0.1] * 20, 1, first_token=8))
    assert ANSWERS[0] in missed(good_serve(Workload(requests=3), stalls=runs))


@pytest.mark.parametrize(("strict", "same_bits", "is_error"), [(True, True, True), (True, False, False)])
def test_strict_tokens_must_agree_where_that_is_promised(
    strict: bool, same_bits: bool, is_error: bool
) -> None:
    bursts = [
        made_up_burst(Arrival.AT_ONCE, 10.0, strict=strict),
        made_up_burst(Arrival.IN_TURN, 30.0, strict=strict),
        made_up_burst(Arrival.IN_TURN, 30.0, 1, strict=strict, tokens=((1, 2), (3, 5))),
    ]
    results = good_serve(stalls=[], bursts=bursts, same_bits=same_bits)
    (agreement,) = results.agreements
    assert (agreement.num_equal, agreement.num_requests) == (1, 2)
    assert (ANSWERS[1] in missed(results)) is is_error
    assert "1 of 2 requests have the same tokens" in render(results)
    assert ("nothing is promised" in render(results)) is not same_bits


def test_plain_tokens_may_differ() -> None:
    bursts = [
        made_up_burst(Arrival.AT_ONCE, 10.0),
        made_up_burst(Arrival.IN_TURN, 30.0, tokens=((1, 2), (3, 5))),
    ]
    assert missed(good_serve(stalls=[], bursts=bursts)) == []


def test_what_reaches_into_the_reading_counts_for_it() -> None:
    # From -1: two tokens before the arrival, one gap across it, one within, one out of it, one after.
    run = made_up_stall(Variant.MIXED, [0.5, 1.5, 3.0, 9.0, 0.25], first_token_s=5.0)
    assert [gap.seconds for gap in run.gaps] == [0.5, 1.5, 3.0, 9.0, 0.25] * 2
    assert (run.reading.p50_s, run.reading.p99_s) == (3.0, 9.0)
    assert (run.whole.p50_s, run.longest_gap.seconds) == (1.5, 9.0)
    assert run.num_outlasting == 2
    assert made_up_stall(Variant.MIXED, [2.0, 1.0], first_token_s=5.0).num_outlasting == 0


def test_the_page_names_everything_it_rests_on() -> None:
    page = render(good_serve())
    for fact in (
        "A processor",
        "2 CPUs",
        "torch 2.13.0",
        "0123abc",
        "bfloat16",
        "2026-01-02",
        "p99",
        "strict",
    ):
        assert fact in page
    for variant in Variant:
        assert variant.label(128) in page
    assert "MISS" not in page
    assert max(map(len, page.splitlines())) < 150


def test_the_page_shows_misses_fewer_rounds_and_streams_that_ended() -> None:
    runs = [made_up_stall(Variant.UNCHUNKED, [9.0], index) for index in range(3)]
    runs.append(made_up_stall(Variant.MIXED, [8.0], first_token_s=20.0))
    page = render(good_serve(stalls=runs))
    assert "MISS (too few)" in page
    assert "3 (1 for mixed)" in page
    assert "mixed: up to 2 streams ended before the prompt was read" in page


def test_the_json_has_what_was_measured_and_what_follows() -> None:
    results = good_serve()
    text = to_json({**results.to_dict(), "bars": [bar.to_dict() for bar in check_bars(results)]})
    plain = json.loads(text)
    assert (plain["schema"], plain["suite"]) == (1, "serve")
    assert plain["settings"]["workload"]["long_prompt"] == 8000
    assert {each["variant"] for each in plain["stall"]} == set(Variant)
    spread = {"median", "min", "max", "first_quartile", "third_quartile", "noise", "values"}
    for each in plain["stall"]:
        assert set(each["longest_stall_s"]) == set(each["gap_while_reading"]["p99_s"]) == spread
    assert len(plain["ratios"]) == 6
    assert len(plain["stall_runs"]) == 15
    assert len(plain["burst_runs"]) == 12
    for run, plain_run in zip(results.stalls, plain["stall_runs"], strict=True):
        for stamps, written in zip(run.stream_stamps, plain_run["stream_stamps_s"], strict=True):
            assert written == pytest.approx(stamps, abs=1e-4)
    # Thousands of numbers, and still a file that can be read.
    assert len(text.splitlines()) < 2000


@pytest.mark.parametrize(
    "results",
    [good_serve(), good_serve(stalls=[made_up_stall(Variant.MIXED, [0.1, 0.2])], bursts=[])],
)
def test_a_picture_is_drawn(tmp_path: Path, results: ServeResults) -> None:
    pytest.importorskip("matplotlib")
    draw(results, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
