"""Penstock and transformers side by side: whole runs at a small size, and bars on made-up numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import RATIOS, Bench, Results
from benchmarks.reading import ACTIVATIONS, DECODING, PREFILLING, Turn
from benchmarks.suites import prefill
from benchmarks.suites.prefill import DELTA_NETS, TEXT
from benchmarks.systems import Answer, Spec
from penstock.measure.growth import can_measure_growth
from tests.benchmarks.made_up import add_rounds, results_of, run
from tests.models.hybrids import hybrid_settings

OURS, THEIRS, CHUNKED = (
    Spec("Penstock", 512).label,
    *(Spec("transformers", each).label for each in (0, 512)),
)
QUICK = "--lengths 32,70 --repeats 2 --decode-tokens 2 --chunk 24 --dtype float32"


def test_all_systems_take_turns(tiny: Path, tmp_path: Path) -> None:
    status, results = run(
        ["prefill", "--model", str(tiny), *QUICK.split(), "--skip-memory", "--check"],
        tmp_path / "results.json",
    )
    assert status == 0
    assert {figure.system for figure in results.of(PREFILLING)} == {spec.label for spec in TEXT.systems(24)}
    assert all(figure.rounds == (0, 1) for figure in (*results.of(PREFILLING), *results.of(DECODING)))
    assert {figure.system for figure in results.of(DECODING)} == {"Penstock, chunk 24", "transformers, whole"}
    assert len(results.facts) == 2
    assert all("3 of 3" in note for note in results.notes)  # in float32 all of them are right
    assert results.bars == []  # of another chunk and another type
    assert not results.of(ACTIVATIONS)
    ratio = results.figure("70 tokens", prefill.OVER_WHOLE, RATIOS)
    speeds = [results.figure("70 tokens", each, PREFILLING) for each in ("Penstock, chunk 24", THEIRS)]
    assert ratio is not None
    assert ratio.values == tuple(
        a / b for a, b in zip(*(each.values for each in speeds if each), strict=True)
    )


@pytest.mark.skipif(not can_measure_growth(), reason="needs Linux's /proc")
def test_the_memory_of_a_hybrid_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the model's shape is another."""
    settings = hybrid_settings("qwen3_5_text", tie_word_embeddings=True)
    (tmp_path / "small.json").write_text(json.dumps({**settings, "model_type": "qwen3_5_text"}))
    monkeypatch.setattr(prefill, "HYBRID_CONFIG", tmp_path / "small.json")
    arguments = ["hybrid", "--lengths", "70", "--memory-repeats", "1", "--chunk", "64", "--only-memory"]
    status, results = run(arguments, tmp_path / "hybrid.json")
    assert status == 0
    assert [figure.system for figure in results.of(ACTIVATIONS)] == [
        "Penstock, chunk 64",
        "transformers, whole",
    ]
    assert results.settings["memory_lengths"] == [70]


def made_up(length: int = 2048, dtype: str = "bfloat16", **speeds: list[float]) -> Results:
    """Prefill speeds, in tokens/s: everything is met unless it is another."""
    results = results_of(dtype=dtype, chunk=512, lengths=[length])
    untiled, tokenwise = Spec("Penstock", 512, False).label, Spec("Penstock", 1).label
    values = {
        OURS: speeds.get("ours", [100.0] * 3),
        THEIRS: speeds.get("theirs", [90.0] * 3),
        CHUNKED: speeds.get("chunked", [80.0] * 3),
        untiled: speeds.get("untiled", [101.0] * 3),
        tokenwise: speeds.get("tokenwise", [10.0] * 3),
    }
    name = f"{length:,} tokens"
    add_rounds(results, PREFILLING, name, values, "tokens/s")
    add_rounds(
        results, DECODING, name, {OURS: speeds.get("decode", [9.0] * 3), THEIRS: [3.0] * 3}, "tokens/s"
    )
    prefill._compare(results, 512)
    return results


@pytest.mark.parametrize(
    ("speeds", "missed"),
    [
        ({}, []),
        ({"theirs": [110.0] * 3}, [prefill.OVER_WHOLE]),
        ({"chunked": [95.0] * 3}, [prefill.OVER_CHUNKED]),
        ({"decode": [5.9] * 3}, [prefill.DECODE_OVER]),
        ({"untiled": [106.0] * 3}, [prefill.TILED_OVER_UNTILED]),
        ({"theirs": [200.0, 90.0, 90.0]}, []),  # one bad round of three is not the median
    ],
)
def test_bars_are_missed_one_by_one(speeds: dict[str, Any], missed: list[str]) -> None:
    bars = prefill._bars(made_up(**speeds), TEXT)
    assert len(bars) == 4
    assert [bar.name for bar in bars if not bar.is_met] == [f"{name}, 2,048 tokens" for name in missed]


def test_bars_are_for_some_lengths_and_types() -> None:
    assert prefill._bars(made_up(length=256), TEXT) == []
    assert prefill._bars(made_up(dtype="float32"), TEXT) == []
    hybrid = made_up(1000, tokenwise=[25.0] * 3)
    assert [bar.is_met for bar in prefill._bars(hybrid, DELTA_NETS)] == [False, True]
    assert prefill._bars(made_up(4000), DELTA_NETS) == []


@pytest.mark.parametrize(
    ("shorter", "longer", "is_met"),
    [(10.0, 15.0, True), (10.0, 15.1, False), (0.1, 0.9, True), (0.1, 1.6, False)],
)
def test_activations_must_not_grow_with_the_prompt(shorter: float, longer: float, is_met: bool) -> None:
    results = results_of(chunk=512, lengths=[])
    for length, mib in ((2048, shorter), (8000, longer)):
        results.add(ACTIVATIONS, f"{length:,} tokens", "MiB", mib, mib, mib, system=OURS)
    assert [bar.is_met for bar in prefill._bars(results, TEXT)] == [is_met]


@pytest.mark.parametrize(("token", "holds"), [(5, True), (6, False)])
def test_first_tokens_are_the_same_chunked_and_whole(token: int, holds: bool) -> None:
    results = results_of()

    def turn(spec: Spec) -> Turn:
        return Turn(spec.label, 2048, 1, (PREFILLING, DECODING), spec)

    answers = {
        turn(Spec("Penstock", 512)): [Answer((5, 7), (0.1, 0.2))] * 2,
        turn(Spec("Penstock", 0)): [Answer((token,), (0.1,))],
        turn(Spec("transformers", 0)): [Answer((9, 7), (0.1, 0.2))],
    }
    prefill.judge_answers(Bench(results, print), answers, 512)
    assert [fact.holds for fact in results.facts] == [holds]
    assert "1 of 2 greedy tokens, the first 0 in a row" in results.notes[1]
