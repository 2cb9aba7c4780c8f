"""The arithmetic that every suite rests on: turns, ratios by round, spreads, noise, bars, and results in files."""

import json
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import (
    MISSED,
    NOISY,
    RATIOS,
    Bar,
    Bench,
    Fact,
    Figure,
    Results,
    SectionRun,
    bar_of,
    read_results,
    rotated,
    take_turns,
    write_results,
)
from penstock.errors import SettingError
from tests.benchmarks.made_up import add_rounds, results_of


def figure_of(*values: float) -> Figure:
    return Figure("s", "n", "s", values)


VALUES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=30)


@given(values=VALUES)
def test_a_spread_is_in_order(values: list[float]) -> None:
    figure = figure_of(*values)
    first, third = figure.quartiles
    tolerance = 1e-9 * max(values)
    assert figure.median == median(values)
    assert min(values) <= first + tolerance
    assert first <= figure.median + tolerance
    assert figure.median <= third + tolerance
    assert third <= max(values) + tolerance


def test_quartiles_lie_between_measured_values() -> None:
    assert figure_of(1.0, 2.0, 3.0, 4.0, 5.0).quartiles == (2.0, 4.0)
    assert figure_of(4.0, 1.0).quartiles == (1.75, 3.25)
    assert figure_of(7.0).quartiles == (7.0, 7.0)


@pytest.mark.parametrize(
    ("values", "noise"),
    [
        ((1.0, 9.0), "too few"),
        ((1.0, 1.0, 1.0), ""),
        ((0.92, 1.0, 1.06), ""),
        ((0.8, 1.0, 1.11), "noisy"),
        ((0.5, 1.0, 1.0, 1.0, 9.0), ""),  # single ones that lie far off do not count
        ((-1.0, 0.0, 1.0), "noisy"),
    ],
)
def test_noise_is_told_by_quartiles(values: tuple[float, ...], noise: str) -> None:
    assert figure_of(*values).noise == noise


def test_every_round_begins_with_the_next_one() -> None:
    assert list(rotated("abc", 4)) == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert list(rotated([], 2)) == [[], []]


def test_who_has_fewer_rounds_has_the_first_ones() -> None:
    counts = {"a": 3, "b": 1, "c": 2}
    taken = list(take_turns(rotated(counts, 3), counts.__getitem__))
    assert taken == [(0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "a"), (2, "a")]


def test_ratios_are_of_rounds_that_both_have() -> None:
    results = results_of()
    results.figures = [
        Figure("s", "n", "s", (2.0, 8.0, 9.0), "ours", (0, 2, 3)),
        Figure("s", "n", "s", (1.0, 3.0, 4.0), "theirs", (0, 1, 2)),
        Figure("s", "n", "s", (6.0, 6.0), "without rounds"),  # values are of the first ones
    ]
    results.add_ratio("ours over theirs", "s", "n", "ours", "theirs")
    results.add_ratio("times", "s", "n", "ours", "theirs", inverse=True, as_name="ratio")
    results.add_ratio("of first rounds", "s", "n", "without rounds", "theirs")
    results.add_ratio("with nothing", "s", "n", "ours", "absent")
    results.add_ratio("of nothing", "s", "other", "ours", "theirs")
    assert [(figure.system, figure.name, figure.values) for figure in results.of(RATIOS)] == [
        ("ours over theirs", "n", (2.0, 2.0)),
        ("times", "ratio", (0.5, 0.5)),
        ("of first rounds", "n", (6.0, 2.0)),
    ]


def test_figures_grow_from_turn_to_turn() -> None:
    results = results_of()
    add_rounds(results, "s", "n", {"a": [1.0, 2.0]})
    results.add("s", "n", "s", 5.0, system="a", round_index=4)
    results.add("t", "n", "s", 9.0, system="a")
    figure = results.figure("n", "a", "s")
    assert figure is not None
    assert figure.by_round == {0: 1.0, 1: 2.0, 4: 5.0}
    assert results.by_case("s") == {"a": {"n": (1.0, 2.0, 5.0)}}
    assert results.figure("n", "a") == results.of("t")[0]  # the last one
    assert results.figure("n", "b") is None


def test_figures_are_arranged_by_system_and_number() -> None:
    results = results_of()
    for name, system in (
        ("2,048 tokens", "b"),
        ("512 tokens", "c"),
        ("512 tokens", "b"),
        ("512 tokens", "a"),
    ):
        results.add("s", name, "s", 1.0, system=system)
    results.arrange(["a", "b"])
    found = [(figure.system, figure.name) for figure in results.figures]
    assert found == [("a", "512 tokens"), ("b", "512 tokens"), ("b", "2,048 tokens"), ("c", "512 tokens")]


def test_what_is_too_noisy_is_not_given() -> None:
    results = results_of()
    results.add("s", "quiet", "s", 1.0, 1.0, 1.04, most_spread=0.05)
    results.add("s", "loud", "s", 1.0, 1.0, 1.2, most_spread=0.05)
    results.add("s", "few", "s", 1.0, 9.0, most_spread=0.05)
    results.add("s", "anything", "s", 1.0, 1.0, 9.0)
    assert [figure.name for figure in results.noisy] == ["loud"]
    assert "loud" not in results.by_case("s")["Penstock"]
    plain = {each["name"]: each for each in results.to_dict()["figures"]}
    assert "median" not in plain["loud"]
    assert plain["quiet"]["median"] == 1.0


@pytest.mark.parametrize(
    ("value", "is_lower", "is_met"),
    [(2.0, True, True), (1.99, True, False), (2.0, False, True), (2.01, False, False), (None, True, False)],
)
def test_a_bar_is_met_on_its_side_of_the_limit(value: float | None, is_lower: bool, is_met: bool) -> None:
    assert Bar("b", value, 2.0, is_lower).is_met is is_met


def test_a_bar_takes_the_median_and_what_was_not_measured_is_missed() -> None:
    bar = bar_of("b", Figure("s", "n", "x", (1.0, 3.0, 9.0)), 3.0, is_lower_limit=True)
    assert (bar.value, bar.is_met, bar.noise) == (3.0, True, "noisy")
    absent = bar_of("b", None, 3.0, is_lower_limit=False)
    assert (absent.value, absent.is_met) == (None, False)


def test_the_exit_status() -> None:
    results = results_of()
    assert results.status(check=True) == 0
    results.add("s", "loud", "s", 1.0, 2.0, 3.0, most_spread=0.1)
    assert results.status(check=True) == NOISY
    results.bars = [Bar("met", 1.0, 1.0, True), Bar("missed", 0.9, 1.0, True)]
    assert results.status(check=False) == NOISY
    assert results.status(check=True) == MISSED
    results.require("s", "it is so", True)
    assert results.status(check=False) == NOISY
    results.require("s", "it is so", False)
    assert results.status(check=False) == MISSED


def test_results_go_to_a_file_and_back(tmp_path: Path) -> None:
    results = results_of(lengths=[1, 2])
    add_rounds(results, "s", "n", {"a": [1.0, 2.5], "b": [3.0]})
    results.add("s", "loud", "s", 1.0, 2.0, 3.0, most_spread=0.1)
    results.facts.append(Fact("s", "so", False))
    results.bars.append(Bar("b", None, 2.0, False, "not measured"))
    results.sections.append(SectionRun("s", 2.5, "it stopped"))
    results.notes.append("a note")
    results.traces["stamps"] = [[0.25, 0.5], [1.0]]
    path = tmp_path / "results.json"
    Bench(results, print, path).save()
    assert read_results([path], "prefill") == results
    assert results.duration_s > 0
    assert "[0.25, 0.5]" in path.read_text()  # on one line
    write_results(results, path)
    assert json.loads(path.read_text())["bars"][0]["is_met"] is False


def test_of_several_files_the_last_one_with_a_section_counts(tmp_path: Path) -> None:
    first, second = results_of("gpu"), results_of("gpu")
    for results, number in ((first, 1.0), (second, 2.0)):
        results.add("both", "n", "s", number)
        results.require("both", "so", True)
        results.sections.append(SectionRun("both", number))
    first.add("first", "n", "s", 1.0)
    second.add("second", "n", "s", 2.0)
    first.notes, second.notes = ["one", "two"], ["two", "three"]
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for results, path in zip((first, second), paths, strict=True):
        write_results(results, path)
    merged = read_results(paths, "gpu")
    assert [(each.section, each.values) for each in merged.figures] == [
        ("first", (1.0,)),
        ("both", (2.0,)),
        ("second", (2.0,)),
    ]
    assert (len(merged.facts), len(merged.sections)) == (1, 1)
    assert merged.notes == ["one", "two", "three"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": 1}', None])
def test_what_is_no_result_is_refused_in_a_line(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingError, match=r"other\.json"):
        read_results([path], "gpu")


def test_a_result_of_another_suite_is_refused(tmp_path: Path) -> None:
    write_results(results_of("serve"), tmp_path / "serve.json")
    with pytest.raises(SettingError, match="not a result of `bench gpu`"):
        read_results([tmp_path / "serve.json"], "gpu")
    assert isinstance(read_results([tmp_path / "serve.json"], "serve"), Results)
