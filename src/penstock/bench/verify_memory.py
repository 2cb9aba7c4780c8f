"""`penstock verify --memory`: the memory that is predicted for a prefill against what a process grew by.

Random models have the layers of published ones, a few of each: activations are a layer's, and each next layer uses
the memory of the one before again. Their weights are made in place and lie in no file.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.bench.machine import this_machine
from penstock.bench.memory import (
    STEADY_ALLOCATOR,
    STEADY_METHOD,
    MeasurementError,
    can_measure_growth,
    measure_steady_growth,
    warm_up_tokens,
)
from penstock.bench.options import count, counts
from penstock.bench.workload import random_tokens
from penstock.engine.batch import settle
from penstock.engine.llm import resolve_dtype
from penstock.errors import PenstockError, SettingError
from penstock.kernels.probe import ProbeResult, probe
from penstock.kernels.protocol import Kernels, select_kernels
from penstock.kernels.torch_kernels import TorchKernels
from penstock.models.config import ModelConfig
from penstock.models.decoder import Decoder
from penstock.models.expected import expected_shapes
from penstock.models.fields import Fields
from penstock.models.hf_config import hf_model_config
from penstock.models.hub import resolve_model
from penstock.models.loading import load_decoder
from penstock.models.opened import open_weights
from penstock.models.shape import model_shape, workspace_of
from penstock.models.source import WeightSource
from penstock.plan import ModelShape, Span, format_bytes
from penstock.plan.activation import ROTARY_PAGE, ModelWorkspace, StepMemory, step_phases
from penstock.plan.memory import kv_token_bytes, state_slot_bytes
from penstock.plan.step_shape import StepShape

# The model may say more than is measured by a share, and less by a smaller one: a budget rests on it.
MOST_OVER, MOST_UNDER = 0.15, 0.05
DEFAULT_OUTPUT = Path("bench-results") / "memory.json"
# Chunk and prompt: every size on a prompt of a few chunks, and a long one.
CASES = ((128, 1024), (512, 2048), (2048, 4352), (4096, 4352), (2048, 16_384))
CHUNKS, PROMPTS = (128, 512, 2048, 4096), (4352, 16_384)  # of a full run, each with each
QUICK_CHUNK, QUICK_PROMPT = 128, 640
_RANDOM_NUMBERS = 1 << 20
_USUAL = ProbeResult(row_floor=8, row_slab=0, attention_holds=True, passes_hold=True, head_holds=True)

_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
# The largest takes as long as all others together, and has the layers of another.
_FULL_ONLY = frozenset({"qwen3-4b"})
_HYBRID_LAYERS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": _HYBRID_LAYERS,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True}
# In transformers' own names; fewer layers, and fewer experts, than the published models have.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 32_768,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "qwen3-4b": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": _QWEN3
    | _EXPERTS
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "qwen3.5-0.8b": _HYBRID
    | {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "linear_num_value_heads": 16,
    },
    "qwen3-next-80b": _HYBRID
    | _EXPERTS
    | {
        "model_type": "qwen3_next",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
    },
}


@dataclass(frozen=True)
class MemoryJob:
    """What a fresh process measures."""

    model: str  # a path, or a name among FAMILIES
    is_random: bool
    dtype: str
    kernels: str  # auto, torch or native
    num_threads: int
    chunk: int
    prompt_tokens: int


@dataclass(frozen=True)
class MemoryCase:
    """Predicted and measured growth of one prefill."""

    model: str
    dtype: str
    kernels: str
    chunk: int
    prompt_tokens: int
    measured_bytes: int
    predicted_bytes: int
    kv_cache_bytes: int
    recurrent_bytes: int
    activation_bytes: int
    phase: str
    seconds: float

    @property
    def error(self) -> float:
        """By what share of the measured growth the prediction is over it."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def is_met(self) -> bool:
        return -MOST_UNDER <= self.error <= MOST_OVER


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


class RandomWeights:
    """A `WeightSource` of random weights for a configuration, in no file."""

    def __init__(self, name: str, config: ModelConfig) -> None:
        self._name = name
        self._config = config
        self._shapes = expected_shapes(config)
        self._numbers = torch.randn(_RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0)) * 0.02

    @property
    def config(self) -> ModelConfig:
        return self._config

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load_into(self, name: str, out: torch.Tensor) -> None:
        """The same numbers over and over, row by row: drawing as many as a vocabulary has takes too long."""
        if out.dim() == 1:
            out.fill_(1.0)
            return
        rows = out.view(out.shape[0], -1) if out.is_contiguous() else out
        at_once = max(_RANDOM_NUMBERS // rows[0].numel(), 1)
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            part.copy_(self._numbers[: part.numel()].view(part.shape))

    def describe(self) -> str:
        return f"{self._name} (random, {self._config.num_layers} layers)"

    def close(self) -> None:
        pass


def family_config(name: str) -> ModelConfig:
    """The configuration of a random model."""
    if name not in FAMILIES:
        raise SettingError(f"family {name!r} is not accepted: give one of {', '.join(FAMILIES)}")
    return hf_model_config(Fields(name, dict(FAMILIES[name])), Fields(name, {}))


def predict_growth(
    shape: ModelShape,
    spans: Sequence[Span],
    *,
    dtype_bytes: int,
    workspace: ModelWorkspace,
    known_positions: int,
) -> PredictedGrowth:
    """Of a prefill in these spans. `known_positions` had been read by some prompt before."""
    tables = 2 * (workspace.rotary_dim or shape.head_dim) * dtype_bytes  # of a position
    known = -(-known_positions // ROTARY_PAGE) * ROTARY_PAGE if shape.num_attention_layers else 0
    per_token = kv_token_bytes(shape, dtype_bytes)
    # In the last layer, which is one of attention, only keys and values are of all rows: other phases come before
    # they are written. That matters where there are few layers.
    to_come = per_token // shape.num_attention_layers if shape.num_attention_layers > 1 else 0
    growths = [
        PredictedGrowth(
            kv_cache_bytes=span.end * per_token
            - (0 if phase.phase in ("attention", "head") else len(span) * to_come),
            # A step writes one state; from the second on it reads another.
            recurrent_bytes=min(index + 1, 2) * state_slot_bytes(shape, dtype_bytes),
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
    source = _source(job)
    dtype, device = resolve_dtype(job.dtype), torch.device("cpu")
    model = load_decoder(source, _kernels(job.kernels), dtype, device)
    source.close()
    # Probing takes long, is kept, and decides only how a few rows are padded: models of the user's own are worth it.
    found = _USUAL if job.is_random else probe(model.kernels, model.probe_shapes, dtype, device)
    canon = settle(model.kernels, found)
    growth = measure_steady_growth(model, canon, job.chunk, _prompt(model, job.prompt_tokens))
    predicted = predict_growth(
        model_shape(model.config),
        growth.spans,
        dtype_bytes=dtype.itemsize,
        workspace=workspace_of(model),
        known_positions=warm_up_tokens(model.config, job.chunk, job.prompt_tokens),
    )
    return MemoryCase(
        model=job.model if job.is_random else Path(job.model).name,
        dtype=str(dtype).removeprefix("torch."),
        kernels=model.kernels.name,
        chunk=job.chunk,
        prompt_tokens=job.prompt_tokens,
        measured_bytes=growth.growth_bytes,
        predicted_bytes=predicted.total_bytes,
        kv_cache_bytes=predicted.kv_cache_bytes,
        recurrent_bytes=predicted.recurrent_bytes,
        activation_bytes=predicted.activations.peak_bytes,
        phase=predicted.activations.phase,
        seconds=time.perf_counter() - started,
    )


def _source(job: MemoryJob) -> WeightSource:
    if job.is_random:
        return RandomWeights(job.model, family_config(job.model))
    return open_weights(Path(job.model))


def _kernels(name: str) -> Kernels:
    if name == "torch":
        return TorchKernels()
    kernels = select_kernels(torch.device("cpu"))
    if name not in ("auto", kernels.name):
        raise SettingError(
            f"kernels={name!r} is not accepted on this machine: give auto, torch or {kernels.name}"
        )
    return kernels


def _prompt(model: Decoder, num_tokens: int) -> Sequence[int]:
    return random_tokens(model.config.vocab_size, num_tokens)


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
    if not can_measure_growth():
        raise SettingError("memory growth needs Linux's /proc/self/status and /proc/self/clear_refs")
    jobs = plan_jobs(options)
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
        "method": STEADY_METHOD,
        "bars": {"most_over": MOST_OVER, "most_under": MOST_UNDER},
        "cases": [asdict(case) | {"error": case.error, "is_met": case.is_met} for case in cases],
        "seconds": time.perf_counter() - started,
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"results: {options.output}")
    return 0 if all(case.is_met for case in cases) else 1


def plan_jobs(options: argparse.Namespace) -> list[MemoryJob]:
    """The usual cases, or chunk sizes and prompts each with each; none with a chunk longer than the prompt."""

    def job(model: str, is_random: bool, chunk: int, prompt_tokens: int) -> MemoryJob:
        threads = options.threads or torch.get_num_threads()
        return MemoryJob(model, is_random, options.dtype, options.kernels, threads, chunk, prompt_tokens)

    if options.model is not None:
        if options.families is not None:
            raise SettingError("--families contradicts --model: leave one of them out")
        path = resolve_model(options.model)
        source = open_weights(path)
        context = source.config.max_position
        source.close()
        names, is_random = [str(path)], False
    else:
        default = [name for name in FAMILIES if options.full or name not in _FULL_ONLY]
        names, is_random = list(options.families or default), True
        context = min(family_config(name).max_position for name in names)
    if options.quick:
        return [job(name, is_random, QUICK_CHUNK, min(QUICK_PROMPT, context - 1)) for name in names]
    too_long = [length for length in options.prompts or () if length >= context]
    if too_long:
        raise SettingError(
            f"--prompts {too_long[0]} is not accepted: the model's context is {context} tokens, one of them for "
            f"the answer; give at most {context - 1}"
        )
    if options.full or options.chunks or options.prompts:
        wanted = [
            (chunk, length) for length in options.prompts or PROMPTS for chunk in options.chunks or CHUNKS
        ]
    else:
        wanted = list(CASES)
    cases = dict.fromkeys((chunk, min(length, context - 1)) for chunk, length in wanted)
    return [
        job(name, is_random, chunk, length) for name in names for chunk, length in cases if chunk <= length
    ]


def render(cases: Sequence[MemoryCase]) -> str:
    """A table that a person reads, and the method."""
    columns: tuple[tuple[str, Callable[[MemoryCase], str]], ...] = (
        ("model", lambda case: case.model),
        ("dtype", lambda case: case.dtype),
        ("kernels", lambda case: case.kernels),
        ("prompt", lambda case: f"{case.prompt_tokens:,}"),
        ("chunk", lambda case: f"{case.chunk:,}"),
        ("measured", lambda case: format_bytes(case.measured_bytes)),
        ("predicted", lambda case: format_bytes(case.predicted_bytes)),
        ("error", lambda case: f"{case.error:+.1%}"),
        ("K/V", lambda case: format_bytes(case.kv_cache_bytes)),
        ("state", lambda case: format_bytes(case.recurrent_bytes)),
        ("activations", lambda case: f"{format_bytes(case.activation_bytes)} ({case.phase})"),
        ("", lambda case: "" if case.is_met else "missed"),
    )
    rows = [[title for title, _ in columns], *([show(case) for _, show in columns] for case in cases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index < 3 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    missed = sum(not case.is_met for case in cases)
    bars = f"bars: at most {MOST_OVER:.0%} over what is measured, {MOST_UNDER:.0%} under"
    verdict = "all met" if not missed else f"{missed} of {len(cases)} missed"
    return "\n".join([*lines, "", f"{bars}: {verdict}", f"method: {STEADY_METHOD}"])


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
    add("--threads", type=count, help="threads that torch computes with (torch's own choice)")
    add("--quick", action="store_true", help=f"one short case of each: chunk {QUICK_CHUNK}")
    add("--output", type=Path, default=DEFAULT_OUTPUT, help="the results as JSON (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
