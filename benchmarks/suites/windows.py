"""Attention of a layer with a window beside that of one without: chunks of a long prompt, taking turns."""

import argparse
import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.harness import Bar, Bench, Results, bar_of, rotated, take_turns
from benchmarks.suite import Suite
from penstock.cache import BLOCK_TOKENS, TokenRange
from penstock.cache.tensors import KV
from penstock.kernels.device import device_kind
from penstock.kernels.interface import Kernels, select_kernels
from penstock.kernels.spans import AttendedSpan, AttentionWork, PassWork, Scoring, StateWork, WrittenPlaces

SHARE = "attention of a layer with a window, over that of one without"
MOST_SHARE = 1 / 8
WINDOW, NUM_TOKENS, CHUNK = 1024, 32_768, 512
# So many chunks of the prompt are run, evenly apart: what they take grows evenly, too.
_NUM_CHUNKS, _REPEATS = 8, 5


def attention_works(
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    chunk: int,
    window: int,
    heads: tuple[int, int, int],
) -> Mapping[str, Callable[[], None]]:
    """What attends to some chunks of a prompt, with the window and without. `heads`: queries, keys, elements."""
    num_heads, num_kv_heads, head_dim = heads
    keys, values = (torch.randn(num_tokens, num_kv_heads, head_dim, dtype=dtype, device=device) for _ in "kv")
    kv, queries = KV(keys, values), torch.randn(chunk, num_heads, head_dim, dtype=dtype, device=device)

    def work_of(start: int, size: int) -> AttentionWork:
        """What a pass makes once, and not each layer."""
        gone = max(start - size + 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS if size else 0
        places = [TokenRange(gone, start + chunk)]
        tile = kernels.law.tile_size
        span = AttendedSpan(0, chunk, start, places, True, tile, start, first_token=gone)
        work = AttentionWork((span,))
        return kernels.prepare(PassWork(WrittenPlaces(()), work, work, StateWork()), device).all_layers

    def attend(size: int) -> Callable[[], None]:
        scoring = Scoring(head_dim**-0.5, size)
        works = [
            work_of(max((index + 1) * num_tokens // _NUM_CHUNKS - chunk, 0), size)
            for index in range(_NUM_CHUNKS)
        ]

        def run() -> None:
            for work in works:
                kernels.attend(queries, work, kv, scoring)
            device_kind(device).synchronize()

        return run

    return {"window": attend(window), "all": attend(0)}


def measure_share(
    works: Mapping[str, Callable[[], None]], repeats: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Milliseconds of each, and the ratios, round by round."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():  # compiles, and makes plans
        work()
    for _, name in take_turns(rotated(works, repeats), dict.fromkeys(works, repeats).__getitem__):
        works[name]()  # what lay idle between turns has cold caches
        started = time.perf_counter()
        works[name]()
        times[name].append(1e3 * (time.perf_counter() - started))
    return times, [own / full for own, full in zip(times["window"], times["all"], strict=True)]


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    cpu = torch.device("cpu")
    kernels = select_kernels(cpu)
    bench.results.settings |= {
        "kernels": kernels.name,
        "dtype": "bfloat16",
        "window": WINDOW,
        "tokens": NUM_TOKENS,
        "chunk": CHUNK,
    }
    works = attention_works(kernels, cpu, torch.bfloat16, NUM_TOKENS, CHUNK, WINDOW, (8, 2, 128))
    times, shares = measure_share(works, options.repeats or _REPEATS)
    for name, values in times.items():
        bench.results.add("windows", f"attention, {name}", "ms", *values)
    bench.results.add("windows", SHARE, "x", *shares)


def _bars(results: Results) -> list[Bar]:
    return [bar_of(SHARE, results.figure(SHARE), MOST_SHARE, is_lower_limit=False)]


WINDOWS = Suite(
    f"Attention of a layer with a window of {WINDOW:,} tokens beside that of one without, over {NUM_TOKENS:,} "
    "tokens, in bfloat16, on the processor; chunks of both take turns.",
    _measure,
    _bars,
    repeats=f"rounds ({_REPEATS})",
    takes=(),
)
