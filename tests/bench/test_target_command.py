"""The benchmark of latency targets on a tiny model, and its command line."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

import penstock.bench.__main__ as command
from penstock.bench.plot import can_plot
from penstock.bench.target_options import parse_target_options
from penstock.bench.target_runs import run_arrival, serving, with_target
from penstock.bench.target_workload import Sizing, TargetWorkload, make_prompts
from penstock.engine.llm import LLM
from penstock.errors import ContextLengthError, SettingError
from tests.bench.punctual import make_punctual
from tests.bench.test_target_results import FIXED, gaps_with, results_of, run_of
from tests.byte_models import model_of_bytes

# However slow the machine is, and whatever it waits for.
TARGET_MS = 60_000
TINY = TargetWorkload(
    targets_ms=(TARGET_MS,),
    fixed=(64, 128),
    streams=2,
    stream_prompt=10,
    prompt_tokens=400,
    lone_lengths=(100,),
    lone_chunks=(32, 64),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _private_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path_factory.getbasetemp() / "target-home"))


def test_the_whole_benchmark(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_punctual(monkeypatch, num_streams=2)
    output = tmp_path / "new" / "targets.json"
    arguments = f"targets --targets {TARGET_MS} --fixed 64,128 --streams 2 --stream-prompt 10 --prompt 400"
    arguments += " --repeats 2"
    arguments += " --lone-lengths 100 --lone-chunks 32,64 --dtype float32"
    assert command.main([*arguments.split(), "--model", str(tiny), "--json", str(output)]) == 0
    printed = capsys.readouterr()
    assert "A prompt of 400 tokens arrives while 2 streams decode" in printed.out
    assert f"results: {output}" in printed.out
    assert output.with_suffix(".png").exists() == can_plot()

    written = json.loads(output.read_text())
    ran = [(run["fixed"], run["target_ms"], run["round_index"]) for run in written["arrival_runs"]]
    # A minute is long: both chunks keep the target, the larger one is the best or the other.
    assert {each[:2] for each in ran if each[2] == 0} == {(64, None), (128, None), (None, TARGET_MS)}
    assert (None, TARGET_MS, 1) in ran
    (target,) = written["targets"]
    assert target["is_reachable"]
    assert target["best_fixed"] in (64, 128)
    assert len(target["ratio"]["values"]) == 2
    for run in written["arrival_runs"]:
        assert sum(run["chunk_tokens"]) == 400
        assert run["num_gaps"] == 2 * len(run["chunk_tokens"])
        if run["fixed"] is not None:
            assert max(run["chunk_tokens"]) == run["fixed"]
    assert len({run["first_token"] for run in written["arrival_runs"]}) == 1
    assert [run["chunk"] for run in written["lone_runs"][:3]] == [None, 32, 64]
    assert {bar["name"].split(" ")[0] for bar in written["bars"]} == {"share", "first"}


def test_a_target_is_kept_by_the_run_that_has_it_and_learns_of_no_other(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_punctual(monkeypatch, TINY.streams)
    llm = LLM(tiny, dtype="float32", chunk="auto")
    prompts = make_prompts(llm.tokenizer, TINY)
    subjects = {sizing: with_target(llm, sizing.target_ms) for sizing in TINY.sizings}
    auto = Sizing(target_ms=TARGET_MS)
    for sizing in (Sizing(fixed=64), auto):
        with serving(subjects[sizing], sizing, TINY, prompts) as service:
            run = run_arrival(service, sizing, 0, prompts, TINY)
            assert service.llm.size.target_itl_s == (TARGET_MS / 1000 if sizing == auto else None)
        assert run.first_token_s > 0 < run.decode_gap_s
        known = {each for each, subject in subjects.items() if subject.times.num_records}
        assert known == ({Sizing(fixed=64)} if sizing != auto else {Sizing(fixed=64), auto})
        rules = {chunk.rule for chunk in run.chunks}
        assert rules <= ({"fixed", "end"} if sizing != auto else {"latency", "largest", "balanced", "end"})
    assert llm.times.num_records == 0


def test_a_bar_that_is_missed_is_an_exit_status_where_bars_are_checked(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = results_of([*FIXED, run_of(gaps_with(0, 0.9), 20.0, target_ms=200)])
    late = results_of([*FIXED, run_of(gaps_with(9, 0.9), 20.0, target_ms=200)])
    out_of_reach = results_of([run_of([0.3] * 9, 9.0, fixed=8), run_of([0.3] * 9, 9.0, target_ms=200)])
    arguments = ["targets", "--model", str(tiny), "--json", str(tmp_path / "targets.json")]
    for results, check, status in (
        (late, [], 0),
        (late, ["--check"], 1),
        (good, ["--check"], 0),
        (out_of_reach, ["--check"], 0),
    ):
        monkeypatch.setattr(command, "run_target_benchmark", lambda llm, settings, say, it=results: it)
        assert command.main([*arguments, *check]) == status


def test_what_was_not_asked_for_is_the_default() -> None:
    options = parse_target_options([])
    assert options.workload == TargetWorkload()
    assert (str(options.output), options.plot) == ("bench-results/targets.json", None)
    given = parse_target_options(
        ["--targets", "400,50,400", "--fixed", "64,16", "--skip-lone", "--json", "--plot"]
    )
    assert given.workload == TargetWorkload(targets_ms=(50, 400), fixed=(16, 64), lone_lengths=())
    assert str(given.plot) == "bench-results/targets.png"


def test_all_take_part_and_targets_are_spread_out() -> None:
    sizings = TargetWorkload().sizings
    assert len(set(sizings)) == len(sizings) == 9
    assert [each.target_ms is not None for each in sizings].count(True) == 3
    places = [index for index, each in enumerate(sizings) if each.target_ms is not None]
    assert all(later - earlier > 1 for earlier, later in pairwise(places))


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(ContextLengthError, match="smaller --prompt"):
        TargetWorkload().require_context(8000)
    TargetWorkload().require_context(8192)
    with pytest.raises(ContextLengthError, match="larger --fixed"):
        TargetWorkload(fixed=(1,)).require_context(8050)
    with pytest.raises(SettingError, match="--fixed 16,32 is not accepted"):
        TargetWorkload().require_grid(64)


@pytest.mark.parametrize("option", ["--targets", "--fixed", "--prompt", "--repeats", "--lone-chunks"])
def test_numbers_are_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["targets", f"{option}=0"])
    assert option in capsys.readouterr().err


def test_it_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        command.main(["targets", "--help"])
    assert exit_status.value.code == 0
    assert "Automatic chunks against fixed ones" in capsys.readouterr().out
