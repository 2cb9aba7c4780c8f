"""Measures a model on this machine: single steps, whole prompts, memory; and what follows for chunk sizes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

import torch

from penstock.bench.memory import Job, growth_in_fresh_process
from penstock.bench.systems import PenstockSystem, SystemName
from penstock.bench.timing import Turn, time_pass
from penstock.bench.tune_plan import TunePlan
from penstock.engine.llm import LLM
from penstock.engine.profile import (
    Measurements,
    MemorySample,
    PrefillSample,
    StepSample,
    TuneProfile,
    profile_key,
)
from penstock.measure.growth import MeasurementError, can_measure_growth
from penstock.measure.prompts import shuffled_rounds
from penstock.measure.steps import StepSpec, StepTimer
from penstock.models.shape import model_shape, workspace_of
from penstock.plan.fitting import chunk_peak_bytes
from penstock.plan.step_time import StepTimeCoefficients, StepTimeModel

Say = Callable[[str], None]

# Of chunk sizes that read a prompt about as fast, the smallest is best: it needs the least memory, and others wait
# the least for it.
GOOD_ENOUGH = 1.02
_SEED = 0
_WARM_UP_TOKENS = 512


@dataclass(frozen=True)
class FitError:
    """How far the fitted times lie from the measured ones, as shares of the latter."""

    median: float
    p95: float


def measure_speed(llm: LLM, prompt: Sequence[int]) -> float:
    """Prompt tokens per second of a short prompt, after another to warm up."""
    turn = _turn(llm, 0)
    short = prompt[:_WARM_UP_TOKENS]
    time_pass(turn, short, 0)
    return time_pass(turn, short, 0).prefill_tokens_per_s


def measure_profile(
    llm: LLM, path: Path, name: str, prompt: Sequence[int], plan: TunePlan, say: Say
) -> TuneProfile:
    """Everything that the plan asks for. `prompt` is as long as its furthest step or longest prompt."""
    steps = measure_steps(llm, prompt, plan, say)
    prefills = measure_prefills(llm, prompt, plan, say)
    memory = _measure_memory(llm, path, prompt, plan, say)
    return TuneProfile(
        key=profile_key(llm),
        coefficients=fit(steps),
        best_chunk=best_chunk(prefills),
        measurements=Measurements(tuple(steps), tuple(prefills), tuple(memory)),
        model_name=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def measure_steps(llm: LLM, prompt: Sequence[int], plan: TunePlan, say: Say) -> list[StepSample]:
    """The median of each step, which all take turns, in another order each round."""
    bench = StepTimer(llm.model, llm.canon, prompt, plan.steps)
    for spec in plan.steps:  # libraries prepare for every number of rows that they meet
        bench.seconds(spec)
    times: dict[StepSpec, list[float]] = {spec: [] for spec in plan.steps}
    for index, order in enumerate(shuffled_rounds(plan.steps, plan.step_rounds, _SEED)):
        for spec in order:
            times[spec].append(bench.seconds(spec))
        say(f"steps: round {index + 1} of {plan.step_rounds}")
    return [
        StepSample(
            spec.num_tokens, spec.past, spec.num_decodes, spec.num_decodes * spec.decode_past, median(values)
        )
        for spec, values in times.items()
    ]


def measure_prefills(llm: LLM, prompt: Sequence[int], plan: TunePlan, say: Say) -> list[PrefillSample]:
    """The median time to first token of whole prompts, chunk sizes taking turns."""
    turns = {chunk: _turn(llm, chunk) for chunk in plan.chunks}
    cells = [(chunk, length) for length in plan.prompt_lengths for chunk in plan.chunks]
    times: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for index, order in enumerate(shuffled_rounds(cells, plan.prompt_rounds, _SEED)):
        for chunk, length in order:
            done = time_pass(turns[chunk], prompt[:length], index)
            times[chunk, length].append(done.first_token_s)
        say(f"whole prompts: round {index + 1} of {plan.prompt_rounds}")
    return [PrefillSample(chunk, length, median(values)) for (chunk, length), values in times.items()]


def fit(steps: Sequence[StepSample]) -> StepTimeCoefficients:
    model = StepTimeModel()
    for sample in steps:
        model.record(sample.shape, sample.seconds)
    return model.coefficients


def fit_error(coefficients: StepTimeCoefficients, steps: Sequence[StepSample]) -> FitError:
    errors = [abs(coefficients.seconds(each.shape) - each.seconds) / each.seconds for each in steps]
    return FitError(median(errors), quantiles(errors, n=20, method="inclusive")[-1])


def best_chunk(prefills: Sequence[PrefillSample]) -> int:
    """The smallest chunk that reads prompts about as soon as the fastest does, over all lengths."""
    scores = slowdowns(prefills)
    fastest = min(scores.values())
    return min(chunk for chunk, score in scores.items() if score <= GOOD_ENOUGH * fastest)


def slowdowns(prefills: Sequence[PrefillSample]) -> Mapping[int, float]:
    """By chunk: its time over the shortest at the same length, on average over the lengths."""
    shortest: dict[int, float] = {}
    for each in prefills:
        shortest[each.prompt_tokens] = min(each.seconds, shortest.get(each.prompt_tokens, each.seconds))
    ratios: dict[int, list[float]] = {}
    for each in prefills:
        ratios.setdefault(each.chunk, []).append(each.seconds / shortest[each.prompt_tokens])
    return {chunk: sum(values) / len(values) for chunk, values in ratios.items()}


def _measure_memory(
    llm: LLM, path: Path, prompt: Sequence[int], plan: TunePlan, say: Say
) -> list[MemorySample]:
    """Of a prompt in chunks of each size: by arithmetic and, where it can be, as a fresh process grows."""
    length = plan.memory_tokens or max(plan.prompt_lengths)
    is_measured = plan.memory_tokens > 0 and (llm.device_kind.has_own_memory or can_measure_growth())
    samples = []
    for chunk in plan.chunks:
        measured = None
        if is_measured:
            measured = _growth(llm, path, chunk, prompt[:length], say)
            is_measured = measured is not None
        samples.append(MemorySample(chunk, length, expected_bytes(llm, chunk, length), measured))
    return samples


def expected_bytes(llm: LLM, chunk: int, prompt_tokens: int) -> int:
    """Activations of the step that needs the most of them, in a prompt that is read in chunks of one size."""
    model = llm.model
    return chunk_peak_bytes(
        model_shape(model.config),
        prompt_tokens,
        chunk,
        dtype_bytes=model.dtype.itemsize,
        workspace=workspace_of(model),
    )


def _growth(llm: LLM, path: Path, chunk: int, prompt: Sequence[int], say: Say) -> int | None:
    """None where a process cannot be measured: tuning goes on without."""
    job = Job(
        model=str(path),
        system=SystemName.PENSTOCK,
        dtype=str(llm.model.dtype).removeprefix("torch."),
        chunk=chunk,
        num_threads=torch.get_num_threads(),
        prompt=tuple(prompt),
        device=llm.device.name,
    )
    try:
        growth = growth_in_fresh_process(job)
    except MeasurementError as error:
        say(f"memory is not measured: {error}")
        return None
    say(f"memory: chunk {chunk:,}: {growth.activation_bytes / 2**20:.1f} MiB")
    return max(growth.activation_bytes, 0)


def _turn(llm: LLM, chunk: int) -> Turn:
    return Turn(PenstockSystem(SystemName.PENSTOCK, llm.model, llm.canon, chunk), 1, 1)
