"""Results on a GPU as table, picture and exit status; none of them needs one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.bench import gpu_report
from penstock.bench.__main__ import main
from penstock.bench.gpu_options import parse_gpu_options
from penstock.bench.gpu_results import Fact, Figure, GpuResults, Ledger, read_results
from penstock.bench.gpu_targets import TARGETS, judge
from penstock.bench.gpu_workload import PLAN, Section
from tests.bench.gpu_tiny import CARD
from tests.bench.made_up import MACHINE

PREFILLS = [(section, case) for section, cases in PLAN.prefills.items() for case in cases]


def ledger(path: Path | None = None) -> Ledger:
    return Ledger(GpuResults(MACHINE, CARD, 5), path, lambda line: None)


def good_results(path: Path | None = None, factor: float = 0.99) -> GpuResults:
    """Every target met, at so much of its bar, and transformers twice as slow."""
    made = ledger(path)
    for target in TARGETS:
        value = factor * target.bar
        made.figure(Figure(target.section, target.name, target.unit, (value, 0.9 * value, 1.1 * value)))
    for section, case in PREFILLS:
        ours = made.results.figure(case.label)
        assert ours is not None
        made.figure(Figure(section, case.label, "ms", (2 * ours.median,), "transformers"))
    for section in Section:
        if section is not Section.SWEEP:
            made.ended(section, 10.0)
    return made.results


def add_sweep(made: Ledger) -> None:
    for case in PLAN.sweeps:
        made.figure(Figure(Section.SWEEP, case.label, "ms", (900.0, 901.0, 905.0)))
    made.ended(Section.SWEEP, 30.0)


def test_every_prompt_and_batch_has_a_target() -> None:
    named = {target.name for target in TARGETS}
    assert {case.label for _, case in PREFILLS} <= named
    assert {case.label for case in PLAN.decodes} <= named
    assert len(named) == len(TARGETS)
    for target in TARGETS:
        marks = [mark for mark in (target.limit, target.stretch, target.bar) if mark is not None]
        assert marks == sorted(marks)


def test_verdicts() -> None:
    results = good_results()
    judged = judge(results, results.sections)
    assert [each.verdict for each in judged] == ["pass"] * len(TARGETS)
    assert {each.verdict for each in judge(good_results(factor=1.01), list(Section))} == {"MISS"}
    assert {each.verdict for each in judge(ledger().results, list(Section))} == {"not measured"}
    assert judge(results, [Section.TILES])[0].target.section is Section.TILES


def test_report() -> None:
    results = good_results()
    results.facts += [Fact(Section.BITS, "chunk 64", True), Fact(Section.BITS, "chunk 512", False)]
    results.notes.append("transformers was not asked")
    text = gpu_report.render(results)
    assert "A card, 140 GiB" in text
    assert (
        "| 8B, 32,768 tokens, chunk 2,048 | 1,247 ms (1,123 to 1,372, n=3) | 2,495 ms, 2.00x "
        "| 1,274 | 1,260 | 1,180 | 1,060 | pass |" in text
    )
    assert "| 8B, decode, batch 1, after 128 tokens | 5.772 ms (5.195 to 6.349, n=3) | - | 5.3 |" in text
    assert "| 3.0% (2.7% to 3.3%, n=3) | - | - | 3% |" in text
    assert "Same bits: 1 of 2 comparisons hold.\n- NOT so: chunk 512" in text
    assert "- transformers was not asked" in text


def test_a_picture_from_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    good_results(first, factor=1.5)
    again = ledger(second)
    add_sweep(again)
    label = PLAN.prefills[Section.SMALL][0].label
    again.figure(Figure(Section.SMALL, label, "ms", (100.0,)))
    picture = tmp_path / "made" / "gpu.png"
    assert main(["gpu", "--plot-from", str(first), str(second), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "| 8B, 32,768 tokens, chunk 256 | Penstock | 901 ms (900 to 905, n=3) |" in text
    merged = read_results([first, second])
    assert merged.figure(label) == again.results.figure(label)
    # Of a section that both have, nothing of the first is left.
    assert [figure.section for figure in merged.figures].count(Section.SMALL) == 1
    assert main(["gpu", "--plot-from", str(first), "--check"]) == 1
    assert (tmp_path / "first.png").exists()


def test_checks(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    results = good_results(path)
    made = Ledger(replace(results), path, lambda line: None)
    assert main(["gpu", "--plot-from", str(path), "--check"]) == 0
    made.fact(Fact(Section.BITS, "chunk 64", False))
    assert main(["gpu", "--plot-from", str(path)]) == 1


def test_results_without_prompts_have_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    ledger(path).fact(Fact(Section.BITS, "chunk 64", True))
    assert main(["gpu", "--plot-from", str(path)]) == 0
    assert not path.with_suffix(".png").exists()


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--plot-from", str(tmp_path / "none.json")]) == 2
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"machine": {}}))
    assert main(["gpu", "--plot-from", str(other)]) == 2
    assert "other.json is not a result of `bench gpu`" in capsys.readouterr().err


def test_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["gpu", "--out", str(tmp_path / "gpu.json")]) == 2
    assert "there is no NVIDIA GPU" in capsys.readouterr().err


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    usual = parse_gpu_options([])
    assert usual.sections == [section for section in Section if section is not Section.SWEEP]
    assert usual.output == Path("bench-results/gpu.json")
    some = parse_gpu_options(["--cases", "tiles,8b", "--sweep", "--out", "here.json", "--no-peer"])
    assert some.sections == [Section.LARGE, Section.TILES, Section.SWEEP]
    assert (some.output, some.no_peer) == (Path("here.json"), True)
    with pytest.raises(SystemExit):
        parse_gpu_options(["--cases", "8b,7b"])
    assert "'8b,7b' is not a list of some of 8b, 0.6b" in capsys.readouterr().err
