"""How much a process grows while it reads a prompt; measured in a fresh process, where nothing hides growth."""

import gc
from collections.abc import Callable

import torch

from penstock.errors import PenstockError
from penstock.kernels.device import device_kind
from penstock.plan.model import ModelConfig
from penstock.process_memory import anonymous_bytes, peak_anonymous_bytes, reset_peak, trim_heap

WARM_UP_TOKENS = 64
_TILE = 512  # of attention

# Environment of a process whose growth is to be what lives at once: blocks above 64 KiB are pages of their own, which
# go back as soon as they are freed. As it is, the C library raises that limit up to 32 MiB, and keeps freed
# blocks for later: what a process then occupies depends on what it did before.
STEADY_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "1000000",
    "NUMPY_MADVISE_HUGEPAGE": "0",  # a cache would take its memory 2 MiB at a time
}
METHOD = (
    "in a fresh process each: load, read a part of the prompt to warm up, which pays for what libraries keep, "
    "collect garbage, give what is free back, reset the peak, read the prompt, generate one token. Growth is peak "
    "resident memory (VmHWM), less what of files is resident at the end (RssFile, RssShmem), less allocated memory "
    "before (RssAnon): pages of libraries come and go as the system likes. On a GPU it is the most that torch's "
    "allocator has given (max_memory_allocated), less what it had before (memory_allocated). Activations are growth "
    "less what is cached for the prompt: keys, values and recurrent states"
)


STEADY_METHOD = (
    f"{METHOD}. On a CPU with {' '.join(f'{name}={value}' for name, value in STEADY_ALLOCATOR.items())}, so that "
    "freed blocks go back at once and pages are small"
)


class MeasurementError(PenstockError):
    """A measurement that this system cannot make, or that failed."""


def can_measure_growth() -> bool:
    """Whether this system tells a process its resident memory and lets it reset the peak."""
    return anonymous_bytes() is not None and reset_peak()


def require_growth(device: torch.device) -> None:
    if not device_kind(device).has_own_memory and not can_measure_growth():
        raise MeasurementError("memory growth needs Linux's /proc/self/status and /proc/self/clear_refs")


def grown_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The peak of memory while this process does the work, over what it had before. Warm up first."""
    require_growth(device)
    gc.collect()
    kind = device_kind(device)
    if kind.has_own_memory:
        kind.release()
        kind.reset_peak()
        before = kind.memory_bytes() or 0
        work()
        return kind.peak_bytes() - before
    trim_heap()
    reset_peak()
    before = anonymous_bytes() or 0
    work()
    return (peak_anonymous_bytes() or 0) - before


def warm_up_tokens(config: ModelConfig, chunk: int, prompt_tokens: int) -> int:
    """Enough for chunks of either length, the last with a past in another tile of attention; with experts, whose
    products have another number of rows in every chunk, all of the prompt: oneDNN keeps code for each number of rows
    that it meets."""
    if config.experts:
        return prompt_tokens
    whole_chunks = -(-_TILE // chunk) * chunk
    last = prompt_tokens % chunk or WARM_UP_TOKENS
    return min(whole_chunks + last, prompt_tokens)
