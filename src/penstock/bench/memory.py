"""How much a prefill makes a process grow, measured in a process of its own."""

import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from penstock.bench.systems import System, SystemName, load_systems
from penstock.engine.batch import Canon
from penstock.engine.device import chosen_device, release_memory
from penstock.engine.memory import (
    anonymous_bytes,
    memory_bytes,
    peak_anonymous_bytes,
    peak_memory_bytes,
    reset_peak,
    reset_peak_memory,
    trim_heap,
)
from penstock.engine.run import Run
from penstock.errors import PenstockError
from penstock.models.config import ModelConfig
from penstock.models.decoder import Decoder
from penstock.models.opened import open_weights
from penstock.plan import ChunkedPrefillConfig, Span

WARM_UP_TOKENS = 64
_TILE = 512  # of attention
METHOD = (
    f"in a fresh process each: load, read {WARM_UP_TOKENS} tokens to warm up, collect garbage, give free "
    "heap back (malloc_trim), reset the peak (/proc/self/clear_refs), read the prompt, generate one token. "
    "Growth is peak resident memory (VmHWM), less what of files is resident at the end (RssFile, RssShmem), "
    "less allocated memory before (RssAnon): pages of libraries come and go as the system likes. The C "
    "library's allocator is as it is; activations are growth less what is cached for the prompt: keys and "
    "values, and recurrent states where the model has them"
)

# Environment of a process whose growth is to be what lives at once: blocks above 64 KiB are pages of their own, which
# go back as soon as they are freed. As it is, the C library raises that limit up to 32 MiB, and keeps freed
# blocks for later: what a process then holds depends on what it did before.
STEADY_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "1000000",
    "NUMPY_MADVISE_HUGEPAGE": "0",  # a cache would take its memory 2 MiB at a time
}
STEADY_METHOD = (
    "in a fresh process each, with "
    + " ".join(f"{name}={value}" for name, value in STEADY_ALLOCATOR.items())
    + ", so that freed blocks go back at once and pages are small: load, read a chunk (at least 512 tokens) and one "
    "as long as the last, with experts all of the prompt, to warm up, which pays for what libraries keep, collect "
    "garbage, reset the peak (/proc/self/clear_refs), read the prompt, generate one token. Growth is peak resident "
    "memory (VmHWM), less what of files is resident at the end (RssFile, RssShmem), less allocated memory before "
    "(RssAnon): pages of libraries come and go as the system likes. Predicted is what is cached by the step that "
    "needs the most, and that step's activations, less the rotary tables that the warm-up left"
)

# On a GPU, torch's allocator counts.
GPU_METHOD = (
    "in a fresh process each: load, read a chunk (at least 512 tokens) and one as long as the last to warm up, which "
    "pays for what libraries keep, collect garbage, reset the peak, read the prompt, generate one token. Growth is "
    "the most that torch's allocator has given (max_memory_allocated), less what it had before (memory_allocated): "
    "the cache is taken at once. Predicted is the cache, and the activations of the step that needs the most, less "
    "the rotary tables that the warm-up left"
)
_CPU = torch.device("cpu")


class MeasurementError(PenstockError):
    """A measurement that this system cannot make, or that failed."""


@dataclass(frozen=True)
class Growth:
    """Of one process, during one prefill."""

    system: SystemName
    prompt_tokens: int
    growth_bytes: int
    cache_bytes: int

    @property
    def activation_bytes(self) -> int:
        return self.growth_bytes - self.cache_bytes


@dataclass(frozen=True)
class Job:
    """What a fresh process is to measure."""

    model: str  # a path
    system: SystemName
    dtype: str
    chunk: int
    num_threads: int
    prompt: tuple[int, ...]
    device: str | None = None  # None: as the environment says


def can_measure_growth() -> bool:
    """Whether this system tells a process its resident memory and lets it reset the peak."""
    return anonymous_bytes() is not None and reset_peak()


def measure_growth(system: System, prompt: Sequence[int], device: torch.device = _CPU) -> Growth:
    """Growth of this process. It should be a fresh one: heap that earlier work left behind hides growth."""
    system.generate(prompt[:WARM_UP_TOKENS], 2, lambda token: None)
    before = _settled_bytes(device)
    cache_bytes = system.generate(prompt, 1, lambda token: None)
    return Growth(system.name, len(prompt), _peak_bytes(device) - before, cache_bytes)


@dataclass(frozen=True)
class SteadyGrowth:
    """Of a process with `STEADY_ALLOCATOR`, during one prefill in these spans."""

    growth_bytes: int
    spans: tuple[Span, ...]


def warm_up_tokens(config: ModelConfig, chunk: int, prompt_tokens: int) -> int:
    """Enough for chunks of either length, the last with a past in another tile of attention; with experts, whose
    products have another number of rows in every chunk, all of the prompt: oneDNN keeps code for each number of rows
    that it meets."""
    if config.experts:
        return prompt_tokens
    whole_chunks = -(-_TILE // chunk) * chunk
    last = prompt_tokens % chunk or WARM_UP_TOKENS
    return min(whole_chunks + last, prompt_tokens)


def measure_steady_growth(model: Decoder, canon: Canon, chunk: int, prompt: Sequence[int]) -> SteadyGrowth:
    """Growth of this process while it reads a prompt in chunks of so many tokens and generates one."""

    def read(tokens: Sequence[int]) -> tuple[Span, ...]:
        run = Run(model, tokens, config=ChunkedPrefillConfig(chunk), canon=canon, max_tokens=1)
        spans = []
        while run.finish_reason is None:
            spans.append(run.step().span)
        return tuple(spans)

    read(prompt[: warm_up_tokens(model.config, chunk, len(prompt))])
    before = _settled_bytes(model.device)
    spans = read(prompt)
    return SteadyGrowth(_peak_bytes(model.device) - before, spans)


def _settled_bytes(device: torch.device) -> int:
    """Allocated memory now, with nothing in it that could be given back; the peak is measured from here on."""
    gc.collect()
    if device.type == "cuda":
        release_memory(device)
        reset_peak_memory(device)
        return memory_bytes(device) or 0
    trim_heap()
    if not reset_peak() or (allocated := anonymous_bytes()) is None:
        raise MeasurementError("memory growth needs Linux's /proc/self/status and /proc/self/clear_refs")
    return allocated


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return peak_memory_bytes(device)
    peak = peak_anonymous_bytes()
    assert peak is not None
    return peak


def growth_in_fresh_process(job: Job) -> Growth:
    """Run a job in a process of its own."""
    command = [sys.executable, "-m", "penstock.bench.memory"]
    done = subprocess.run(command, input=json.dumps(asdict(job)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise MeasurementError(
            f"measuring the memory of {job.system} failed (exit {done.returncode}): {lines[-1]}"
        )
    reply = json.loads(done.stdout.splitlines()[-1])
    return Growth(**{**reply, "system": SystemName(reply["system"])})


def _main() -> None:
    fields = json.load(sys.stdin)
    job = Job(**{**fields, "system": SystemName(fields["system"])})
    torch.set_num_threads(job.num_threads)
    source = open_weights(Path(job.model))
    names, dtype = [job.system], getattr(torch, job.dtype)
    system = load_systems(names, source, dtype, job.chunk, job.device)[job.system]
    source.close()
    print(json.dumps(asdict(measure_growth(system, job.prompt, chosen_device(job.device)))))


if __name__ == "__main__":
    _main()
