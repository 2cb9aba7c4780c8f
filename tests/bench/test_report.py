"""What is printed, written and drawn."""

import json
from pathlib import Path

import pytest

from penstock.bench.bars import check_bars
from penstock.bench.plot import draw
from penstock.bench.report import aligned, render
from penstock.bench.results import Results
from penstock.bench.suites import SUITES, SuiteName
from penstock.bench.systems import SystemName
from tests.bench.made_up import good_results, made_up_results


def test_columns_are_aligned() -> None:
    lines = aligned([["", "512 tokens"], ["a long name", "1"], ["b", "22"]]).splitlines()
    assert lines == ["               512 tokens", "  a long name  1", "  b            22"]


@pytest.mark.parametrize("suite", list(SuiteName))
def test_the_page_names_everything_it_rests_on(suite: SuiteName) -> None:
    page = render(good_results(suite))
    for fact in (
        "A processor",
        "2 CPUs",
        "torch 2.13.0",
        "transformers 5.22.2",
        "0123abc",
        "bfloat16",
        "2026-01-02",
    ):
        assert fact in page
    for name in SUITES[suite].systems:
        assert name.label(512) in page
    for length in SUITES[suite].lengths:
        assert f"3 at {length:,} tokens" in page
    assert "VmHWM" in page
    assert "MISS" not in page
    assert max(map(len, page.splitlines())) < 140


def test_noise_and_misses_are_shown() -> None:
    seconds = {
        (SystemName.PENSTOCK, 512): [9.0, 2.0, 4.0],
        (SystemName.TRANSFORMERS, 512): [1.0, 1.0, 1.0],
    }
    page = render(made_up_results(seconds))
    assert "MISS (noisy)" in page
    assert "0.250 (0.181 to 0.375) noisy" in page


def test_fewer_rounds_are_told() -> None:
    seconds = {
        (SystemName.PENSTOCK, 1000): [1.0] * 5,
        (SystemName.PENSTOCK_TOKENWISE, 1000): [9.0] * 3,
    }
    page = render(made_up_results(seconds, suite=SuiteName.HYBRID))
    assert "5 at 1,000 tokens (3 for Penstock, token by token)" in page


def test_agreement_counts_tokens() -> None:
    names = (SystemName.PENSTOCK, SystemName.TRANSFORMERS)
    seconds = {(name, 512): [1.0] for name in names}
    tokens = dict(zip(names, [(1, 2, 3, 4), (1, 2, 9, 4)], strict=True))
    (agreement,) = made_up_results(seconds, seconds, token_ids=tokens).agreements
    assert (agreement.num_tokens, agreement.num_equal, agreement.num_equal_from_start) == (4, 3, 2)


def test_what_was_not_measured_is_left_out() -> None:
    assert "memory growth" not in render(made_up_results({(SystemName.PENSTOCK, 512): [1.0]}))
    page = render(made_up_results({}, activations={(SystemName.PENSTOCK, 512): [1.0]}))
    assert "Prefill, tokens/s" not in page
    assert "memory growth" in page


def test_the_json_has_a_schema() -> None:
    results = good_results()
    plain = json.loads(json.dumps(results.to_dict()))
    assert set(plain) == {
        "schema",
        "machine",
        "settings",
        "duration_s",
        "speeds",
        "ratios",
        "memory",
        "agreement",
        "passes",
    }
    assert plain["schema"] == 1
    spread = {"median", "min", "max", "first_quartile", "third_quartile", "noise", "values"}
    assert len(plain["speeds"]) == 15
    for speed in plain["speeds"]:
        assert set(speed) == {"system", "prompt_tokens", "prefill_tokens_per_s", "decode_tokens_per_s"}
        assert set(speed["prefill_tokens_per_s"]) == spread
    for ratio in plain["ratios"]:
        assert set(ratio) == {"name", "prompt_tokens"} | spread
    for growth in plain["memory"]["growth"]:
        assert set(growth) == {"system", "prompt_tokens", "cache_bytes", "growth_bytes", "activation_bytes"}
    assert len(plain["passes"]) == len(results.passes)
    assert {each["system"] for each in plain["passes"]} == set(SUITES[SuiteName.PREFILL].systems)
    assert plain["settings"]["suite"] == "prefill"
    assert plain["settings"]["lengths"] == plain["settings"]["memory_lengths"] == [512, 2048, 8000]
    for bar in check_bars(results):
        assert set(bar.to_dict()) == {"name", "value", "limit", "is_lower_limit", "noise", "is_met"}


@pytest.mark.parametrize(
    "results",
    [
        good_results(),
        good_results(SuiteName.HYBRID),
        made_up_results({}, activations={(SystemName.PENSTOCK, 512): [20.0, 30.0]}),
    ],
)
def test_a_picture_is_drawn(tmp_path: Path, results: Results) -> None:
    pytest.importorskip("matplotlib")
    draw(results, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
