"""Laws of tuning: what is planned, what is timed, what follows from it, and what is kept."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import BLOCK_TOKENS
from penstock.engine.llm import LLM
from penstock.engine.profile import PrefillSample, StepSample, load_profile
from penstock.measure.growth import can_measure_growth
from penstock.measure.steps import StepSpec, StepTimer
from penstock.measure.tune import (
    MIN_ROUNDS,
    MOST_ROUNDS,
    QUICK_SECONDS,
    USUAL_SECONDS,
    best_chunk,
    fit,
    fit_error,
    measure_memory,
    measure_steps,
    plan_tuning,
    slowdowns,
)
from penstock.plan.step import StepShape
from penstock.plan.step_time import StepTimeCoefficients
from tests.byte_models import CONTEXT, model_of_bytes
from tests.measure.verifying import assert_refused, run_command
from tests.oracle import canon_of, load_model, make_oracle, random_prompt

THREADS = str(torch.get_num_threads())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes("llama", tmp_path_factory.mktemp("tune") / "model")


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))


@given(
    context=st.integers(16, 200_000),
    speed=st.floats(1.0, 1e6),
    seconds=st.floats(0.1, 3600.0),
    quick=st.booleans(),
)
def test_a_plan_fits_the_context_and_the_fit(context: int, speed: float, seconds: float, quick: bool) -> None:
    plan = plan_tuning(context, speed, seconds, quick=quick)
    for step in plan.steps:
        assert step.past + step.num_tokens < context
        assert step.decode_past + 1 < context
    assert max(plan.prompt_lengths) + 1 < context
    assert plan.memory_tokens < context
    assert MIN_ROUNDS <= plan.rounds <= MOST_ROUNDS
    assert len(set(plan.steps)) == len(plan.steps) <= 64  # as many kinds as the fit tells apart
    assert list(plan.chunks) == sorted(set(plan.chunks))
    if plan.rounds > MIN_ROUNDS:
        assert plan.num_tokens <= seconds * speed * 1.001


@given(context=st.integers(64, 20_000), speed=st.floats(10.0, 1e4), seconds=st.floats(1.0, 600.0))
def test_more_time_is_never_used_for_fewer_rounds_of_the_same_steps(
    context: int, speed: float, seconds: float
) -> None:
    short, long = (plan_tuning(context, speed, value) for value in (seconds, 2 * seconds))
    assert len(long.steps) >= len(short.steps)
    if long.steps == short.steps:
        assert long.rounds >= short.rounds


def check_integrity(timer: StepTimer) -> None:
    """Blocks and slots are held for what was read, and for nothing else."""
    sequences, blocks, slots = (timer.long, *timer.short), timer.space.blocks, timer.space.slots
    blocks.check_integrity()
    needed = sum(-(-cache.num_tokens // BLOCK_TOKENS) for cache in sequences)
    assert needed == blocks.num_blocks - blocks.num_free
    if slots is not None:
        slots.check_integrity()
        assert sum(cache.num_tokens > 0 for cache in sequences) == slots.num_slots - slots.num_free


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_timed_step_holds_nothing_afterwards(family: str) -> None:
    """Steps at any past, in any order, with decodes beside them."""
    model = load_model(make_oracle(family).folder)
    canon, prompt = canon_of(model), random_prompt(700)
    specs = [StepSpec(128, 512), StepSpec(64, 0, 3, 60), StepSpec(0, 0, 1, 256), StepSpec(64, 576)]
    bench = StepTimer(model, canon, prompt, specs)
    for spec in (*specs, *reversed(specs)):
        assert bench.seconds(spec) > 0
        check_integrity(bench)


def test_what_follows_from_known_times_is_known() -> None:
    truth = StepTimeCoefficients(0.01, 1e-3, 2e-7, 4e-3, 1e-6)
    specs = plan_tuning(8192, 5000.0, 240.0).steps
    samples = [
        StepSample(spec.num_tokens, spec.past, spec.num_decodes, spec.shape.decode_pasts, seconds)
        for spec, seconds in ((spec, truth.seconds(spec.shape)) for spec in specs)
    ]
    assert all(sample.shape == spec.shape for sample, spec in zip(samples, specs, strict=True))
    error = fit_error(fit(samples), samples)
    assert error.median < 0.01
    assert error.p95 < 0.05
    far_off = [replace(sample, seconds=2 * sample.seconds) for sample in samples]
    assert fit_error(truth, far_off).median == pytest.approx(0.5)


def test_the_smallest_chunk_within_two_percent_is_the_best() -> None:
    def prefills(*seconds: float) -> list[PrefillSample]:
        return [PrefillSample(128 << index, 1024, value) for index, value in enumerate(seconds)]

    assert best_chunk(prefills(2.0, 1.5, 1.01, 1.0)) == 512
    assert best_chunk(prefills(2.0, 1.5, 1.05, 1.0)) == 1024
    assert best_chunk(prefills(1.0, 1.5, 1.05, 1.0)) == 128
    # Over several lengths each counts the same, however long it takes.
    both = [*prefills(1.0, 1.2), PrefillSample(128, 4096, 40.0), PrefillSample(256, 4096, 30.0)]
    assert slowdowns(both) == pytest.approx({128: (1 + 4 / 3) / 2, 256: (1.2 + 1) / 2})
    assert best_chunk(both) == 256


def test_every_step_has_a_turn_in_every_round(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, dtype="float32", chunk=512)
    plan = plan_tuning(300, 1.0, 1.0, quick=True)
    diary: list[StepSpec] = []

    class Diary(StepTimer):
        def seconds(self, spec: StepSpec, *, strict: bool = False) -> float:
            diary.append(spec)
            return super().seconds(spec)

    monkeypatch.setattr("penstock.measure.tune.StepTimer", Diary)
    samples = measure_steps(llm, random_prompt(300), plan, lambda line: None)
    count = len(plan.steps)
    rounds = [diary[index : index + count] for index in range(count, len(diary), count)]  # after the warm-up
    assert len(rounds) == plan.rounds
    assert all(set(order) == set(plan.steps) for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1
    assert [sample.shape for sample in samples] == [spec.shape for spec in plan.steps]


def test_a_small_model_end_to_end(folder: Path, tmp_path: Path) -> None:
    common = ["tune", "--model", str(folder), "--dtype", "float32", "--threads", THREADS]
    nothing = run_command(*common, "--show")
    assert nothing.exit_code == 1
    assert re.fullmatch("penstock: .* penstock tune makes one", nothing.stderr.splitlines()[-1])
    plot, output = tmp_path / "out" / "tune.png", tmp_path / "out" / "tune.json"
    done = run_command(*common, "--quick", "--seconds", "0.5", "--plot", str(plot), "--json", str(output))
    assert done.exit_code == 0
    assert plot.stat().st_size > 10_000
    llm = LLM(folder, dtype="float32")
    profile = load_profile(llm)
    assert profile is not None
    written = json.loads(output.read_text())
    assert written["best_chunk"] == profile.best_chunk
    assert written["fit_error"]["median"] >= 0
    assert profile.best_chunk in {each.chunk for each in profile.measurements.prefills}
    assert max(each.prompt_tokens for each in profile.measurements.prefills) < CONTEXT
    assert profile.coefficients.seconds(StepShape.of_chunk(512, 0)) > 0
    assert all(each.expected_bytes > 0 for each in profile.measurements.memory)
    assert f"best chunk for time to first token: {profile.best_chunk:,}" in done.stdout
    # What was found is shown again, from the file that was named, and is what `auto` starts from.
    shown = run_command(*common, "--show")
    assert shown.exit_code == 0
    assert shown.stdout == done.stdout.partition("json:    ")[0]
    assert (tmp_path / "home" / "tune").as_posix() in shown.stdout
    assert "tuned" in llm.chunk.reason


@pytest.mark.skipif(not can_measure_growth(), reason="needs /proc/self/clear_refs")
def test_memory_is_measured_in_fresh_processes(folder: Path) -> None:
    llm = LLM(folder, dtype="float32", chunk=512)
    plan = replace(plan_tuning(300, 1.0, 1.0, quick=True), chunks=(64, 256), memory_tokens=256)
    said: list[str] = []
    (sample,) = measure_memory(llm, replace(plan, chunks=(64,)), said.append)
    assert (sample.chunk, sample.prompt_tokens) == (64, 256)
    assert sample.measured_bytes is not None
    assert sample.measured_bytes < 1 << 28
    # A process that fails is told of once, and tuning goes on without.
    llm.path = folder / "nothing"
    samples = measure_memory(llm, plan, said.append)
    assert all(each.measured_bytes is None and each.expected_bytes > 0 for each in samples)
    assert sum("memory is not measured" in line for line in said) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["--model", "no/such/model/at-all"], 3, "no/such/model/at-all"),
        (["--plot", "/dev/null/x.png"], 2, "--plot '/dev/null/x.png'"),
        (["--json", "."], 2, "--json '.'"),
        *((["--seconds", value], 2, "--seconds") for value in ("0", "-1", "nan", "inf")),
    ],
)
def test_a_refusal_is_one_line(arguments: list[str], status: int, expected: str) -> None:
    assert_refused(expected, "tune", *arguments, status=status)


def test_seconds_that_are_no_number_are_refused_by_name() -> None:
    done = run_command("tune", "--seconds", "x")
    assert done.exit_code == 2
    assert "--seconds" in done.stderr


def test_help_names_the_defaults() -> None:
    text = " ".join(run_command("tune", "--help").stdout.replace("\u2502", " ").split())
    assert f"{USUAL_SECONDS:.0f} by default, {QUICK_SECONDS:.0f} with --quick" in text
