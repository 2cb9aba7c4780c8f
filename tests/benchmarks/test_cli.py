"""The command line: what it refuses, what it leaves behind, how it exits."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import cli, show
from benchmarks.harness import Bench, read_results, write_results
from benchmarks.suite import Suite
from benchmarks.systems import ROOT
from tests.benchmarks.made_up import add_rounds, results_of


def measure(options: object, bench: Bench) -> None:
    bench.results.settings |= {"model": "m", "dtype": "float32"}
    add_rounds(bench.results, "s", "n", {"a": [1.0, 2.0]})


SUITE = Suite("about", measure)


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Suite:
    monkeypatch.setattr(cli, "find_suite", lambda name: SUITE)
    return SUITE


@pytest.mark.usefixtures("suite")
def test_results_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "results.json"
    assert cli.main(["prefill", "--output", str(output), "--check"]) == 0
    (figure,) = read_results([output], "prefill").figures
    assert figure.values == (1.0, 2.0)
    assert str(output) in capsys.readouterr().out


def test_every_suite_is_there_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in cli.SUITES:
        assert name in text
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        assert "--plot-from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("other", "one of prefill, hybrid"),
        ("serve --output FOLDER", "give a file in a folder of yours"),
        ("prefill --model TINY --lengths 9000", "shorter --lengths"),
        ("prefill --skip-memory --only-memory", "leave nothing to measure"),
        ("sweep --model TINY --repeats 2", "give 3 or more"),
        ("sweep --model TINY --baseline llama.cpp --lengths 40", "reads GGUF files alone"),
        ("sweep --model TINY --lengths 9000", "shorter --lengths"),
        ("serve --model TINY --stream-tokens 67", "give at least 68"),
        ("serve --model TINY --request-tokens 1", "give at least 2"),
        ("cache --model TINY --prompt-tokens 64 --chunk 64", "more tokens than a chunk"),
        ("targets --model HYBRID --fixed 16,64 --prompt 150 --skip-lone", "--fixed 16 is not accepted"),
    ],
)
def test_a_refusal_is_one_line(
    arguments: str,
    message: str,
    tiny: Path,
    tiny_hybrid: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"TINY": tiny, "HYBRID": tiny_hybrid, "FOLDER": tmp_path}
    assert cli.main([str(named.get(each, each)) for each in arguments.split()]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line


@pytest.mark.parametrize("arguments", [["hybrid", "--model", "other"], ["gpu", "--cases", "8b,7b"]])
def test_an_option_that_a_suite_does_not_take_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)


@pytest.mark.usefixtures("suite")
def test_a_picture_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.files.find_spec", lambda name: None)
    assert cli.main(["prefill", "--plot", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_run_that_is_stopped_leaves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(options: object, bench: Bench) -> None:
        measure(options, bench)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "find_suite", lambda name: replace(SUITE, measure=stop))
    assert cli.main(["prefill", "--json", str(tmp_path / "r.json")]) == 130
    assert read_results([tmp_path / "r.json"], "prefill").figures
    assert "what was measured is in" in capsys.readouterr().err


def test_what_must_be_so_and_is_not_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(options: object, bench: Bench) -> None:
        measure(options, bench)
        bench.results.require("s", "answers are the same", False)

    monkeypatch.setattr(cli, "find_suite", lambda name: replace(SUITE, measure=wrong))
    assert cli.main(["prefill", "--json", str(tmp_path / "r.json")]) == 1
    assert "answers are the same: not so" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["prefill", "hybrid", "decode", "serve", "targets", "cache", "peers", "gpu"])
def test_results_that_the_docs_keep_can_be_read_and_drawn(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, kept = tmp_path / "p.png", ROOT / "docs" / f"{name}.json"
    arguments = ["--plot", str(picture)] if show.can_draw() else []
    assert cli.main([name, "--plot-from", str(kept), *arguments]) in (0, 3)
    assert "penstock 0.1.0" in capsys.readouterr().out
    assert picture.exists() == (show.can_draw() and name != "decode")
    results = read_results([kept], name)
    assert cli.find_suite(name).bars(results) == results.bars


def test_a_picture_of_nothing_is_not_drawn(tmp_path: Path) -> None:
    results = results_of("gpu")
    results.require("bits", "chunk 64", True)
    write_results(results, tmp_path / "gpu.json")
    assert cli.main(["gpu", "--plot-from", str(tmp_path / "gpu.json")]) == 0
    assert not (tmp_path / "gpu.png").exists()


def test_the_old_name_runs_them_and_says_the_new_one() -> None:
    command = [sys.executable, "-m", "penstock.bench", "gpu", "--plot-from", "nowhere.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    warning, error = done.stderr.splitlines()
    assert done.returncode == 2
    assert warning.endswith("is now python -m benchmarks")
    assert "nowhere.json" in error


def test_the_installed_command_runs_them_in_a_checkout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "bench", "gpu", "--plot-from", "nowhere.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "nowhere.json" in done.stderr
