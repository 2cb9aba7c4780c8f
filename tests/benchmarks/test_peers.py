"""Other engines: the search for their best settings, turns, bars; and a whole run with engines that are made up."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import RATIOS, Bench
from benchmarks.reading import DECODING, PREFILLING, Turn, note_agreement
from benchmarks.suites import peers
from benchmarks.suites.peers import (
    CHOSEN,
    FIXED,
    LIMITS,
    LLAMA_BEST,
    LLAMA_FILE,
    SYSTEMS,
    TRANSFORMERS,
    VLLM,
    Candidate,
    Workers,
    choose,
    left_out,
    limits_of,
    plan_turns,
    run_turns,
    try_all,
    turns_of,
)
from benchmarks.systems import Answer, PeerError
from tests.benchmarks.made_up import add_rounds, results_of, run

A, B = Candidate.of("llama.cpp", batch=512, flash=True), Candidate.of("llama.cpp", batch=2048, flash=True)
Speeds = Callable[[Candidate, int], tuple[float, float]]


class MadeUp(Workers):
    """Workers whose speeds are a function; what fails says so."""

    def __init__(self, speeds: Speeds, fails: Sequence[str] = ()) -> None:
        self._speeds, self._fails = speeds, fails
        self.asked: list[tuple[Candidate, int, int]] = []
        self.about = {}

    def generate(self, candidate: Candidate, prompt: Sequence[int], num_tokens: int) -> Answer:
        self.asked.append((candidate, len(prompt), num_tokens))
        if any(word in candidate.label for word in self._fails):
            raise PeerError(f"{candidate.label} failed")
        first_s, token_s = self._speeds(candidate, len(prompt))
        stamps = tuple(first_s + index * token_s for index in range(num_tokens))
        return Answer(tuple(range(num_tokens)), stamps)

    def close(self) -> None:
        pass


def even(candidate: Candidate, length: int) -> tuple[float, float]:
    return length / 1000, 0.01


def options(**changes: Any) -> argparse.Namespace:
    usual = {
        "weights": None,
        "activations": None,
        "quick": True,
        "lengths": (64,),
        "decode_tokens": 8,
        "repeats": 2,
        "seed": 0,
    }
    return argparse.Namespace(**{**usual, **changes})


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({512: (1.0, 1.02), 2048: (1.02, 1.0)}, (A, A)),  # within noise, the one that is best on the whole
        ({512: (1.0, 1.1), 2048: (1.1, 1.0)}, (A, B)),
        ({512: (1.0, 0.9), 2048: (1.0, 0.9)}, (B, B)),
    ],
)
def test_another_setting_must_be_better_by_more_than_noise(
    costs: dict[int, tuple[float, float]], expected: tuple[Candidate, Candidate]
) -> None:
    trials = {
        (section, length): {A: first, B: second}
        for section in (PREFILLING, DECODING)
        for length, (first, second) in costs.items()
    }
    assert tuple(choose(trials, length)[0] for length in costs) == expected


def test_decoding_may_have_settings_of_its_own() -> None:
    trials = {(PREFILLING, 512): {A: 1.0, B: 2.0}, (DECODING, 512): {A: 1.0, B: 0.9}}
    assert choose(trials, 512) == (A, B)


def test_the_best_pass_counts_and_what_fails_is_left_out() -> None:
    said: list[str] = []
    passes = iter([(2.0, 0.02), (1.0, 0.03)])
    asked = options(lengths=(512,), quick=False)
    trials = try_all(MadeUp(lambda *_: next(passes), ["2048"]), [A, B], [1] * 512, asked, said.append)
    assert trials == {(PREFILLING, 512): {A: 1.0}, (DECODING, 512): {A: pytest.approx(0.02)}}
    assert any("left out" in line for line in said)
    with pytest.raises(PeerError):
        try_all(MadeUp(even, ["batch"]), [A, B], [1] * 512, asked, said.append)


def test_decodes_are_measured_after_the_shortest_and_the_longest() -> None:
    lengths = (512, 2048, 8000)
    assert turns_of(VLLM, 2048, A, B, lengths, 64) == [Turn(VLLM, 2048, 1, (PREFILLING,), A)]
    assert turns_of(VLLM, 512, A, A, lengths, 64) == [Turn(VLLM, 512, 65, (PREFILLING, DECODING), A)]
    assert [turn.sections for turn in turns_of(VLLM, 8000, A, B, lengths, 64)] == [
        (PREFILLING,),
        (DECODING,),
    ]
    assert turns_of(CHOSEN, 512, A, A, lengths, 64) == [Turn(CHOSEN, 512, 1, (PREFILLING,), A)]


def test_each_engine_has_its_best_settings() -> None:
    def speeds(candidate: Candidate, length: int) -> tuple[float, float]:
        values = dict(candidate.values)
        liked = ("Q8_0", 8192, False)
        num_liked = sum(
            any(value is each or value == each != 0 for each in liked) for value in values.values()
        )
        return length / (1000 * 2**num_liked), 0.01

    absent: dict[str, str] = {}
    bench = Bench(results_of("peers"), lambda line: None)
    workers = MadeUp(speeds)
    asked = options(lengths=(64, 128))
    turns = plan_turns(workers, [1] * 128, asked, absent, bench)
    chosen = {turn.system: dict(turn.by.values) for turn in turns}
    assert chosen[FIXED] == {"chunk": 512}
    assert chosen[CHOSEN] == {"chunk": "auto"}
    assert chosen[LLAMA_FILE]["flash"] is False
    assert chosen[LLAMA_BEST] == {**chosen[LLAMA_FILE], "format": "Q8_0"}
    assert chosen[VLLM] == {"batch": 8192}
    assert absent == {}
    answers = run_turns(workers, turns, [1] * 128, asked, bench)
    assert {(turn.length, turn.system) for turn in answers} == {
        (length, system) for length in (64, 128) for system in SYSTEMS
    }
    assert all(figure.rounds in ((0, 1), (1, 0)) for figure in bench.results.of(PREFILLING))
    note_agreement(bench, answers, FIXED)
    assert "agree on 1 of 1 greedy tokens, the first 1 in a row" in bench.results.notes[0]


def test_a_peer_that_fails_is_left_out() -> None:
    absent: dict[str, str] = {}
    bench = Bench(results_of("peers"), lambda line: None)
    turns = plan_turns(MadeUp(even, ["llama", "vllm"]), [1] * 64, options(), absent, bench)
    assert {turn.system for turn in turns} == {FIXED, CHOSEN, TRANSFORMERS}
    assert set(absent) == {LLAMA_FILE, LLAMA_BEST, VLLM}


def test_who_does_not_take_part() -> None:
    everyone = ("penstock", "transformers", "llama.cpp", "vllm")
    gguf, folder = Path("model.gguf"), Path("folder")
    assert left_out(peers.PEER_ENGINES, everyone, gguf) == {}
    assert left_out((), everyone, gguf).keys() == {LLAMA_FILE, LLAMA_BEST, VLLM}
    assert left_out(peers.PEER_ENGINES, everyone[:2], gguf)[VLLM] == "not installed: make bench-peers"
    assert left_out(peers.PEER_ENGINES, everyone, folder).keys() == {LLAMA_FILE, LLAMA_BEST}


def test_bars_of_every_peer_and_length() -> None:
    results = results_of("peers")
    for section, theirs in LIMITS:
        for length, limit in LIMITS[section, theirs].items():
            name = f"{length:,} tokens"
            if results.figure(name, FIXED, section) is None:
                add_rounds(results, section, name, {FIXED: [100.0] * 3, CHOSEN: [99.0] * 3}, "tokens/s")
            add_rounds(results, section, name, {theirs: [99.9 / limit] * 3}, "tokens/s")
    peers.compare(results)
    bars = peers._bars(results)
    assert len(bars) == 24
    # With automatic chunks all are missed by one percent.
    assert [bar.is_met for bar in bars] == [CHOSEN not in bar.name for bar in bars]
    assert not any(bar.is_met or bar.value for bar in peers._bars(results_of("peers")))
    results.settings["dtype"] = "float32"
    assert not any(bar.is_met for bar in peers._bars(results))


def test_bars_follow_from_the_file_and_the_processor() -> None:
    assert limits_of("smollm2", "avx512_bf16") == ""
    assert {limits_of("a.gguf", each) for each in ("avx512", "avx512_bf16")} == {"k-quants"}
    assert limits_of("a.gguf", "avx512", "plain") == "k-quants"
    assert {limits_of(model, "avx512", "int8") for model in ("smollm2", "a.gguf")} == {"int8"}
    assert {limits_of("a.gguf", "amx", each) for each in (None, "int8")} == {"amx"}
    assert {limits_of(model, each) for model in ("smollm2", "a.gguf") for each in ("avx2", None)} == {"avx2"}
    results = results_of("peers")
    results.settings["limits"] = "avx2"
    speeds = {FIXED: [130.0] * 3, CHOSEN: [129.0] * 3, LLAMA_FILE: [100.0] * 3}
    for length in (512, 2048):
        add_rounds(results, PREFILLING, f"{length:,} tokens", speeds, "tokens/s")
    peers.compare(results)
    assert [(bar.is_met, bar.limit) for bar in peers._bars(results)] == [
        *[(True, 1.3)] * 2,
        *[(False, 1.3)] * 2,
        *[(False, 1.1)] * 2,
    ]


def test_with_the_same_file_only_those_who_compute_with_it_take_part() -> None:
    everyone = ("penstock", "transformers", "llama.cpp", "vllm")
    absent = left_out(peers.PEER_ENGINES, everyone, Path("model.gguf"), same_file=True)
    assert set(SYSTEMS) - set(absent) == {FIXED, CHOSEN, LLAMA_FILE}


QUICK = "--lengths 24,40 --decode-tokens 2 --repeats 1 --dtype float32 --quick --check"
LLAMA = """
class Engine:
    def prepare(self, model, output, format, **_):
        open(output, "w").write(format)
    def load(self, model, batch, flash, **_):
        self.text = open(model).read()
        return {"about": "llama"}
    def generate(self, prompt, num_tokens, on_token):
        for index in range(num_tokens):
            on_token(index)
"""


def test_a_whole_run_with_an_engine_of_another_environment(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings are looked for, its file is written anew in other formats, and it takes turns."""
    (tmp_path / "made_up_llama.py").write_text(LLAMA)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setitem(peers.ENGINES, "llama.cpp", "made_up_llama:Engine")
    monkeypatch.setattr(peers, "_FORMATS", ("Q4_0", "Q8_0"))
    monkeypatch.setattr(peers, "_SETTLE_S", 0.0)
    python = tmp_path / "peers" / "llama.cpp" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(peers, "left_out", lambda *_: dict.fromkeys((VLLM, CHOSEN), "not asked for"))
    monkeypatch.setattr(
        Workers, "_model", lambda self, engine, form: _model_of(self, tmp_path, engine, form, tiny)
    )
    arguments = ["peers", "--model", str(tiny), *QUICK.split(), "--peers-folder", str(tmp_path / "peers")]
    status, results = run(arguments, tmp_path / "peers.json")
    assert status == 1  # bars that were not measured
    assert {figure.system for figure in results.of(PREFILLING)} == set(SYSTEMS) - {VLLM, CHOSEN}
    assert {figure.system for figure in results.of(DECODING)} == set(SYSTEMS) - {VLLM, CHOSEN}
    assert any(figure.system == f"prefill: {FIXED} over {LLAMA_FILE}" for figure in results.of(RATIOS))
    assert "llama.cpp: llama" in results.notes
    assert f"left out: {VLLM}: not asked for" in results.notes
    # Both run the same model: in float32 they choose the same tokens.
    agreed = "after 40 tokens transformers, whole and Penstock, chunk 512 agree on 3 of 3 greedy tokens"
    assert any(note.startswith(agreed) for note in results.notes)


def _model_of(workers: Workers, folder: Path, engine: str, form: str | None, tiny: Path) -> Path:
    """A folder is no file that llama.cpp reads: it is given one."""
    if engine != "llama.cpp":
        return tiny
    path = folder / f"{form}.gguf"
    path.write_text("weights")
    return path
