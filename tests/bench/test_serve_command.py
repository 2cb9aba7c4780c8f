"""The whole benchmark of serving on a tiny model, and its command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import penstock.bench.__main__ as command
from penstock.bench.options import parse_options
from penstock.bench.plot import can_plot
from penstock.bench.serve_options import parse_serve_options
from penstock.bench.serve_results import Arrival
from penstock.bench.serve_workload import COMPARED, Variant, Workload, make_prompts, rounds_of
from penstock.errors import SettingError
from penstock.models.opened import open_model
from tests.bench.made_up_serve import good_serve, made_up_stall
from tests.bench.punctual import make_punctual
from tests.byte_models import model_of_bytes

TINY = "--streams 2 --stream-prompt 10 --stream-tokens 60 --long-prompt 300 --long-tokens 2 --serve-chunk 32"
TINY += " --requests 3 --request-prompt 40 --request-tokens 5 --chunk 64 --dtype float32"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _private_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path_factory.getbasetemp() / "serve-home"))


def test_the_whole_benchmark(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_punctual(monkeypatch, num_streams=2)
    output = tmp_path / "new" / "serve.json"
    arguments = [
        "serve",
        "--model",
        str(tiny),
        *TINY.split(),
        "--repeats",
        "2",
        "--check",
        "--output",
        str(output),
    ]
    assert command.main(arguments) == 0
    printed = capsys.readouterr()
    assert "A prompt of 300 tokens arrives while 2 streams decode" in printed.out
    assert f"results: {output}" in printed.out
    assert output.with_suffix(".png").exists() == can_plot()

    written = json.loads(output.read_text())
    assert [bar["is_met"] for bar in written["bars"]] == [True, True]
    runs = {(run["variant"], run["round_index"]) for run in written["stall_runs"]}
    assert runs == {(variant.value, index) for variant in Variant for index in (0, 1)}
    for run in written["stall_runs"]:
        assert run["num_tokens"] == 2 * 70 + 302
        assert [len(stamps) for stamps in run["stream_stamps_s"]] == [60, 60]
        assert all(stamps == sorted(stamps) for stamps in run["stream_stamps_s"])
        # All streams ran when the prompt arrived, and did not end before it.
        assert all(stamps[3] <= 0.0 < stamps[-1] for stamps in run["stream_stamps_s"])
        assert 0.0 < run["first_token_s"] < run["seconds"]
    assert len({run["first_token"] for run in written["stall_runs"]}) == 1
    bursts = [(run["arrival"], run["strict"], run["round_index"]) for run in written["burst_runs"]]
    assert sorted(bursts) == sorted(
        (arrival.value, strict, index)
        for arrival in Arrival
        for strict in (False, True)
        for index in (0, 1)
        if not (arrival is Arrival.IN_TURN and strict and index)
    )
    assert all(0 < run["decode_step_s"] < run["seconds"] for run in written["burst_runs"])
    assert {each["strict"]: each["num_equal"] for each in written["agreement"]}[True] == 3


def test_answers_that_differ_are_an_error_without_a_check(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [made_up_stall(Variant.UNCHUNKED, [9.0]), made_up_stall(Variant.MIXED, [0.1] * 20, first_token=1)]
    results = [good_serve(stalls=runs), good_serve(stalls=[made_up_stall(v, [9.0]) for v in COMPARED])]
    monkeypatch.setattr(command, "run_serve_benchmark", lambda llm, settings, say: results.pop(0))
    arguments = ["serve", "--model", str(tiny), "--output", str(tmp_path / "serve.json")]
    assert command.main(arguments) == 1
    assert "error: share of runs with the same first token" in capsys.readouterr().err
    # A bar on speed that is missed is none, unless it is checked.
    slow = results[0]
    assert command.main(arguments) == 0
    results.append(slow)
    assert command.main([*arguments, "--check"]) == 1


def test_what_was_not_asked_for_is_the_default() -> None:
    options = parse_serve_options([])
    assert options.workload == Workload()
    assert str(options.output) == "bench-results/serve.json"
    given = parse_serve_options(["--serve-chunk", "64", "--requests", "4", "--chunk", "256"])
    assert given.workload == Workload(stall_chunk=64, requests=4, chunk=256)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--stream-tokens", "60"], "--stream-tokens 60 is not accepted"),
        (["--serve-chunk", "32"], "give at least 255"),
        (["--request-tokens", "1"], "--request-tokens 1 is not accepted"),
        (
            ["--long-prompt", "7000", "--dtype", "float32"],
            "context of 6000 tokens: give a smaller --long-prompt",
        ),
        (["--output", "."], "--output . cannot be written"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(
    arguments: list[str], expected: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "serve.json"), "--model", str(tiny)]
    assert command.main(["serve", *output, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert expected in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("option", ["--streams", "--serve-chunk", "--long-prompt", "--repeats", "--threads"])
def test_numbers_are_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["serve", f"{option}=0"])
    assert option in capsys.readouterr().err


def test_the_suite_comes_first() -> None:
    with pytest.raises(SettingError, match="first argument"):
        parse_options(["--check", "serve"])


def test_what_has_a_bar_runs_more_rounds() -> None:
    assert rounds_of(None, full=False) == {variant: 3 if variant in COMPARED else 1 for variant in Variant}
    assert set(rounds_of(None, full=True).values()) == {3}
    assert set(rounds_of(2, full=False).values()) == {2}


def test_all_prompts_differ(tiny: Path) -> None:
    opened = open_model(tiny)
    opened.source.close()
    work = Workload()
    prompts = make_prompts(opened.tokenizer, work)
    assert len(prompts.long) == work.long_prompt
    assert [len(each) for each in prompts.streams] == [work.stream_prompt] * work.streams
    assert [len(each) for each in prompts.requests] == [work.request_prompt] * work.requests
    assert (
        len({tuple(each) for each in (*prompts.streams, *prompts.requests)}) == work.streams + work.requests
    )


def test_the_command_passes_everything_on(tiny: Path, tmp_path: Path) -> None:
    def penstock(*arguments: str) -> "subprocess.CompletedProcess[str]":
        run = [sys.executable, "-m", "penstock", "bench", *arguments]
        return subprocess.run(run, capture_output=True, text=True, check=False)

    helped = penstock("serve", "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "--serve-chunk" in helped.stdout
    refused = penstock(
        "serve", "--output", str(tmp_path / "s.json"), "--model", str(tiny), "--stream-tokens", "1"
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --stream-tokens 1")
