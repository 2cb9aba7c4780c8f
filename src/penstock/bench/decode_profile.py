"""`python -m penstock.bench decode`: where the time of a decode step goes."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from penstock.bench.options import add_device, count, counts
from penstock.engine.llm import LLM
from penstock.measure.steps import StepSpec, StepTimer
from penstock.models.hub import DEFAULT_MODEL

DECODE = "decode"
# What a step of the default model must spend in products and attention, at least.
LEAST_SHARE = 0.7
_OUTPUT = Path("bench-results") / f"{DECODE}.json"
_WARM_UP_STEPS = 5
# What methods of kernels count as; all others are the small ones.
_KINDS = {
    "linear": "products",
    "attend": "attention",
    "carry_states": "attention",
}


@dataclass(frozen=True)
class StepShares:
    """A step after `past` tokens, in seconds, each the median over steps."""

    past: int
    step_s: float
    products_s: float
    attention_s: float  # or what stands for it in layers of another kind
    small_s: float  # norms, rotary, activations, writing to the cache
    rest_s: float  # building the step and sampling, in Python and torch

    @property
    def share(self) -> float:
        """Of products and attention."""
        return (self.products_s + self.attention_s) / self.step_s

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


class _TimedKernels:
    """Kernels that add up the seconds of their calls."""

    def __init__(self, kernels: object) -> None:
        self._kernels = kernels
        self.seconds = {"products": 0.0, "attention": 0.0, "small": 0.0}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._kernels, name)
        if not callable(method):
            return method

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = method(*args, **options)
            self.seconds[_KINDS.get(name, "small")] += time.perf_counter() - started
            return result

        return timed


def profile_decodes(
    llm: LLM, prompt: Sequence[int], pasts: Sequence[int], num_steps: int
) -> list[StepShares]:
    """Steps of a sequence alone, after each of the pasts; `prompt` is longer than any of them."""
    specs = [StepSpec(0, 0, num_decodes=1, decode_past=past) for past in pasts]
    bench = StepTimer(llm.model, llm.canon, prompt, specs)
    model, kernels = llm.model, llm.model.kernels
    try:
        return [_shares(bench, llm, spec, num_steps) for spec in specs]
    finally:
        model.kernels = kernels
        if model.dense_layers is not None:
            model.dense_layers.spent = None


def _shares(bench: StepTimer, llm: LLM, spec: StepSpec, num_steps: int) -> StepShares:
    model, kernels = llm.model, llm.model.kernels
    rows = []
    for _ in range(_WARM_UP_STEPS + num_steps):
        timed, within = _TimedKernels(kernels), np.zeros(3, np.int64)
        model.kernels = timed
        if model.dense_layers is not None:
            model.dense_layers.spent = within
        step_s = bench.seconds(spec)
        model.kernels = kernels
        rows.append((step_s, *(np.array(list(timed.seconds.values())) + within / 1e9)))
    rows = rows[_WARM_UP_STEPS:]
    products, attention, small = (median(row[kind] for row in rows) for kind in (1, 2, 3))
    rest = median(row[0] - sum(row[1:]) for row in rows)
    return StepShares(spec.decode_past, median(row[0] for row in rows), products, attention, small, rest)


def render_profile(profile: Sequence[StepShares]) -> str:
    """A table, in milliseconds."""
    lines = [
        "| decode after | step | products | attention | norms, rotary, activation, cache | Python, sampling "
        "| products and attention |",
        "|---|---|---|---|---|---|---|",
    ]
    for step in profile:
        parts = (step.step_s, step.products_s, step.attention_s, step.small_s, step.rest_s)
        times = " | ".join(f"{1e3 * seconds:.2f} ms" for seconds in parts)
        lines.append(f"| {step.past:,} tokens | {times} | {step.share:.0%} |")
    return "\n".join(lines)


def parse_decode_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m penstock.bench {DECODE}",
        description="Where the time of a decode step goes: products, attention, and what is neither.",
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="smollm2, a folder or a GGUF file (%(default)s)")
    add("--pasts", type=counts, default=(512, 8000), metavar="N,N", help="tokens before it (512,8000)")
    add("--steps", type=count, default=50, metavar="N", help="steps of each (%(default)s)")
    add("--check", action="store_true", help=f"exit with 1 where the share is below {LEAST_SHARE:.0%}")
    add_device(parser)
    add("--threads", type=count, metavar="N", help="threads to compute with (physical cores)")
    add("--json", dest="output", type=Path, default=_OUTPUT, metavar="FILE", help="results (%(default)s)")
    return parser.parse_args(arguments)
