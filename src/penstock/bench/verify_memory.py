"""`penstock verify --memory`: the memory that is predicted for a prefill against what a process grew by."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from penstock.bench.options import add_device, count, counts
from penstock.bench.verify_memory_cases import CASES, QUICK_CHUNK, MemoryJob, plan_jobs
from penstock.bench.verify_memory_report import MOST_OVER, MOST_UNDER, MemoryCase, method_of, render
from penstock.cache import BLOCK_TOKENS
from penstock.engine.batch import Canon, settle
from penstock.engine.run import Run
from penstock.errors import PenstockError, SettingError
from penstock.kernels.device import device_kind
from penstock.kernels.interface import Kernels, select_kernels
from penstock.kernels.probe.probe import ProbeResult, probe
from penstock.kernels.reference.kernels import TorchKernels
from penstock.measure.growth import (
    STEADY_ALLOCATOR,
    MeasurementError,
    can_measure_growth,
    grown_bytes,
    warm_up_tokens,
)
from penstock.measure.machine import this_machine
from penstock.measure.prompts import random_tokens
from penstock.measure.random_weights import FAMILIES, RandomWeights, family_config
from penstock.models.decoder import Decoder
from penstock.models.loading import load_decoder
from penstock.models.opened import open_weights
from penstock.models.shape import model_shape, workspace_of
from penstock.models.source import WeightSource
from penstock.plan import ChunkedPrefillConfig, ModelShape, Span
from penstock.plan.activation import step_phases
from penstock.plan.activation_parts import ROTARY_PAGE, StepMemory
from penstock.plan.memory import kv_token_bytes, state_slot_bytes
from penstock.plan.step_shape import StepShape, Workspace

DEFAULT_OUTPUT = Path("bench-results") / "memory.json"
_USUAL = ProbeResult(row_floor=8, row_slab=0, attention_holds=True, passes_hold=True, head_holds=True)
_USUAL_ON_GPU = replace(_USUAL, row_floor=512)


@dataclass(frozen=True)
class PredictedGrowth:
    """At the step that needs the most, with what is cached by then."""

    kv_cache_bytes: int
    recurrent_bytes: int
    activations: StepMemory
    known_bytes: int  # of rotary tables that were there before

    @property
    def total_bytes(self) -> int:
        cached = self.kv_cache_bytes + self.recurrent_bytes
        return cached + self.activations.peak_bytes - self.known_bytes


def predict_growth(
    shape: ModelShape,
    spans: Sequence[Span],
    *,
    dtype_bytes: int,
    workspace: Workspace,
    known_positions: int,
    takes_all: bool = False,
) -> PredictedGrowth:
    """Of a prefill in these spans. `known_positions` had been read by some prompt before. With `takes_all`, the cache
    is taken at once, for the whole prompt; else as it is written."""
    tables = 2 * (workspace.rotary_dim or shape.head_dim) * dtype_bytes  # of a position
    known = -(-known_positions // ROTARY_PAGE) * ROTARY_PAGE if shape.num_attention_layers else 0
    per_token = kv_token_bytes(shape, dtype_bytes)
    # In the last layer, which is one of attention, only keys and values are of all rows: other phases come before
    # they are written. That matters where there are few layers.
    to_come = per_token // shape.num_attention_layers if shape.num_attention_layers > 1 else 0
    num_places = -(-spans[-1].end // BLOCK_TOKENS) * BLOCK_TOKENS if spans else 0

    def cached(span: Span, phase: StepMemory) -> int:
        if takes_all:
            return num_places * per_token
        return span.end * per_token - (0 if phase.phase in ("attention", "head") else len(span) * to_come)

    growths = [
        PredictedGrowth(
            kv_cache_bytes=cached(span, phase),
            # A step writes one state; from the second on it reads another.
            recurrent_bytes=(2 if takes_all else min(index + 1, 2)) * state_slot_bytes(shape, dtype_bytes),
            activations=phase,
            known_bytes=tables * known,
        )
        for index, span in enumerate(spans)
        for phase in step_phases(
            shape,
            StepShape.of_chunk(len(span), span.start, is_last=span == spans[-1]),
            dtype_bytes=dtype_bytes,
            workspace=workspace,
        )
    ]
    if not growths:
        raise SettingError("spans: give at least one")
    return max(growths, key=lambda growth: growth.total_bytes)


def measure_in_fresh_process(job: MemoryJob) -> MemoryCase:
    """Run a job in a process of its own, with an allocator that gives freed blocks back at once."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.bench.verify_memory", "--job", json.dumps(asdict(job))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **STEADY_ALLOCATOR},
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
    is_gpu = device_kind(device).has_own_memory
    device_kind(device).use()
    source = _source(job, device)
    dtype = device_kind(device).dtype(job.dtype)
    model = load_decoder(source, _kernels(job.kernels, device), dtype, device)
    source.close()
    # Probing takes long, is kept, and decides only how a few rows are padded: models of the user's own are worth it.
    usual = _USUAL_ON_GPU if is_gpu else _USUAL
    found = usual if job.is_random else probe(model.kernels, model.probe_shapes, dtype, device)
    canon = settle(model.kernels, found)
    prompt = random_tokens(model.config.vocab_size, job.prompt_tokens)
    known_positions = warm_up_tokens(model.config, job.chunk, job.prompt_tokens)
    _read(model, canon, job.chunk, prompt[:known_positions])
    spans: list[Span] = []
    measured = grown_bytes(lambda: spans.extend(_read(model, canon, job.chunk, prompt)), device)
    predicted = predict_growth(
        model_shape(model.config),
        spans,
        dtype_bytes=dtype.itemsize,
        workspace=replace(workspace_of(model), library_bytes=0),  # what the warm-up has paid for
        known_positions=known_positions,
        takes_all=is_gpu,
    )
    return MemoryCase(
        model=job.model if job.is_random else Path(job.model).name,
        dtype=str(dtype).removeprefix("torch."),
        kernels=model.kernels.name,
        chunk=job.chunk,
        prompt_tokens=job.prompt_tokens,
        measured_bytes=measured,
        predicted_bytes=predicted.total_bytes,
        kv_cache_bytes=predicted.kv_cache_bytes,
        recurrent_bytes=predicted.recurrent_bytes,
        activation_bytes=predicted.activations.peak_bytes,
        phase=predicted.activations.phase,
        seconds=time.perf_counter() - started,
        device=job.device,
    )


def _source(job: MemoryJob, device: torch.device) -> WeightSource:
    if job.is_random:
        return RandomWeights(job.model, family_config(job.model), device)
    return open_weights(Path(job.model))


def _kernels(name: str, device: torch.device) -> Kernels:
    if name == "torch":
        return TorchKernels()
    kernels = select_kernels(device)
    if name not in ("auto", kernels.name):
        raise SettingError(
            f"kernels={name!r} is not accepted on this machine: give auto, torch or {kernels.name}"
        )
    return kernels


def _read(model: Decoder, canon: Canon, chunk: int, tokens: Sequence[int]) -> list[Span]:
    """Read a prompt in chunks and generate one token. Returns the steps' spans."""
    run = Run(model, tokens, config=ChunkedPrefillConfig(chunk), canon=canon, max_tokens=1)
    spans = []
    while run.finish_reason is None:
        spans.append(run.step().span)
    return spans


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 where a bar is missed, 2 where nothing could be measured."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["--job"]:
            print(json.dumps(asdict(run_job(MemoryJob(**json.loads(arguments[1]))))))
            return 0
        return _run(_parser().parse_args(arguments))
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: nothing was written", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    jobs = plan_jobs(options)
    if not jobs[0].device.startswith("cuda") and not can_measure_growth():
        raise SettingError("memory growth needs Linux's /proc/self/status and /proc/self/clear_refs")
    started = time.perf_counter()
    cases: list[MemoryCase] = []
    for job in jobs:
        cases.append(measure_in_fresh_process(job))
        print(
            f"{len(cases)}/{len(jobs)}: {cases[-1].model}, chunk {job.chunk}, {job.prompt_tokens} tokens: "
            f"{cases[-1].error:+.1%} ({cases[-1].seconds:.0f} s)",
            file=sys.stderr,
        )
    print(f"\n{render(cases)}\n")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": asdict(this_machine()),
        "method": method_of(cases),
        "bars": {"most_over": MOST_OVER, "most_under": MOST_UNDER},
        "cases": [asdict(case) | {"error": case.error, "is_met": case.is_met} for case in cases],
        "seconds": time.perf_counter() - started,
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"results: {options.output}")
    return 0 if all(case.is_met for case in cases) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock verify --memory",
        description="Compare the memory that is predicted for a prefill with what a fresh process grows by.",
    )
    add = parser.add_argument
    add(
        "--model",
        help="smollm2, a folder, a GGUF file or a Hugging Face name (random models of every family)",
    )
    add("--families", type=lambda text: tuple(text.split(",")), metavar="F,F", help=", ".join(FAMILIES))
    usual = ", ".join(f"{chunk} of {length}" for chunk, length in CASES)
    add("--chunks", type=counts, metavar="N,N", help=f"chunk sizes, each with each prompt ({usual})")
    add("--prompts", type=counts, metavar="N,N", help="prompt lengths")
    add("--full", action="store_true", help="all chunk sizes with all lengths, and larger layers too")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="bfloat16", help="(%(default)s)")
    add("--kernels", choices=("auto", "torch", "native"), default="auto", help="(%(default)s)")
    add_device(parser)
    add("--threads", type=count, help="threads that torch computes with (torch's own choice)")
    add("--quick", action="store_true", help=f"one short case of each: chunk {QUICK_CHUNK}")
    add("--output", type=Path, default=DEFAULT_OUTPUT, help="the results as JSON (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
