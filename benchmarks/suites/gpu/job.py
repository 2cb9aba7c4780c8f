"""What every section of the measurements on a GPU is given: models to load, a clock, and where figures go."""

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.harness import OURS, Bench, rotated, take_turns
from benchmarks.show import shown
from benchmarks.suites.gpu.models import Subject, load_subject
from benchmarks.suites.gpu.plan import Plan
from penstock.kernels.device import device_kind
from penstock.measure.prompts import random_tokens
from penstock.measure.random_weights import RandomWeights


@dataclass(frozen=True)
class Job:
    """What to measure, on what, how often, and where it goes."""

    plan: Plan
    device: torch.device
    bench: Bench
    repeats: int
    with_peer: bool = True
    peer_limit: int = 0  # tokens of the longest prompt that transformers reads
    dtype: torch.dtype = torch.bfloat16
    section: str = ""

    def weights(self, model: str, **changes: Any) -> RandomWeights:
        """Of a model with some settings changed."""
        return RandomWeights(model, {**self.plan.models[model], **changes}, self.device)

    def subject(self, model: str, **changes: Any) -> Subject:
        return load_subject(self.weights(model, **changes), self.dtype, self.device)

    def prompt(self, model: str, num_tokens: int) -> Sequence[int]:
        return random_tokens(self.plan.models[model]["vocab_size"], num_tokens)

    def figure(self, name: str, unit: str, values: Sequence[float], system: str = OURS) -> None:
        """Written down at once: what comes after may end the process."""
        figure = self.bench.results.add(self.section, name, unit, *values, system=system)
        self.bench.say(f"{name}, {system}: {shown(figure)}")
        self.bench.save()

    def figures(self, name: str, times: Mapping[str, Sequence[float]], *, ratio: bool = False) -> None:
        """Milliseconds of several systems; and what of another's time ours is, where that is asked for."""
        for system, values in times.items():
            if values:
                self.figure(name, "ms", values, system)
            if values and ratio and system != OURS:
                self.figure(f"{name}, over {system}", "x", [median(times[OURS]) / median(values)])

    def fact(self, name: str, holds: bool) -> None:
        self.bench.results.require(self.section, name, holds)
        self.bench.say(f"{name}: {'yes' if holds else 'NO'}")

    def note(self, text: str) -> None:
        self.bench.results.notes.append(text)
        self.bench.say(f"note: {text}")

    def milliseconds(self, work: Callable[[], object]) -> float:
        """From when the device has nothing to do until it has nothing to do again."""
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        return 1e3 * (time.perf_counter() - started)

    def time_turns(
        self, works: Mapping[str, Callable[[], object]], counted: Mapping[str, int]
    ) -> dict[str, list[float]]:
        """Milliseconds of each of them, as often as is counted, taking turns."""
        times: dict[str, list[float]] = {name: [] for name in works}
        for _, name in take_turns(rotated(works, max(counted.values())), counted.__getitem__):
            times[name].append(self.milliseconds(works[name]))
        return times

    def synchronize(self) -> None:
        device_kind(self.device).synchronize()

    def free_memory(self) -> None:
        """Give back what nothing refers to any more."""
        gc.collect()
        device_kind(self.device).synchronize()
        device_kind(self.device).release()

    @contextmanager
    def attempt(self, what: str, errors: list[str]) -> Iterator[None]:
        """A part of a section that may fail by itself: that is reported, and the section goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            errors.append(f"{what}: {type(error).__name__}: {error}")
        self.free_memory()


def over(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Ratios, round by round."""
    return [one / other for one, other in zip(first, second, strict=True)]
