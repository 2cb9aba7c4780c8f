"""The command line: what it refuses, what it leaves behind, how it exits."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import penstock.bench.__main__ as command
from penstock.bench.options import parse_options
from penstock.bench.plot import can_plot
from penstock.bench.random_model import random_hybrid
from penstock.bench.results import Results
from penstock.bench.suites import SUITES, SuiteName
from penstock.bench.systems import SystemName
from penstock.measure.growth import can_measure_growth
from tests.bench.made_up import good_results, made_up_results
from tests.bench.test_workload import CONFIG
from tests.models.hybrids import hybrid_settings


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Results]:
    """What a run will be said to have measured; nothing is loaded or run."""
    answers = [good_results()]
    source = SimpleNamespace(describe=lambda: "a model", config=CONFIG, close=lambda: None)
    monkeypatch.setattr(command, "resolve_model", Path)
    monkeypatch.setattr(command, "open_model", lambda path: SimpleNamespace(source=source, tokenizer=None))
    monkeypatch.setattr(command, "text_tokens", lambda tokenizer, num_tokens: [1] * num_tokens)
    monkeypatch.setattr(command, "run_benchmark", lambda path, prompt, settings, say: answers[-1])
    return answers


HYBRID = hybrid_settings("qwen3_5_text", tie_word_embeddings=True)
SLOW = made_up_results({(SystemName.PENSTOCK, 512): [9.0] * 3, (SystemName.TRANSFORMERS, 512): [1.0] * 3})


@pytest.mark.usefixtures("measured")
def test_results_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "results.json"
    assert command.main(["--output", str(output), "--check"]) == 0
    written = json.loads(output.read_text())
    assert {"machine", "speeds", "ratios", "memory", "bars"} <= set(written)
    assert all(bar["is_met"] for bar in written["bars"])
    printed = capsys.readouterr().out
    assert "Prefill, tokens/s" in printed
    assert str(output) in printed
    assert output.with_suffix(".png").exists() == can_plot()


def test_a_hybrid_is_made_and_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real thing, at a small size: nothing but the model's shape is another."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(command, "random_hybrid", lambda say: random_hybrid(say, HYBRID))
    output = tmp_path / "hybrid.json"
    arguments = ["hybrid", "--lengths", "70,130", "--repeats", "1", "--memory-repeats", "1"]
    arguments += [
        "--decode-tokens",
        "2",
        "--chunk",
        "64",
        "--threads",
        str(torch.get_num_threads()),
        "--check",
    ]
    assert command.main([*arguments, "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert written["settings"]["suite"] == "hybrid"
    assert written["settings"]["model"].startswith("random-qwen3.5-4x64-")
    assert {each["system"] for each in written["passes"]} == set(SUITES[SuiteName.HYBRID].systems)
    assert any("over token by token" in ratio["name"] for ratio in written["ratios"])
    growth = {(each["system"], each["prompt_tokens"]) for each in written["memory"]["growth"]}
    if can_measure_growth():
        assert growth == {(name, length) for name in ("penstock", "transformers") for length in (70, 130)}
    assert "Penstock, token by token" in capsys.readouterr().out
    assert output.with_suffix(".png").exists() == can_plot()


def test_each_suite_has_its_own_defaults() -> None:
    prefill, hybrid = parse_options([]), parse_options(["hybrid"])
    assert (prefill.suite, str(prefill.output)) == ("prefill", "bench-results/prefill.json")
    assert prefill.lengths == prefill.memory_lengths == (512, 2048, 8000)
    assert (hybrid.suite, str(hybrid.output)) == ("hybrid", "bench-results/hybrid.json")
    assert (hybrid.lengths, hybrid.memory_lengths) == ((1000, 4000), (2000, 8000))
    given = parse_options(["hybrid", "--lengths", "32,16"])
    assert given.lengths == given.memory_lengths == (32, 16)


def test_a_missed_bar_is_an_exit_status_only_when_asked(measured: list[Results], tmp_path: Path) -> None:
    measured.append(SLOW)
    output = ["--output", str(tmp_path / "results.json")]
    assert command.main(output) == 0
    assert command.main([*output, "--check"]) == 1


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--lengths", "512,8190"], "context of 8192 tokens"),
        (["hybrid", "--model", "smollm2"], "--model smollm2 contradicts hybrid"),
        (["--output", "."], "--output . cannot be written"),
        (["--output", "/dev/null/results.json"], "--output /dev/null/results.json"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main(["--output", str(tmp_path / "results.json"), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert expected in said
    assert said.count("\n") == 1


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--output", str(tmp_path / "results.json"), "--model", "no/such/model/at-all"]) == 2
    assert "no/such/model/at-all" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", ""])
@pytest.mark.parametrize("option", ["--repeats", "--lengths", "--chunk", "--threads"])
def test_numbers_are_refused_by_name(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([f"{option}={value}"])
    assert option in capsys.readouterr().err


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "can_plot", lambda: False)
    assert command.main(["--plot", "plot.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_it_imports_without_what_only_the_terminal_needs() -> None:
    program = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib'): sys.modules[name] = None\n"
        "import penstock.bench.__main__ as bench\n"
        "import json; print(json.dumps(bench.can_plot()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) is False
