"""The benchmark of the prefix cache: on a tiny model, on made-up results, and its command line."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import penstock.bench.__main__ as command
from penstock.bench.cache_bars import check_answers, check_speed, noisy
from penstock.bench.cache_benchmark import file_system
from penstock.bench.cache_options import parse_cache_options
from penstock.bench.cache_plot import draw
from penstock.bench.cache_prompts import make_prompts
from penstock.bench.cache_report import render
from penstock.bench.cache_results import (
    COLD_OVER_DISK,
    COLD_OVER_MEMORY,
    WRITING_OVER_COLD,
    CacheResults,
    CacheRun,
    CacheSettings,
)
from penstock.bench.cache_runs import Answer, ask, open_service
from penstock.bench.cache_workload import CacheWorkload, Way
from penstock.bench.plot import can_plot
from penstock.engine.llm import LLM
from penstock.errors import ContextLengthError, SettingError
from penstock.models.opened import open_model
from tests.bench.made_up import MACHINE
from tests.byte_models import model_of_bytes

FOUND = {Way.COLD: 0, Way.WRITING: 0, Way.RESUMED: 4096, Way.DISK: 7936, Way.MEMORY: 7936}
GOOD = {
    Way.COLD: (10.0, 10.2, 10.4),
    Way.WRITING: (10.3, 10.4, 10.6),
    Way.RESUMED: (6.0, 6.1, 6.1),
    Way.DISK: (0.5, 0.51, 0.51),
    Way.MEMORY: (0.15, 0.15, 0.16),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _private_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path_factory.getbasetemp() / "cache-home"))


def results_of(
    seconds: Mapping[Way, Sequence[float]] = GOOD, workload: CacheWorkload | None = None
) -> CacheResults:
    runs = [
        CacheRun(
            way,
            index,
            Answer(value, (5, 6, index), FOUND[way]),
            FOUND[way],
            load_s=2.0 if way in (Way.DISK, Way.RESUMED) else None,
            flushed_s=value + 0.5 if way is Way.WRITING else None,
            disk_bytes=184 << 20 if way is Way.WRITING else None,
        )
        for way, values in seconds.items()
        for index, value in enumerate(values)
    ]
    settings = CacheSettings("model.gguf", "bfloat16", workload or CacheWorkload(), 3)
    return CacheResults(MACHINE, settings, "ext4", tuple(runs), 60.0)


def with_answer(
    results: CacheResults, way: Way, round_index: int, change: Callable[[Answer], Answer]
) -> CacheResults:
    def changed(run: CacheRun) -> CacheRun:
        is_it = (run.way, run.round_index) == (way, round_index)
        return replace(run, answer=change(run.answer)) if is_it else run

    return replace(results, runs=tuple(map(changed, results.runs)))


def test_the_whole_benchmark(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "cache.json"
    arguments = "cache --prompt-tokens 200 --chunk 64 --repeats 1 --dtype float32 --check"
    assert command.main([*arguments.split(), "--model", str(tiny), "--json", str(output)]) == 0
    printed = capsys.readouterr()
    assert "A prompt of 200 tokens" in printed.out
    assert "After a kill half way 128 tokens are not read again" in printed.out
    assert f"results: {output}" in printed.out
    assert output.with_suffix(".png").exists() == can_plot()

    written = json.loads(output.read_text())
    assert {
        "machine",
        "settings",
        "method",
        "file_system",
        "ways",
        "ratios",
        "resumed",
        "runs",
        "bars",
    } <= set(written)
    ways = {each["way"]: each for each in written["ways"]}
    # Three blocks of the prompt are full and not its last; the process was killed after two of its chunks.
    found = {name: each["cached_tokens"] for name, each in ways.items()}
    assert found == {"cold": [0], "writing": [0], "resumed": [128], "disk": [192], "memory": [192]}
    assert all(each["first_token_s"]["median"] > 0 for each in ways.values())
    assert {name for name, each in ways.items() if each["load_s"]} == {"disk", "resumed"}
    (run,) = (run for run in written["runs"] if run["way"] == "writing")
    assert run["flushed_s"] > run["answer"]["first_token_s"]
    assert run["disk_bytes"] > 0
    assert len({tuple(run["answer"]["token_ids"]) for run in written["runs"]}) == 1
    assert [(bar["value"], bar["is_met"]) for bar in written["bars"]] == [(1.0, True), (1.0, True)]


def test_a_service_that_keeps_nothing_finds_nothing(tiny: Path, tmp_path: Path) -> None:
    workload = CacheWorkload(200, 64)
    with LLM(tiny, dtype="float32", chunk=64, cache_dir=tmp_path / "store") as llm:
        (prompt,) = make_prompts(llm.tokenizer, workload, 1).rounds
        found: dict[bool, list[int]] = {}
        tokens = set()
        for keeps in (True, False):
            with open_service(llm, workload, keeps=keeps) as service:
                answers = [ask(service, prompt, 4) for _ in range(2)]
            found[keeps] = [answer.cached_tokens for answer in answers]
            tokens |= {answer.token_ids for answer in answers}
    assert found == {True: [0, 192], False: [0, 0]}
    assert len(tokens) == 1


def test_every_round_has_a_prompt_that_nothing_is_known_of(tiny: Path) -> None:
    opened = open_model(tiny)
    opened.source.close()
    prompts = make_prompts(opened.tokenizer, CacheWorkload(300, 64), 4)
    everyone = [*prompts.rounds, prompts.warm_up]
    assert [len(each) for each in everyone] == [300] * 4 + [128]
    assert len({tuple(each[:64]) for each in everyone}) == 5


def test_bars_follow_from_the_numbers() -> None:
    bars = {bar.name: bar for bar in check_speed(results_of())}
    assert all(bar.is_met and not bar.noise for bar in bars.values())
    assert bars[COLD_OVER_MEMORY].value == pytest.approx(10.0 / 0.15)
    assert bars[COLD_OVER_DISK].value == pytest.approx(20.0)
    assert bars[WRITING_OVER_COLD].value == pytest.approx(10.4 / 10.2)


@pytest.mark.parametrize(
    ("way", "seconds", "missed"),
    [
        (Way.MEMORY, (0.21, 0.21, 0.21), [COLD_OVER_MEMORY]),
        (Way.DISK, (1.1, 1.1, 1.1), [COLD_OVER_DISK]),
        (Way.WRITING, (10.6, 10.8, 11.0), [WRITING_OVER_COLD]),
        (Way.RESUMED, (11.0, 11.0, 11.0), []),  # is told, and has no bar
    ],
)
def test_bars_are_missed_one_by_one(way: Way, seconds: tuple[float, ...], missed: list[str]) -> None:
    results = results_of({**GOOD, way: seconds})
    assert [bar.name for bar in check_speed(results) if not bar.is_met] == missed
    assert all(bar.is_met for bar in check_answers(results))


@pytest.mark.parametrize("workload", [CacheWorkload(2000), CacheWorkload(8000, 256)])
def test_short_prompts_and_other_chunks_have_no_bars_on_speed(workload: CacheWorkload) -> None:
    assert check_speed(results_of(workload=workload)) == []
    assert len(check_answers(results_of(workload=workload))) == 2


def test_what_is_noisy_is_not_given() -> None:
    assert noisy(results_of()) == []
    results = results_of({**GOOD, Way.MEMORY: (0.10, 0.15, 0.20)})
    (told,) = noisy(results)
    assert told.startswith("from memory (33%")
    assert results.figure(Way.MEMORY) is None
    assert results.figure(Way.DISK) is not None
    (line,) = (line for line in render(results).splitlines() if line.strip().startswith("from memory "))
    assert line.split()[2] == "noisy"
    (way,) = (each for each in results.to_dict()["ways"] if each["way"] == "memory")
    assert way["first_token_s"]["is_noisy"]
    assert "median" not in way["first_token_s"]


def test_the_cost_of_writing_is_judged_by_less_than_it_may_be() -> None:
    """Times may lie a little apart; a cost of at most 5% may not."""
    spread = {**GOOD, Way.WRITING: (9.6, 10.3, 11.2)}
    (told,) = noisy(results_of(spread))
    assert told.startswith(WRITING_OVER_COLD)
    assert noisy(results_of(spread, CacheWorkload(2000))) == []


def test_wrong_answers_are_noticed() -> None:
    wrong = with_answer(results_of(), Way.DISK, 1, lambda answer: replace(answer, token_ids=(5, 6, 7)))
    assert [bar.value for bar in check_answers(wrong)] == [pytest.approx(14 / 15), 1.0]
    # Each round has a prompt of its own, so another round's answer is a wrong one.
    other = with_answer(results_of(), Way.MEMORY, 1, lambda answer: replace(answer, token_ids=(5, 6, 0)))
    assert not all(bar.is_met for bar in check_answers(other))
    less = with_answer(results_of(), Way.MEMORY, 2, lambda answer: replace(answer, cached_tokens=7872))
    assert [bar.value for bar in check_answers(less)] == [1.0, pytest.approx(14 / 15)]
    known = with_answer(results_of(), Way.COLD, 2, lambda answer: replace(answer, cached_tokens=64))
    assert not all(bar.is_met for bar in check_answers(known))


def test_exit_status(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = results_of({**GOOD, Way.MEMORY: (0.3, 0.3, 0.3)})
    wrong = with_answer(results_of(), Way.DISK, 1, lambda answer: replace(answer, token_ids=(5, 6, 7)))
    loud = results_of({**GOOD, Way.DISK: (0.3, 0.5, 0.7)})
    arguments = ["cache", "--model", str(tiny), "--json", str(tmp_path / "cache.json")]
    for results, check, status in (
        (results_of(), ["--check"], 0),
        (slow, [], 0),
        (slow, ["--check"], 1),
        (wrong, [], 1),
        (loud, [], command.NOISY_STATUS),
    ):
        monkeypatch.setattr(command, "run_cache_benchmark", lambda model, settings, say, it=results: it)
        assert command.main([*arguments, *check]) == status


def test_a_page_and_plain_values_hold_all_of_it() -> None:
    results = results_of()
    page = render(results)
    for text in (
        "A prompt of 8,000 tokens, 184.0 MiB on disk",
        "from memory             0.150 (0.150 to 0.155)     7,936",
        "cold, written to disk   10.400",
        "resumed after a kill    6.100 (6.050 to 6.100)     4,096",
        "the system's file cache",
        "4,096 tokens are not read again: 4.100 (4.050 to 4.200) s are saved",
        ">= 50    pass",
        ">= 10    pass",
        "<= 1.05  pass",
    ):
        assert text in page
    assert "Noisy:" not in page
    plain = json.loads(json.dumps(results.to_dict()))
    assert plain["resumed"]["saved_s"]["median"] == pytest.approx(4.1)
    assert len(plain["runs"]) == 15
    assert all(run["is_right"] for run in plain["runs"])


@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
def test_a_picture_is_drawn_of_what_there_is(tmp_path: Path) -> None:
    noisy_one = results_of({**GOOD, Way.DISK: (0.3, 0.5, 0.7)})
    lone = results_of({Way.COLD: (10.0,), Way.MEMORY: (0.1,)}, CacheWorkload(2000))
    for index, results in enumerate((results_of(), noisy_one, lone)):
        draw(results, tmp_path / f"{index}.png")
        assert (tmp_path / f"{index}.png").stat().st_size > 10_000


def test_what_was_not_asked_for_is_the_default() -> None:
    options = parse_cache_options([])
    assert options.workload == CacheWorkload(8000, 512, 8)
    assert (options.repeats, str(options.output), options.plot) == (5, "bench-results/cache.json", None)
    quick = parse_cache_options(["--quick", "--json", "--plot"])
    assert (quick.workload.prompt_tokens, quick.repeats) == (2000, 3)
    assert str(quick.plot) == "bench-results/cache.png"
    given = parse_cache_options(["--quick", "--prompt-tokens", "900", "--repeats", "1"])
    assert (given.workload.prompt_tokens, given.repeats) == (900, 1)


def test_what_cannot_be_run_is_refused(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingError, match="--prompt-tokens 512 is not accepted with chunks of 512"):
        CacheWorkload(512)
    with pytest.raises(ContextLengthError, match="fewer --prompt-tokens"):
        CacheWorkload(8000).require_context(8007)
    CacheWorkload(8000).require_context(8008)
    assert command.main(["cache", "--model", str(tiny)]) == 2
    assert "context of 6000 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--prompt-tokens", "--chunk", "--repeats", "--threads"])
def test_numbers_are_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["cache", f"{option}=0"])
    assert option in capsys.readouterr().err


def test_the_kind_of_disk_is_told(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/a / ext4 rw 0 0\ntmpfs {tmp_path.parent} tmpfs rw 0 0\n/dev/b /elsewhere xfs rw 0 0\n"
    )
    assert file_system(tmp_path, mounts) == "tmpfs"
    assert file_system(Path("/"), mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "none") is None
