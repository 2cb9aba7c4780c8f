"""The suite of stages at a small size; links where this system makes namespaces, else said to be skipped."""

import os
from pathlib import Path

import pytest

from benchmarks.harness import RATIOS
from benchmarks.namespaces import NamespaceError, joined_namespaces
from benchmarks.suites import stages
from benchmarks.systems import ROOT
from tests.benchmarks.made_up import run

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors"
)


def test_a_prompt_is_read_alike_by_all_and_the_plan_is_compared(tiny: Path, tmp_path: Path) -> None:
    arguments = ["stages", "--model", str(tiny), "--cases", "read", "--lengths", "150", "--chunk", "64"]
    status, results = run([*arguments, "--repeats", "1", "--layers", "1,1"], tmp_path / "stages.json")
    assert status == 0
    (fact,) = results.facts
    assert fact.holds
    assert {figure.system for figure in results.of(RATIOS)} == {stages.SPEED_UP, stages.OF_THREADS}
    assert [figure.name for figure in results.of(stages.PLAN)] == [
        "1 x 1 thread, 150 tokens",
        "2 stages x 1 thread, 150 tokens",
    ]
    assert {bar.limit for bar in results.bars} == {1.7, 0.9, 0.1}
    assert results.settings["layers"] == [1, 1]


def test_another_checkout_takes_turns_with_this_one(tiny: Path, tmp_path: Path) -> None:
    arguments = ["stages", "--model", str(tiny), "--cases", "before", "--tree", str(ROOT), "--repeats", "1"]
    arguments += ["--stream-prompt", "80", "--decode-tokens", "4", "--chunk", "64"]
    _, results = run(arguments, tmp_path / "stages.json")
    assert {figure.system for figure in results.of(stages.PROCESSOR)} == {stages.NOW, stages.BEFORE}
    assert [figure.name for figure in results.of(RATIOS)] == ["80 tokens", "a token more"]
    assert [bar.limit for bar in results.bars] == [0.99, 0.99]


def test_a_system_without_namespaces_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NamespaceError, match="there is no ip"), joined_namespaces(1_000_000):
        pass
