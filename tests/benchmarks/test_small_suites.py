"""The suites of single steps, of starting, of chunk sizes and of instructions, each run at a small size."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import models
from benchmarks.harness import OURS, RATIOS
from benchmarks.reading import FIRST_TOKEN, PREFILLING, TOTAL
from benchmarks.suites import (
    activations,
    decode,
    host,
    implementations,
    instructions,
    start,
    strict,
    sweep,
    tools,
)
from benchmarks.suites.sweep import specs_of
from benchmarks.systems import AUTO, Spec
from penstock.engine.status import StepRecord
from penstock.frontends.server.metrics import Telemetry
from penstock.kernels.interface import select_kernels
from penstock.machine import instruction_set, processor_flags
from tests.benchmarks.made_up import results_of, run

SWEPT = "--chunks 0,32,auto --lengths 40,70 --repeats 3 --decode-tokens 2 --dtype float32 "
SWEPT += "--baseline transformers --max-spread 0.99"


def test_the_hosts_part_of_a_step(tmp_path: Path) -> None:
    arguments = ["host", "--sequences", "1,3,9", "--steps", "5"]
    status, results = run(arguments, tmp_path / "host.json")
    assert status == 0
    for section in (host.DECODES, host.MIXED):
        times = {figure.name: figure for figure in results.of(section)}
        few, some, many = (times[f"{count} sequences"] for count in (1, 3, 9))
        assert [len(each.values) for each in (few, some, many)] == [5, 5, 5]
        assert times[host.GROWTH].median == pytest.approx((many.median - few.median) / 8)


def test_steps_of_the_host_are_those_that_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes go on, with nothing planned for them; a chunk beside them is a step of its own."""
    records: list[StepRecord] = []
    monkeypatch.setattr(Telemetry, "on_step", lambda self, record: records.append(record))
    subject = host._subject()
    assert len(host.step_us(subject, 4, 6, reads=False)) == 6
    assert all(record.is_repeated and record.num_decodes == 4 for record in records[-6:])
    assert len(host.step_us(subject, 4, 6, reads=True)) == 6
    assert all(record.num_chunk_tokens == 2048 and record.num_decodes == 4 for record in records[-6:])


def test_a_decode_step_in_parts(tiny: Path, tmp_path: Path) -> None:
    arguments = ["decode", "--model", str(tiny), "--pasts", "40,100", "--steps", "3"]
    status, results = run(arguments, tmp_path / "decode.json")
    assert status == 0
    parts = {
        figure.system: figure for figure in results.of(decode.STEPS) if figure.name == "after 100 tokens"
    }
    assert all(len(figure.values) == 3 for figure in parts.values())
    for index, whole in enumerate(parts["step"].values):
        others = [figure.values[index] for name, figure in parts.items() if name != "step"]
        assert sum(others) == pytest.approx(whole)
    (first, second) = results.bars
    spent = [parts[name].median for name in ("products", "attention", "step")]
    assert second.value == pytest.approx((spent[0] + spent[1]) / spent[2])
    assert (first.limit, first.is_lower_limit) == (decode.LEAST_SHARE, True)


@pytest.mark.skipif(
    select_kernels(torch.device("cpu")).quantised is None, reason="there are no native kernels here"
)
def test_activations_of_8_bits_beside_plain_ones(tiny: Path, tmp_path: Path) -> None:
    sizes = "--weights int8 --windows 2 --window 40 --lengths 70 --decode-tokens 4 --repeats 2"
    status, results = run(["activations", "--model", str(tiny), *sizes.split()], tmp_path / "both.json")
    assert status == 0
    perplexities = {figure.system: figure.median for figure in results.of(activations.PERPLEXITY)}
    assert set(perplexities) == {activations.PLAIN, activations.ROUNDED, activations.UNPACKED}
    for system in (activations.ROUNDED, activations.UNPACKED):
        assert perplexities[system] == pytest.approx(perplexities[activations.PLAIN], rel=0.2)
    shares = [figure.median for figure in results.of(activations.LIKELIEST)]
    assert len(shares) == 3
    assert all(0.5 < share <= 1 for share in shares)
    ratios = {figure.name: len(figure.values) for figure in results.of(RATIOS)}
    assert ratios == {"70 tokens read": 2, "decodes after 70 tokens": 2}


def test_strict_steps_take_turns_with_plain_ones(tiny: Path, tmp_path: Path) -> None:
    sizes = "--weights int8 --decodes 1,3 --chunks 40 --past 50 --requests 4 --request-tokens 3 --repeats 3"
    status, results = run(["strict", "--model", str(tiny), *sizes.split()], tmp_path / "strict.json")
    assert status in (0, 3)
    beside = ("", " beside a chunk of 40")
    steps = [decodes + each for each in beside for decodes in ("1 decode", "3 decodes")]
    for what in (strict.COST, strict.TURNS_COST):
        assert [figure.name for figure in results.of(RATIOS) if figure.system == what] == steps
    assert [(bar.name, bar.limit, bar.is_lower_limit) for bar in results.bars] == [
        (step, strict.MOST_COST, False) for step in steps
    ]
    assert "of 4 requests have the same tokens at once as alone" in results.notes[-1]


def test_a_family_runs_both_ways(tmp_path: Path) -> None:
    sizes = {"--layers": "1", "--chunk": "64", "--past": "20", "--rounds": "1", "--dtype": "float32"}
    arguments = ["implementations", *(word for option in sizes.items() for word in option)]
    status, results = run(arguments, tmp_path / "both.json")
    assert status in (0, 3)
    counts = {
        (figure.system, figure.name): len(figure.values) for figure in results.of(implementations.STEPS)
    }
    systems = (OURS, implementations.THEIRS)
    assert counts == {
        (system, name): number for name, number in (("chunk", 1), ("decode", 8)) for system in systems
    }
    assert [bar.limit for bar in results.bars] == [1.3, 1.7]


def test_sets_of_instructions_take_turns(tmp_path: Path) -> None:
    best = instruction_set(processor_flags())
    if best is None:
        pytest.skip("there are no native kernels for this processor")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 512, "head_dim": 32}
    (tmp_path / "small.json").write_text(json.dumps({**models.SHAPES["qwen3-0.6b"], **sizes}))
    forms = (f"{best}:Q8_0", f"{best}:Q4_K_M")
    sizes_of_run = "--layers 1 --lengths 40 --decode-tokens 3 --repeats 1 --chunk 16"
    arguments = ["instructions", "--shapes", str(tmp_path / "small.json"), "--systems", ",".join(forms)]
    status, results = run([*arguments, *sizes_of_run.split()], tmp_path / "sets.json")
    assert status == 0
    assert len(results.facts) == 4
    first, second = (form.replace(":", ", ") for form in forms)
    for section in ("prefill", "decode"):
        speeds = {figure.system: figure.values for figure in results.of(section)}
        (ratio,) = [figure for figure in results.of(RATIOS) if figure.system.startswith(section)]
        assert ratio.values[0] == pytest.approx(speeds[first][0] / speeds[second][0])
    (over_file, _) = [figure for figure in results.of(instructions.WEIGHTS) if figure.name == "over the file"]
    assert 1 <= over_file.median < 1.5


def test_start_is_measured_in_fresh_processes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_WARM_UPS", 0)
    status, results = run(["start", "--model", str(tiny), "--repeats", "1"], tmp_path / "start.json")
    assert status == 0
    assert {figure.name: len(figure.values) for figure in results.figures} == dict.fromkeys(start.LIMITS, 1)
    assert all(figure.median > 0 for figure in results.figures)


def test_start_has_bars() -> None:
    results = results_of("start")
    results.add("start", start.PROGRESS, "s", 3.1, 3.2, 2.0)
    results.add("start", start.RESIDENT, "x", 1.4, 1.5, 1.6)
    results.add("start", start.LOADING, "s/GB", 1.9, 2.0, 2.1)
    met = {bar.name: bar.is_met for bar in start._bars(results)}
    assert met == {start.FIRST: False, start.PROGRESS: False, start.RESIDENT: True, start.LOADING: True}


def test_tools_are_measured_in_turns(tiny: Path, tmp_path: Path) -> None:
    sizes = "--repeats 1 --answer-tokens 4 --tools 2 --dtype float32"
    status, results = run(["tools", "--model", str(tiny), *sizes.split()], tmp_path / "tools.json")
    assert status in (0, 3)
    for case in tools.CASES:
        found = {(figure.system, figure.name): len(figure.values) for figure in results.of(case)}
        assert found == {(way, name): 1 for way in tools.WAYS for name in (tools.FIRST, tools.NEXT)}
    assert len(results.bars) == 5
    assert all(bar.value is not None for bar in results.bars)


def test_a_sweep_of_chunks_and_lengths(tiny: Path, tmp_path: Path) -> None:
    status, results = run(["sweep", "--model", str(tiny), *SWEPT.split()], tmp_path / "sweep.json")
    assert status in (0, 3)
    systems = [spec.label for spec in specs_of((0, 32, AUTO), ["transformers"])]
    for section in (FIRST_TOKEN, PREFILLING, TOTAL):
        found = [(figure.system, figure.name) for figure in results.of(section)]
        assert found == [(system, name) for system in systems for name in ("40 tokens", "70 tokens")]
        assert all(sorted(figure.rounds) == [0, 1, 2] for figure in results.of(section))
    assert status == (3 if results.noisy else 0)


def test_configurations_of_a_sweep() -> None:
    assert specs_of((0, 128, AUTO), []) == [Spec("Penstock", each) for each in (0, 128, AUTO)]
    both = specs_of((128, AUTO), ["transformers", "llama.cpp"])
    assert both[2:] == [Spec("transformers", 0), Spec("transformers", 128), Spec("llama.cpp", 128)]


def test_lines_of_a_sweep_go_from_small_chunks_to_whole_prompts() -> None:
    results = results_of("sweep")
    for chunk in ("whole", "chunk 512", "chunk 64", "auto"):
        results.add(FIRST_TOKEN, "40 tokens", "s", 1.0, system=f"Penstock, {chunk}")
    (line,) = sweep._lines(results, FIRST_TOKEN).values()
    assert list(line)[:2] == ["64", "512"]
    assert set(line) == {"64", "512", "whole", "auto"}
