"""Penstock beside other work."""

import json
from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.harness import RATIOS
from benchmarks.models import EXPERTS
from benchmarks.suites.busy import RANDOM
from tests.benchmarks.made_up import run

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4, "vocab_size": 256, "head_dim": 16}


def test_shares_of_an_idle_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small.json"
    small.write_text(json.dumps(json.loads(EXPERTS.read_text()) | SMALL))
    monkeypatch.setitem(RANDOM, "experts", small)
    options = "--models experts --beside idle,one --lengths 70 --decode-tokens 4 --repeats 2"
    arguments = ["busy", *options.split()]
    status, results = run(arguments, tmp_path / "busy.json")
    assert status == 0
    shares = {figure.system: figure.values for figure in results.of(RATIOS)}
    assert set(shares) == {f"{what}, one loop" for what in ("prefill", "decode", "prompt and answer")}
    assert all(len(values) == 2 and min(values) > 0 for values in shares.values())
    assert [bar.limit for bar in results.bars] == [0.6] * 3


def test_shares_need_what_they_are_shares_of(tmp_path: Path) -> None:
    status = main(["busy", "--beside", "each", "--json", str(tmp_path / "busy.json")])
    assert status == 2
