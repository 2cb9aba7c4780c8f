"""Measures a model on this machine: single steps, whole prompts, memory; and what follows for chunk sizes."""

import contextlib
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import mean, median, quantiles
from typing import TypeVar

import torch

from penstock.engine.llm import LLM
from penstock.engine.profile import (
    Measurements,
    MemorySample,
    PrefillSample,
    StepSample,
    TuneProfile,
    profile_key,
)
from penstock.engine.run import Run
from penstock.files import readable_json
from penstock.measure.growth import MeasurementError, can_measure_growth
from penstock.measure.memory import MemoryJob, measure_in_fresh_process
from penstock.measure.prompts import shuffled_rounds, text_tokens
from penstock.measure.steps import StepSpec, StepTimer
from penstock.models.decoder import activation_model
from penstock.models.opened import open_weights
from penstock.plan import ChunkedPrefillConfig
from penstock.plan.grids import STATE_GRID
from penstock.plan.memory import kv_cache_bytes, state_slot_bytes
from penstock.plan.step_time import StepTimeCoefficients, StepTimeModel

Say = Callable[[str], None]
T = TypeVar("T")

USUAL_SECONDS = 240.0
QUICK_SECONDS = 40.0
MIN_ROUNDS = 3
MOST_ROUNDS = 9
MOST_CHUNK = 2048
# Of chunk sizes that read a prompt about as fast, the smallest is best: it needs the least memory, and others wait
# the least for it.
GOOD_ENOUGH = 1.02
# Decodes beside a chunk, each after so many tokens.
_DECODES = (1, 4, 16)
_DECODE_PAST = 128
_MOST_PAST = 16_384
# A token after a long past takes longer than those that the speed was measured with.
_PAST_FACTOR = 1.4
# Tokens whose reading takes about as long as a decode beside nothing.
_DECODE_TOKENS = 16
_WARM_UP_TOKENS = 512
_SEED = 0


@dataclass(frozen=True)
class TunePlan:
    """Which steps and which whole prompts are timed, and how often."""

    steps: tuple[StepSpec, ...]
    chunks: tuple[int, ...]  # of the whole prompts
    prompt_lengths: tuple[int, ...]
    memory_tokens: int  # the prompt whose memory is measured in fresh processes; 0: none is
    rounds: int

    @property
    def num_tokens(self) -> float:
        """About how many tokens' time it takes, memory aside."""
        return max(step.long_past for step in self.steps) + self.rounds * self.round_tokens

    @property
    def round_tokens(self) -> float:
        """The same of one round."""
        steps = (
            step.num_tokens * (_PAST_FACTOR if step.past else 1.0) + _DECODE_TOKENS * (step.num_decodes > 0)
            for step in self.steps
        )
        return sum(steps) + _PAST_FACTOR * len(self.chunks) * sum(self.prompt_lengths)


@dataclass(frozen=True)
class FitError:
    """How far the fitted times lie from the measured ones, as shares of the latter."""

    median: float
    p95: float

    def __str__(self) -> str:
        return f"median {self.median:.1%}, 95th percentile {self.p95:.1%}"


def plan_tuning(context: int, tokens_per_s: float, seconds: float, *, quick: bool = False) -> TunePlan:
    """A plan that takes about so long on a machine of this speed; never fewer than three rounds, which may take
    longer."""
    plan = _least_plan(context, quick=quick)
    if not quick and plan.num_tokens > seconds * tokens_per_s:
        plan = _least_plan(context, quick=True)
    spare = seconds * tokens_per_s - plan.num_tokens
    return replace(plan, rounds=min(MIN_ROUNDS + max(int(spare / plan.round_tokens), 0), MOST_ROUNDS))


def _least_plan(context: int, *, quick: bool) -> TunePlan:
    room = context - 2  # a token is generated after the longest prompt
    sizes = (128, 512, 1024) if quick else (64, 128, 256, 512, 1024, 2048)
    chunks = tuple(size for size in sizes if size <= min(room // 2, MOST_CHUNK)) or (max(room // 2, 1),)
    shares = (0.0, 3 / 8) if quick else (0.0, 1 / 8, 3 / 8, 3 / 4)
    pasts = sorted({int(share * min(room, _MOST_PAST)) // STATE_GRID * STATE_GRID for share in shares})
    decode_past = min(_DECODE_PAST, room // 2)
    steps = [StepSpec(chunk, past) for past in pasts for chunk in chunks if past + chunk <= room]
    beside = sorted({chunks[len(chunks) // 4], chunks[len(chunks) // 2]})
    for num_decodes in _DECODES:
        steps += [StepSpec(chunk, 0, num_decodes, decode_past) for chunk in (0, *beside)]
    steps += [StepSpec(0, 0, 1, past) for past in pasts if past > decode_past]
    lengths = {min(room, 1024)} if quick else {min(room, 1024), min(room, 3072)}
    longest = min(max(lengths), MOST_CHUNK)
    return TunePlan(
        steps=tuple(steps),
        chunks=tuple(size for size in (128, 256, 512, 1024, 2048) if size <= longest) or chunks,
        prompt_lengths=tuple(sorted(lengths)),
        memory_tokens=0 if quick else min(room, MOST_CHUNK),
        rounds=MIN_ROUNDS,
    )


def tune(llm: LLM, seconds: float | None, say: Say, *, quick: bool = False) -> TuneProfile:
    """Measure within about so many seconds, loading and memory aside; None: the usual."""
    with contextlib.closing(open_weights(llm.path)) as source:
        name = source.describe()
    prompt = text_tokens(llm.tokenizer, llm.context_length)
    tokens_per_s = measure_speed(llm, prompt[: llm.context_length - 2])
    seconds = seconds or (QUICK_SECONDS if quick else USUAL_SECONDS)
    plan = plan_tuning(llm.context_length, tokens_per_s, seconds, quick=quick)
    if not quick and not plan.memory_tokens:
        say(f"{seconds:g} s are too few for all sizes on this machine: fewer are measured, as with --quick")
    say(
        f"{name}: {tokens_per_s:,.0f} tokens/s; {len(plan.steps)} kinds of steps, {plan.rounds} rounds: "
        f"about {plan.num_tokens / tokens_per_s:.0f} s"
    )
    steps = measure_steps(llm, prompt, plan, say)
    prefills = measure_prefills(llm, prompt, plan, say)
    return TuneProfile(
        key=profile_key(llm),
        coefficients=fit(steps),
        best_chunk=best_chunk(prefills),
        measurements=Measurements(tuple(steps), tuple(prefills), tuple(measure_memory(llm, plan, say))),
        model_name=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def measure_speed(llm: LLM, prompt: Sequence[int]) -> float:
    """Prompt tokens per second of a short prompt, after another to warm up."""
    short = prompt[:_WARM_UP_TOKENS]
    _first_token_s(llm, 0, short)
    return len(short) / _first_token_s(llm, 0, short)


def measure_steps(llm: LLM, prompt: Sequence[int], plan: TunePlan, say: Say) -> list[StepSample]:
    timer = StepTimer(llm.model, llm.canon, prompt, plan.steps)
    for spec in plan.steps:  # libraries prepare for every number of rows that they meet
        timer.seconds(spec)
    medians = _take_turns("steps", plan.steps, plan.rounds, timer.seconds, say)
    return [
        StepSample(spec.num_tokens, spec.past, spec.num_decodes, spec.shape.decode_pasts, seconds)
        for spec, seconds in medians.items()
    ]


def measure_prefills(llm: LLM, prompt: Sequence[int], plan: TunePlan, say: Say) -> list[PrefillSample]:
    """Times to first token of whole prompts."""

    def seconds(case: tuple[int, int]) -> float:
        chunk, length = case
        return _first_token_s(llm, chunk, prompt[:length])

    cases = [(chunk, length) for length in plan.prompt_lengths for chunk in plan.chunks]
    medians = _take_turns("whole prompts", cases, plan.rounds, seconds, say)
    return [PrefillSample(*case, seconds) for case, seconds in medians.items()]


def _take_turns(
    name: str, cases: Sequence[T], rounds: int, seconds: Callable[[T], float], say: Say
) -> dict[T, float]:
    """The median time of each case, all of which take turns, in another order each round."""
    times: dict[T, list[float]] = {case: [] for case in cases}
    for index, order in enumerate(shuffled_rounds(cases, rounds, _SEED)):
        for case in order:
            times[case].append(seconds(case))
        say(f"{name}: round {index + 1} of {rounds}")
    return {case: median(values) for case, values in times.items()}


def _first_token_s(llm: LLM, chunk: int, prompt: Sequence[int]) -> float:
    """Seconds to a prompt's first token. What earlier turns left behind is collected first, outside the time."""
    gc.collect()
    started = time.perf_counter()
    run = Run(llm.model, prompt, config=ChunkedPrefillConfig(chunk), canon=llm.canon, max_tokens=1)
    while run.step().token is None:
        pass
    return time.perf_counter() - started


def fit(steps: Sequence[StepSample]) -> StepTimeCoefficients:
    model = StepTimeModel()
    for sample in steps:
        model.record(sample.shape, sample.seconds)
    return model.coefficients


def fit_error(coefficients: StepTimeCoefficients, steps: Sequence[StepSample]) -> FitError:
    errors = [abs(coefficients.seconds(each.shape) - each.seconds) / each.seconds for each in steps]
    return FitError(median(errors), quantiles(errors, n=20, method="inclusive")[-1])


def to_json(profile: TuneProfile) -> str:
    error = fit_error(profile.coefficients, profile.measurements.steps)
    return readable_json({**asdict(profile), "fit_error": asdict(error)})


def best_chunk(prefills: Sequence[PrefillSample]) -> int:
    """The smallest chunk that reads prompts about as soon as the fastest does, over all lengths."""
    scores = slowdowns(prefills)
    fastest = min(scores.values())
    return min(chunk for chunk, score in scores.items() if score <= GOOD_ENOUGH * fastest)


def slowdowns(prefills: Sequence[PrefillSample]) -> Mapping[int, float]:
    """By chunk: its time over the shortest at the same length, on average over the lengths."""
    shortest: dict[int, float] = {}
    ratios: dict[int, list[float]] = {}
    for each in sorted(prefills, key=lambda each: each.seconds):
        fastest = shortest.setdefault(each.prompt_tokens, each.seconds)
        ratios.setdefault(each.chunk, []).append(each.seconds / fastest)
    return {chunk: mean(values) for chunk, values in ratios.items()}


def measure_memory(llm: LLM, plan: TunePlan, say: Say) -> list[MemorySample]:
    """Activations of a prompt in chunks of each size: by arithmetic, at the step that needs the most; and as a fresh
    process grows. Where that cannot be measured, tuning goes on without."""
    model, length = llm.model, plan.memory_tokens or max(plan.prompt_lengths)
    shape, dtype_bytes = model.config, model.dtype.itemsize
    cached = kv_cache_bytes(shape, length, dtype_bytes, 0) + 2 * state_slot_bytes(shape, dtype_bytes)
    is_measured = plan.memory_tokens > 0 and (llm.device_kind.has_own_memory or can_measure_growth())
    samples = []
    for chunk in plan.chunks:
        measured = None
        if is_measured:
            job = MemoryJob(
                model=str(llm.path),
                is_random=False,
                dtype=str(model.dtype).removeprefix("torch."),
                kernels="auto",
                num_threads=torch.get_num_threads(),
                chunk=chunk,
                prompt_tokens=length,
                device=llm.device.name,
                is_steady=False,
            )
            try:
                measured = max(measure_in_fresh_process(job).measured_bytes - cached, 0)
                say(f"memory: chunk {chunk:,}: {measured / 2**20:.1f} MiB")
            except MeasurementError as error:
                say(f"memory is not measured: {error}")
                is_measured = False
        expected = activation_model(model).largest_step(length, chunk).peak_bytes
        samples.append(MemorySample(chunk, length, expected, measured))
    return samples
