"""Tables and pictures have what was measured in them."""

from pathlib import Path

import pytest

from benchmarks.harness import Bar, Results, SectionRun
from benchmarks.show import Gaps, Picture, draw, render, table
from penstock.pictures import Panel
from tests.benchmarks.made_up import add_rounds, results_of


def cells(text: str, first: str) -> list[str]:
    """Of the table's row that begins with these words."""
    (line,) = [
        line for line in text.splitlines() if line.split("|")[1:2] and line.split("|")[1].strip() == first
    ]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.fixture
def results() -> Results:
    found = results_of()
    add_rounds(found, "prefill", "512 tokens", {"a": [10.0, 20.0, 30.0], "b": [1.5]}, "tokens/s")
    add_rounds(found, "prefill", "8,000 tokens", {"a": [1234.0]}, "tokens/s")
    found.add("ratios", "512 tokens", "x", 1.0, 2.0, 3.0, 4.0, 9.0, system="a over b")
    return found


def test_a_row_has_a_system_and_a_column_a_case(results: Results) -> None:
    text = render(results)
    assert cells(text, "prefill, tokens/s") == ["512 tokens", "8,000 tokens"]
    assert cells(text, "a") == ["20.00 (10.00 to 30.00, n=3) noisy", "1,234"]
    assert cells(text, "b") == ["1.500", ""]
    assert cells(text, "a over b") == ["3.000 (2.000 to 4.000, n=5) noisy"]  # quartiles


def test_units_that_differ_stand_in_the_cells() -> None:
    results = results_of()
    results.add("s", "wait", "ms", 20.0)
    results.add("s", "part", "share", 0.25)
    text = render(results)
    assert cells(text, "wait") == ["20.00 ms"]
    assert cells(text, "part") == ["25.0%"]


def test_what_is_noisy_or_not_so_is_said(results: Results) -> None:
    results.add("sweep", "n", "s", 1.0, 2.0, 3.0, system="loud", most_spread=0.1)
    results.require("bits", "chunk 64 has the bits of the whole", False)
    results.sections.append(SectionRun("decode", 2.0, "a kernel is wrong"))
    results.notes.append("a note")
    text = render(results)
    assert cells(text, "sweep, s") == ["n"]
    assert cells(text, "loud") == ["noisy (50%)"]
    for part in ("NOT so: bits: chunk 64", "0 of 1 facts", "too noisy", "decode failed: a kernel", "a note"):
        assert part in text


def test_bars_have_their_verdicts(results: Results) -> None:
    results.bars = [
        Bar("good", 2.0, 1.0, True),
        Bar("bad", 2.0, 1.0, False, "noisy"),
        Bar("none", None, 1.0, True),
    ]
    text = render(results)
    assert cells(text, "good") == ["2.000", ">= 1", "pass"]
    assert cells(text, "bad") == ["2.000", "<= 1", "MISS noisy"]
    assert cells(text, "none") == ["-", ">= 1", "MISS"]


def test_tables_are_markdown() -> None:
    assert table([["a", "b"], ["longer", "c"]]).splitlines() == [
        "| a      | b   |",
        "|--------|-----|",
        "| longer | c   |",
    ]


@pytest.mark.parametrize("with_gaps", [False, True])
def test_pictures(results: Results, tmp_path: Path, with_gaps: bool) -> None:
    pytest.importorskip("matplotlib")
    one = (1.0, 2.0, 3.0)
    panels = [
        Panel("bars", "s", results.by_case("prefill")),
        Panel("lines", "s", {"a": {"1": one, "2": one}, "b": {"2": one}}, kind="lines", is_log=True),
        Panel(
            "marks", "s", {"a": {1: one, 2.5: one}}, kind="lines", marks={"m": [(1, 2.0)]}, limit=("l", 1.0)
        ),
    ]
    gaps = [Gaps("no limit", [(-0.1, 0.2), (0.2, 3.0)], 2.0)] if with_gaps else []
    path = tmp_path / "new" / "picture.png"
    draw(path, results, Picture("all", panels, gaps))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_target_is_a_line_among_gaps(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gaps = [Gaps("a target", [(0.0, 0.1), (0.1, 9.0)], 2.0, 100.0)]
    draw(tmp_path / "gaps.png", results, Picture("gaps", [], gaps))
    assert (tmp_path / "gaps.png").exists()
    draw(tmp_path / "none.png", results, Picture("of nothing", [Panel("empty", "s", {})]))
    assert not (tmp_path / "none.png").exists()
