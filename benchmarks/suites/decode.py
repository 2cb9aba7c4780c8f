"""Where the time of a decode step goes: products, attention, and what is neither."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Bar, Bench, Results, bar_of
from benchmarks.models import text_subject
from benchmarks.suite import Suite, number
from penstock.engine.llm import LLM
from penstock.measure.steps import StepSpec, StepTimer

STEPS = "a decode step of one sequence"
SHARE = "products and attention, of the step"
BANDWIDTH = "bytes of weights over the step, of a simple read"
# What a step of the default model must spend in products and attention, at least.
LEAST_SHARE = 0.7
_WARM_UP_STEPS = 5
_READ_BYTES, _NUM_READS = 1 << 29, 7
# What methods of kernels count as; all others are the small ones.
_KINDS = {"linear": "products", "attend": "attention", "carry_states": "attention"}
_SMALL = "norms, rotary, activation, cache"
_REST = "Python, sampling"


class _TimedKernels:
    """Kernels that add up the seconds of their calls."""

    def __init__(self, kernels: object) -> None:
        self._kernels = kernels
        self.seconds = {"products": 0.0, "attention": 0.0, _SMALL: 0.0}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._kernels, name)
        if not callable(method):
            return method

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = method(*args, **options)
            self.seconds[_KINDS.get(name, _SMALL)] += time.perf_counter() - started
            return result

        return timed


def profile(llm: LLM, prompt: Sequence[int], pasts: Sequence[int], num_steps: int, results: Results) -> None:
    """Steps of a sequence alone, after each of the pasts; `prompt` is longer than any of them."""
    specs = [StepSpec(0, 0, num_decodes=1, decode_past=past) for past in pasts]
    timer = StepTimer(llm.model, llm.canon, prompt, specs)
    model, kernels = llm.model, llm.model.kernels
    try:
        for spec in specs:
            for index in range(_WARM_UP_STEPS + num_steps):
                times = _step(llm, kernels, timer, spec)
                if index >= _WARM_UP_STEPS:
                    for name, seconds in times.items():
                        results.add(
                            STEPS, f"after {spec.decode_past:,} tokens", "ms", 1e3 * seconds, system=name
                        )
    finally:
        model.kernels = kernels
        if model.dense_layers is not None:
            model.dense_layers.spent = None


def _step(llm: LLM, kernels: Any, timer: StepTimer, spec: StepSpec) -> dict[str, float]:
    """Seconds of one step, in parts."""
    timed: Any = _TimedKernels(kernels)
    model, within = llm.model, np.zeros(3, np.int64)
    model.kernels = timed
    if model.dense_layers is not None:
        model.dense_layers.spent = within  # what its one call spends, in nanoseconds
    step_s = timer.seconds(spec)
    model.kernels = kernels
    parts = {
        name: seconds + inside / 1e9
        for (name, seconds), inside in zip(timed.seconds.items(), within, strict=True)
    }
    return {"step": step_s, **parts, _REST: step_s - sum(parts.values())}


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    subject, longest = text_subject(options.model), max(options.pasts) + 1
    subject.require_room(longest, 0, "smaller --pasts")
    llm = LLM(options.model, device=options.device, threads=options.threads)
    bench.describe(subject.description, options, "pasts")
    profile(llm, subject.prompt(longest), options.pasts, options.repeats or options.steps, bench.results)
    medians = {(each.system, each.name): each.median for each in bench.results.figures}
    bytes_per_s = read_bytes_per_s() if llm.device_kind.is_host else None
    if bytes_per_s is not None:
        bench.results.notes.append(f"a simple read of memory: {bytes_per_s / 1e9:.1f} GB/s")
    for past in options.pasts:
        case = f"after {past:,} tokens"
        if bytes_per_s is not None:
            read = llm.model.num_weight_bytes / (medians["step", case] / 1e3)
            bench.results.add("share of the memory", case, "share", read / bytes_per_s, system=BANDWIDTH)
        share = (medians["products", case] + medians["attention", case]) / medians["step", case]
        bench.results.add("share of the step", case, "share", share, system=SHARE)


def read_bytes_per_s() -> float:
    """What memory gives all threads that do nothing but read and add."""
    values = torch.ones(_READ_BYTES // 4)
    seconds = []
    for _ in range(_NUM_READS):
        started = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - started)
    return _READ_BYTES / min(seconds)


def _bars(results: Results) -> list[Bar]:
    return [
        bar_of(f"{SHARE}, {figure.name}", figure, LEAST_SHARE, is_lower_limit=True)
        for figure in results.figures
        if figure.system == SHARE
    ]


DECODE = Suite(
    "Where the time of a decode step goes: products, attention, and what is neither.",
    _measure,
    _bars,
    repeats="steps of each, as --steps",
    takes=("--model", "--device", "--threads"),
    options={
        "--pasts": number((512, 8000), "tokens before the step"),
        "--steps": number(50, "steps of each"),
    },
)
