"""`penstock verify --memory`: the memory that is predicted for a prefill against what a fresh process grows by."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from penstock.cache import BLOCK_TOKENS
from penstock.engine.run import Run
from penstock.errors import PenstockError, SettingError
from penstock.files import readable_json
from penstock.kernels.device import chosen_device, device_kind
from penstock.kernels.interface import select_kernels
from penstock.kernels.probe import ProbeResult, probe
from penstock.measure.growth import (
    STEADY_ALLOCATOR,
    STEADY_METHOD,
    WARM_UP_TOKENS,
    MeasurementError,
    grown_bytes,
    require_growth,
    warm_up_tokens,
)
from penstock.measure.machine import this_machine
from penstock.measure.prompts import random_tokens
from penstock.measure.random_weights import FAMILIES, RandomWeights, family_config
from penstock.models.decoder import Decoder, workspace_of
from penstock.models.hub import resolve_model
from penstock.models.loading import load_decoder
from penstock.models.opened import open_weights
from penstock.models.source import WeightSource
from penstock.plan import ChunkedPrefillConfig, ModelConfig, Span
from penstock.plan.activation import StepMemory, step_phases
from penstock.plan.grids import ROTARY_PAGE, RowLaw
from penstock.plan.memory import kv_token_bytes, state_slot_bytes
from penstock.plan.step import StepShape, Workspace

# Chunk and prompt: every size on a prompt of a few chunks, and a long one.
CASES: tuple[tuple[int, int], ...] = ((128, 1024), (512, 2048), (2048, 4352), (4096, 4352), (2048, 16_384))
CHUNKS, PROMPTS = (128, 512, 2048, 4096), (4352, 16_384)  # of a full run, each with each
QUICK_CHUNK, QUICK_PROMPT = 128, 1024
# The largest takes as long as all others together, and has the layers of another.
_FULL_ONLY = frozenset({"qwen3-4b"})
# The model may say more than is measured by a share, and less by a smaller one: a budget rests on it.
MOST_OVER, MOST_UNDER = 0.15, 0.05
MEMORY_METHOD = (
    f"{STEADY_METHOD}. Predicted is what is cached by the step that needs the most, and that step's activations, "
    "less the rotary tables that the warm-up left"
)
_USUAL = ProbeResult(row_floor=8, row_slab=0, attention_holds=True, passes_hold=True, head_holds=True)
_USUAL_ON_GPU = replace(_USUAL, row_floor=512)


@dataclass(frozen=True, kw_only=True)
class MemoryJob:
    """What a fresh process measures: a prompt in chunks."""

    model: str  # a path, or a name among FAMILIES
    is_random: bool
    dtype: str
    kernels: str  # auto, or a name
    device: str
    num_threads: int
    chunk: int
    prompt_tokens: int
    is_steady: bool = True  # with an allocator that gives freed blocks back at once, and libraries warmed up


@dataclass(frozen=True, kw_only=True)
class PredictedGrowth:
    """At the step that needs the most, with what is cached by then."""

    predicted_bytes: int
    kv_cache_bytes: int
    recurrent_bytes: int
    activation_bytes: int
    phase: str


@dataclass(frozen=True, kw_only=True)
class MemoryCase(PredictedGrowth, MemoryJob):
    """A job that was done: `model`, `dtype` and `kernels` are what it came to."""

    measured_bytes: int
    seconds: float

    @property
    def error(self) -> float:
        """By what share of the measured growth the prediction is over it."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def is_met(self) -> bool:
        return -MOST_UNDER <= self.error <= MOST_OVER


def plan_jobs(
    *,
    model: str | None = None,
    families: Sequence[str] | None = None,
    chunks: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
    quick: bool = False,
    full: bool = False,
    dtype: str | None = None,
    kernels: str | None = None,
    device: str | None = None,
    threads: int | None = None,
) -> list[MemoryJob]:
    """The usual cases, or chunk sizes and prompts each with each; none with a chunk longer than the prompt. Of a
    model, or of random ones of these families."""
    device_name = str(chosen_device(device))
    if model is not None:
        if families is not None:
            raise SettingError("families", ",".join(families), contradicts={"model": model})
        names = [str(resolve_model(model))]
        with contextlib.closing(open_weights(Path(names[0]))) as source:
            context = source.config.max_position
    else:
        names = list(families or (name for name in FAMILIES if full or name not in _FULL_ONLY))
        context = min(family_config(name).max_position for name in names)
    if too_long := [length for length in prompts or () if length >= context]:
        because = f"the model's context is {context} tokens, one of them for the answer"
        raise SettingError("prompts", too_long[0], f"at most {context - 1}", because=because)
    wanted = CASES
    if quick:
        wanted = ((min(QUICK_CHUNK, context - 1), QUICK_PROMPT),)
    elif full or chunks or prompts:
        wanted = tuple((chunk, length) for length in prompts or PROMPTS for chunk in chunks or CHUNKS)
    fitting = ((chunk, min(length, context - 1)) for chunk, length in wanted)
    cases = [(chunk, length) for chunk, length in dict.fromkeys(fitting) if chunk <= length]
    if not cases:
        because = "it is longer than every prompt"
        raise SettingError("chunks", wanted[0][0], f"at most {wanted[-1][1]}", because=because)
    return [
        MemoryJob(
            model=name,
            is_random=model is None,
            dtype=dtype or "bfloat16",
            kernels=kernels or "auto",
            device=device_name,
            num_threads=threads or torch.get_num_threads(),
            chunk=chunk,
            prompt_tokens=length,
        )
        for name in names
        for chunk, length in cases
    ]


def verify_memory(jobs: Sequence[MemoryJob], say: Callable[[str], None]) -> list[MemoryCase]:
    """Each job in a process of its own."""
    require_growth(torch.device(jobs[0].device))
    cases: list[MemoryCase] = []
    for job in jobs:
        case = measure_in_fresh_process(job)
        cases.append(case)
        say(
            f"{len(cases)}/{len(jobs)}: {case.model}, chunk {job.chunk}, {job.prompt_tokens} tokens: "
            f"{case.error:+.1%} ({case.seconds:.0f} s)"
        )
    return cases


def memory_json(cases: Sequence[MemoryCase], seconds: float) -> str:
    plain = {
        "machine": asdict(this_machine()),
        "method": MEMORY_METHOD,
        "bars": {"most_over": MOST_OVER, "most_under": MOST_UNDER},
        "cases": [asdict(case) | {"error": case.error, "is_met": case.is_met} for case in cases],
        "seconds": seconds,
    }
    return readable_json(plain)


def measure_in_fresh_process(job: MemoryJob) -> MemoryCase:
    """The job goes to its standard input, and the case comes as its last line, both as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.measure.memory"],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(STEADY_ALLOCATOR if job.is_steady else {})},
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise MeasurementError(
            f"measuring the memory of {job.model} failed (exit {done.returncode}): {lines[-1]}"
        )
    return MemoryCase(**json.loads(done.stdout.splitlines()[-1]))


def run_job(job: MemoryJob) -> MemoryCase:
    """In this process, which should be a fresh one."""
    started = time.perf_counter()
    torch.set_num_threads(job.num_threads)
    device = torch.device(job.device)
    kind = device_kind(device)
    kind.use()
    dtype = kind.dtype(job.dtype)
    source: WeightSource = (
        RandomWeights(job.model, FAMILIES[job.model], device)
        if job.is_random
        else open_weights(Path(job.model))
    )
    with contextlib.closing(source):
        kernels = select_kernels(device, None if job.kernels == "auto" else job.kernels)
        model = load_decoder(source, kernels, dtype, device)
    # Probing takes long, is kept, and decides only how a few rows are padded: models of the user's own are worth it.
    usual = _USUAL_ON_GPU if kind.has_own_memory else _USUAL
    found = usual if job.is_random else probe(model.kernels, model.probe_shapes, dtype, device)
    canon = found.bind(model.kernels)
    prompt = random_tokens(model.config.vocab_size, job.prompt_tokens)
    warm = warm_up_tokens(model.config, job.chunk, len(prompt)) if job.is_steady else WARM_UP_TOKENS
    _read(model, canon, job.chunk, prompt[:warm])
    spans: list[Span] = []
    measured = grown_bytes(lambda: spans.extend(_read(model, canon, job.chunk, prompt)), device)
    predicted = predict_growth(
        model.config,
        spans,
        dtype_bytes=dtype.itemsize,
        workspace=replace(workspace_of(model), library_bytes=0),  # the warm-up has paid for that
        known_positions=warm,
        takes_all=kind.has_own_memory,
    )
    came_to = {
        "model": job.model if job.is_random else Path(job.model).name,
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": model.kernels.name,
    }
    seconds = time.perf_counter() - started
    return MemoryCase(**asdict(job) | asdict(predicted) | came_to, measured_bytes=measured, seconds=seconds)


def predict_growth(
    shape: ModelConfig,
    spans: Sequence[Span],
    *,
    dtype_bytes: int,
    workspace: Workspace,
    known_positions: int,
    takes_all: bool = False,
) -> PredictedGrowth:
    """Of a prefill in these spans. `known_positions` had been read by some prompt before. With `takes_all`, the cache
    is taken at once, for the whole prompt; else as it is written."""
    if not spans:
        raise SettingError("spans", spans, "at least one")
    per_token = kv_token_bytes(shape, dtype_bytes)
    # In the last layer, which is one of attention, only keys and values are of all rows: other phases come before
    # they are written. That matters where there are few layers.
    to_come = per_token // shape.num_attention_layers if shape.num_attention_layers > 1 else 0
    num_places = -(-spans[-1].end // BLOCK_TOKENS) * BLOCK_TOKENS
    known = 0  # bytes of rotary tables
    if shape.num_attention_layers:
        known = 2 * (workspace.rotary_dim or shape.head_dim) * dtype_bytes
        known *= -(-known_positions // ROTARY_PAGE) * ROTARY_PAGE

    def growth(index: int, span: Span, phase: StepMemory) -> PredictedGrowth:
        not_yet = 0 if phase.phase in ("attention", "head") else len(span) * to_come
        cached = num_places * per_token if takes_all else span.end * per_token - not_yet
        # A step writes one state; from the second on it reads another.
        states = (2 if takes_all else min(index + 1, 2)) * state_slot_bytes(shape, dtype_bytes)
        return PredictedGrowth(
            predicted_bytes=cached + states + phase.peak_bytes - known,
            kv_cache_bytes=cached,
            recurrent_bytes=states,
            activation_bytes=phase.peak_bytes,
            phase=phase.phase,
        )

    growths = [
        growth(index, span, phase)
        for index, span in enumerate(spans)
        for phase in step_phases(
            shape,
            StepShape.of_chunk(len(span), span.start, is_last=span == spans[-1]),
            dtype_bytes=dtype_bytes,
            workspace=workspace,
        )
    ]
    return max(growths, key=lambda growth: growth.predicted_bytes)


def _read(model: Decoder, canon: RowLaw, chunk: int, tokens: Sequence[int]) -> list[Span]:
    """Read a prompt in chunks and generate one token. Returns the steps' spans."""
    run = Run(model, tokens, config=ChunkedPrefillConfig(chunk), canon=canon, max_tokens=1)
    spans = []
    while run.finish_reason is None:
        spans.append(run.step().span)
    return spans


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(run_job(MemoryJob(**json.load(sys.stdin))))))
    except PenstockError as error:
        sys.exit(str(error))
