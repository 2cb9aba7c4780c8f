"""Comparing with other engines: what is chosen, what is counted, what is promised, and the command, end to end."""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import penstock.bench.__main__ as command
from penstock.bench import peers_bars, peers_plot, peers_report, peers_workers
from penstock.bench.peers_benchmark import fixed, plan_turns
from penstock.bench.peers_options import left_out, parse_peers_options
from penstock.bench.peers_pick import Picker, choose
from penstock.bench.peers_process import Answered, PeerError
from penstock.bench.peers_results import PeerResults, PeerSettings, Sample, Trial
from penstock.bench.peers_workers import Workers, find_pythons
from penstock.bench.peers_workload import (
    PEER_ENGINES,
    Candidate,
    EngineName,
    PeerSystem,
    PeerWorkload,
    llama_candidates,
    vllm_candidates,
)
from penstock.bench.plot import can_plot
from tests.bench.made_up import MACHINE
from tests.byte_models import model_of_bytes

WORKLOAD = PeerWorkload(decode_tokens=2, repeats=3)
# Prefill and decode, tokens/s: every bar is met.
SPEEDS = {
    PeerSystem.PENSTOCK: (1000.0, 150.0),
    PeerSystem.PENSTOCK_AUTO: (1000.0, 150.0),
    PeerSystem.TRANSFORMERS: (500.0, 20.0),
    PeerSystem.LLAMA_FILE: (200.0, 80.0),
    PeerSystem.LLAMA_BEST: (400.0, 120.0),
    PeerSystem.VLLM: (800.0, 40.0),
}
WITHOUT_VLLM: dict[PeerSystem, tuple[float, float]] = {
    system: speeds for system, speeds in SPEEDS.items() if system != PeerSystem.VLLM
}


def made_up(speeds: dict[PeerSystem, tuple[float, float]], **changes: object) -> PeerResults:
    samples: list[Sample] = []
    for round_index, jitter in enumerate((1.0, 1.02, 0.99)):
        for system, (prefill, decode) in speeds.items():
            for length in WORKLOAD.lengths:
                first = length / prefill / jitter
                answered = Answered((7, 8, 9), (first, first + 1 / decode, first + 2 / decode))
                candidate = Candidate.of(system.engine)
                both = Sample(
                    len(samples), round_index, system, length, candidate, ("prefill", "decode"), answered
                )
                is_both = system.decodes and length in WORKLOAD.decode_lengths
                samples.append(both if is_both else replace(both, quantities=("prefill",)))
    absent = {system.value: "not installed" for system in PeerSystem if system not in speeds}
    settings = PeerSettings("a model", "bfloat16", 2, WORKLOAD)
    choices = [choice for system in speeds for choice in fixed(system, Candidate.of(system.engine), WORKLOAD)]
    results = PeerResults(MACHINE, settings, {}, absent, (), tuple(choices), tuple(samples), 1.0)
    return replace(results, **changes)  # type: ignore[arg-type]


def test_bars_are_medians_of_ratios_by_round() -> None:
    bars = peers_bars.check_bars(made_up(SPEEDS))
    values = {bar.name: bar.value for bar in bars}
    name = "prefill of 512: Penstock, chunk 512 over llama.cpp, this file"
    assert values[name] == pytest.approx(5.0)
    assert values["decode after 8,000: Penstock over llama.cpp, its best format"] == pytest.approx(1.25)
    assert len(bars) == 2 * (3 + 2 + 3 + 2) + 4
    assert all(bar.is_met for bar in bars)


def test_a_bar_just_missed_is_missed() -> None:
    bars = peers_bars.check_bars(made_up({**SPEEDS, PeerSystem.VLLM: (1000 / 1.099, 40.0)}))
    assert [bar.name for bar in bars if not bar.is_met] == [
        f"prefill of {length}: {ours.label} over vLLM, bfloat16"
        for ours in (PeerSystem.PENSTOCK, PeerSystem.PENSTOCK_AUTO)
        for length in ("512", "2,048", "8,000")
    ]


def test_what_was_not_measured_is_not_met() -> None:
    bars = peers_bars.check_bars(made_up(WITHOUT_VLLM))
    open_bars = [bar for bar in bars if not bar.is_met]
    assert len(open_bars) == 6
    assert all(bar.value is None and bar.verdict == "not measured (left out)" for bar in open_bars)
    float32 = PeerSettings("a model", "float32", 2, WORKLOAD)
    assert not any(bar.is_met for bar in peers_bars.check_bars(made_up(SPEEDS, settings=float32)))


def test_a_turn_counts_only_for_what_it_is_for() -> None:
    results = made_up(SPEEDS)
    assert results.speed(PeerSystem.PENSTOCK, 2048, "decode") is None
    assert results.speed(PeerSystem.PENSTOCK_AUTO, 512, "decode") is None
    spread = results.speed(PeerSystem.VLLM, 2048, "prefill")
    assert spread is not None
    assert spread.values == pytest.approx((800.0, 816.0, 792.0))
    assert results.num_agreed(PeerSystem.VLLM, 512) == (3, 3)


def test_the_page_has_everything(tmp_path: Path) -> None:
    results = made_up(WITHOUT_VLLM)
    page = peers_report.render(results)
    for expected in (
        "left out: vLLM, bfloat16: not installed",
        "llama.cpp, its best format",
        "not measured (left out)",
        "prefill: Penstock, auto over transformers, whole",
        "1,000.0 (995.0 to 1,010.0)",
    ):
        assert expected in page
    assert json.loads(json.dumps(results.to_dict()))["left_out"] == {"vllm": "not installed"}
    if can_plot():
        peers_plot.draw(results, tmp_path / "peers.png")
        assert (tmp_path / "peers.png").stat().st_size > 10_000


def test_the_best_settings_are_chosen_for_each_length_and_for_decoding() -> None:
    small, large = vllm_candidates()[:2]
    trials = [
        Trial(small, 512, 1.0, 30.0),
        Trial(small, 2048, 5.0, 30.0),
        Trial(small, 8000, 30.0, 20.0),
        Trial(large, 512, 1.02, 30.5),  # within noise
        Trial(large, 2048, 4.0, 30.0),
        Trial(large, 8000, 20.0, 10.0),
    ]
    choices = choose(PeerSystem.VLLM, trials, PeerWorkload())
    assert [choice.prefill for choice in choices] == [large, large, large]
    assert [choice.decode for choice in choices] == [large, None, small]
    better = [replace(trials[0], first_token_s=0.8), *trials[1:]]
    assert choose(PeerSystem.VLLM, better, PeerWorkload())[0].prefill == small


class SlowAtFirst(Workers):
    """Formats of known speeds on a machine that something else slows down for the first passes."""

    SECONDS: ClassVar = {"Q4_0": 2.0, "Q8_0": 3.0, "BF16": 3.5, "F16": 2.5}

    def __init__(self, num_slow: int, broken: Collection[str] = ()) -> None:
        self.num_slow, self.broken = num_slow, broken
        self.asked: list[str] = []

    def generate(self, candidate: Candidate, prompt: Sequence[int], num_tokens: int) -> Answered:
        name = candidate.settings["format"]
        self.asked.append(name)
        if name in self.broken:
            raise PeerError(f"{name} failed")
        slowness = 3.0 if len(self.asked) <= self.num_slow else 1.0
        # Q8_0 decodes fastest.
        token_s = slowness * (0.01 if name == "Q8_0" else 0.02)
        first_s = slowness * self.SECONDS[name] * len(prompt) / 1000
        return Answered((1,) * num_tokens, tuple(first_s + token_s * index for index in range(num_tokens)))

    def close(self, but: Collection[Candidate] = ()) -> None:
        pass


@pytest.mark.parametrize("num_slow", [0, 1, 3, 6, 8])
def test_a_format_is_not_chosen_for_the_machine_s_mood(num_slow: int) -> None:
    workload = PeerWorkload(trial_passes=1)
    workers = SlowAtFirst(num_slow)
    picker = Picker(workers, [1] * 8000, workload, lambda _: None)
    choices = picker.pick_format(fixed(PeerSystem.LLAMA_FILE, llama_candidates(None)[0], workload))
    formats = ("Q4_0", "Q8_0", "BF16", "F16")
    passes = workers.asked[:12]
    for start in (0, 4, 8):  # taking turns
        assert sorted(passes[start : start + 4]) == sorted(formats)
    assert {choice.prefill.settings["format"] for choice in choices} == {"Q4_0"}
    assert {choice.decode.settings["format"] for choice in choices if choice.decode} == {"Q8_0"}
    assert {trial.candidate.settings["format"] for trial in picker.trials} == set(formats)


def test_formats_that_fail_are_left_out() -> None:
    workload = PeerWorkload(trial_passes=1)
    like = fixed(PeerSystem.LLAMA_FILE, llama_candidates(None)[0], workload)
    workers = SlowAtFirst(0, broken=("Q4_0",))
    choices = Picker(workers, [1] * 8000, workload, lambda _: None).pick_format(like)
    assert {choice.prefill.settings["format"] for choice in choices} == {"F16"}
    assert workers.asked.count("Q4_0") == 1
    with pytest.raises(PeerError, match="failed"):
        Picker(
            SlowAtFirst(0, ("Q4_0", "Q8_0", "BF16", "F16")), [1] * 8000, workload, lambda _: None
        ).pick_format(like)


def test_one_turn_measures_both_where_the_settings_are_the_same() -> None:
    small, large = vllm_candidates()[:2]
    workload = PeerWorkload(lengths=(512, 2048, 8000), decode_tokens=64)
    same, none, other = fixed(PeerSystem.VLLM, small, workload)
    turns = plan_turns([same, none, replace(other, decode=large)], workload)
    assert [(turn.candidate, turn.num_tokens, turn.quantities) for turn in turns] == [
        (small, 65, ("prefill", "decode")),
        (small, 1, ("prefill",)),
        (small, 1, ("prefill",)),
        (large, 65, ("decode",)),
    ]


def test_candidates_are_named() -> None:
    assert [each.label for each in llama_candidates(None)] == [
        "llama.cpp (batch 512, flash on)",
        "llama.cpp (batch 512, flash off)",
        "llama.cpp (batch 2048, flash on)",
        "llama.cpp (batch 2048, flash off)",
    ]
    assert llama_candidates("Q8_0")[0].label == "llama.cpp (Q8_0, batch 512, flash on)"
    assert {system.engine for system in PeerSystem} == set(EngineName)


def test_who_is_left_out_and_why(tmp_path: Path) -> None:
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    found = find_pythons(tmp_path)
    assert EngineName.LLAMA_CPP not in found
    assert found[EngineName.VLLM] == python
    absent = left_out(PEER_ENGINES, list(found), Path("model.gguf"))
    assert set(absent) == {PeerSystem.LLAMA_FILE, PeerSystem.LLAMA_BEST}
    assert "make bench-peers" in absent[PeerSystem.LLAMA_FILE]
    assert set(left_out((), list(found), Path("model.gguf")).values()) == {"not asked for"}
    assert "GGUF" in left_out(PEER_ENGINES, list(EngineName), tmp_path)[PeerSystem.LLAMA_BEST]


def test_options_are_put_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_peers_options(["--lengths", "9,3,9", "--peers", "vllm,vllm"])
    assert options.workload.lengths == (3, 9)
    assert options.peers == (EngineName.VLLM,)
    assert str(options.output) == "bench-results/peers.json"
    assert parse_peers_options(["--quick"]).workload.repeats == 3
    assert parse_peers_options(["--peers", "none"]).peers == ()
    for wrong in ("penstock", "", "llama"):
        with pytest.raises(SystemExit):
            parse_peers_options([f"--peers={wrong}"])
        assert "--peers" in capsys.readouterr().err


def test_small_models_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes of Penstock and of transformers; a peer that cannot be loaded is left out."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(peers_workers, "_SETTLE_S", 0.0)
    monkeypatch.setattr(Workers, "_made", lambda *_: tmp_path)  # a process less
    folder = model_of_bytes("llama", tmp_path / "model")
    python = tmp_path / "peers" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    python.chmod(0o755)
    output = tmp_path / "peers.json"
    arguments = [
        "peers",
        "--model",
        str(folder),
        "--lengths",
        "40,70",
        "--decode-tokens",
        "2",
        "--repeats",
        "2",
    ]
    arguments += ["--threads", str(torch.get_num_threads()), "--dtype", "float32"]
    arguments += ["--peers-folder", str(tmp_path / "peers"), "--check", "--json", str(output)]
    assert command.main(arguments) == 1  # no bar is measured
    written = json.loads(output.read_text())
    assert set(written["left_out"]) == {"llama.cpp", "llama.cpp-best-format", "vllm"}
    assert "broken" in written["left_out"]["vllm"]
    assert set(written["engines"]) == {"penstock", "transformers"}
    assert set(written["weights"]) == {"penstock"}
    assert written["weights"]["penstock"].startswith("float32, ")
    turns = written["turns"]
    assert [turn["index"] for turn in turns] == list(range(12))
    assert {(turn["system"], turn["prompt_tokens"]) for turn in turns} == {
        (system, length) for system in ("penstock", "penstock-auto", "transformers") for length in (40, 70)
    }
    answers = {tuple(turn["token_ids"][:1]) for turn in turns if turn["prompt_tokens"] == 70}
    assert len(answers) == 1
    assert all(len(turn["stamps_s"]) == (1 if turn["system"] == "penstock-auto" else 3) for turn in turns)
    printed = capsys.readouterr().out
    assert "Penstock, auto" in printed
    assert f"weights in memory: {written['weights']['penstock']}" in printed
    assert output.with_suffix(".png").exists() == can_plot()


def test_a_form_of_weights_that_is_unknown_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    folder = model_of_bytes("llama", tmp_path / "model")
    arguments = [
        "peers",
        "--model",
        str(folder),
        "--lengths",
        "40",
        "--peers",
        "none",
        "--weights",
        "of gold",
    ]
    arguments += ["--threads", str(torch.get_num_threads()), "--json", str(tmp_path / "x.json")]
    assert command.main(arguments) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: penstock (chunk 512, weights of gold) failed: SettingError: ")
