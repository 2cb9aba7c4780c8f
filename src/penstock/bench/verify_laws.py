"""The laws that a model is held to: which ways are compared with which, and what must come out."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.bench.verify_batched import run_batched
from penstock.bench.verify_compare import compare_recomputed, compare_traces
from penstock.bench.verify_results import Comparison, Law
from penstock.bench.verify_runs import Subject, Trace, random_ends, run_chunks, run_decodes
from penstock.errors import CacheFullError, MemoryExhaustedError, SettingError
from penstock.models.config import ModelConfig
from penstock.models.reading import first_line
from penstock.plan import STATE_GRID

DEFAULT_CHUNKS = (1, 7, 64, 100, 512)
DEFAULT_OVERLAP = 64
# How far two orders of the same sums may be apart, in parts of the largest value: several times what was seen on
# random and on real models. A router in bfloat16 may take another expert where two nearly tie: then that token's
# result is another; float32 is the sharper look.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "bfloat16 with experts": 0.5}
_SEEDS = (0, 1)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Checks:
    """What is run."""

    chunks: tuple[int, ...]
    overlap: int  # 0: none
    strict: bool
    tolerance: float
    same_bits: bool  # what the probe found


def default_tolerance(dtype: torch.dtype, config: ModelConfig) -> float:
    name = str(dtype).removeprefix("torch.")
    has_router = dtype == torch.bfloat16 and config.experts is not None
    return TOLERANCES[f"{name} with experts" if has_router else name]


def resolve_overlap(overlap: int | None, num_tokens: int) -> int:
    """The overlap that was asked for, or one that fits into the prompt."""
    if overlap is None:
        return min(DEFAULT_OVERLAP, (num_tokens - 1) // 3)
    if overlap > num_tokens - 2:
        raise SettingError(
            f"--overlap {overlap} is not accepted with a prompt of {num_tokens} tokens: "
            f"give at most {num_tokens - 2}, or a longer prompt"
        )
    return overlap


def run_checks(subject: Subject, whole: Trace, checks: Checks, say: Say) -> Iterator[Comparison]:
    """Every way against the whole prompt in one chunk."""
    num_prompt, forced = len(subject.prompt), whole.generated
    sizes = [size for size in checks.chunks if size < num_prompt]

    def law(keeps_bits: bool, end: int = num_prompt + subject.num_generated) -> Law:
        return Law(end if checks.same_bits and keeps_bits else 0, checks.tolerance)

    def compared(
        name: str, run: Callable[[], Trace], expected: Trace = whole, end: int | None = None
    ) -> Iterator[Comparison]:
        say(f"{name} ...")
        started = time.perf_counter()
        try:
            trace = run()
        except (MemoryError, MemoryExhaustedError, CacheFullError):
            raise
        except Exception as error:  # the whole prompt could be run, so this one could have been
            yield Comparison(name, law(True), error=f"{type(error).__name__}: {first_line(error)}")
            return
        seconds = time.perf_counter() - started
        its_law = law(trace.keeps_bits) if end is None else law(trace.keeps_bits, end)
        found = compare_traces(name, subject.positions, trace, expected, its_law)
        yield replace(found, seconds=seconds)
        if trace.recomputed is not None:
            yield compare_recomputed(
                f"overlap {checks.overlap}: keys, values computed twice", trace.recomputed, its_law
            )

    for size in sizes:
        name = "token by token" if size == 1 else f"chunks of {size}"
        yield from compared(name, partial(run_chunks, subject, forced, chunk_size=size))
    if 1 in sizes:
        yield from compared("token by token, as decodes", partial(run_decodes, subject, forced))
    for name, ends in _random_schedules(subject):
        yield from compared(name, partial(run_chunks, subject, forced, chunk_ends=ends))
    if checks.overlap:
        size = min(3 * checks.overlap, num_prompt - 1)
        yield from compared(
            f"chunks of {size}, overlap {checks.overlap}",
            partial(run_chunks, subject, forced, chunk_size=size, overlap=checks.overlap),
        )
    if checks.strict:
        alone = run_batched(subject, forced, strict=True, is_alone=True)
        yield from compared(
            "batched against alone, strict", partial(run_batched, subject, forced, strict=True), alone
        )
    else:
        # Decodes take the shape that is fastest: what is generated is promised up to rounding only.
        yield from compared("batched against alone", partial(run_batched, subject, forced), end=num_prompt)


def _random_schedules(subject: Subject) -> Iterator[tuple[str, Sequence[int]]]:
    """Cuts anywhere; and on the grid, where a model has one."""
    for seed in _SEEDS:
        grid = STATE_GRID if subject.model.config.has_state and seed == _SEEDS[-1] else 1
        ends = random_ends(len(subject.prompt), seed, grid)
        if len(ends) > 1:
            where = f" on multiples of {grid}" if grid > 1 else ""
            yield f"{len(ends)} random chunks{where}, seed {seed}", ends
