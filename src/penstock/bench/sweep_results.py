"""Everything a sweep measured, and what may be said of it."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from penstock.bench.memory import Growth
from penstock.bench.spread import Spread
from penstock.bench.suites import SWEEP
from penstock.bench.sweep_workload import Baseline, Cell, ChunkChoice, Configuration
from penstock.bench.timing import Pass
from penstock.engine.llm import Dtype
from penstock.measure.growth import METHOD
from penstock.measure.machine import Machine

SCHEMA = 1
Quantity = Literal["first_token_s", "total_s"]
QUANTITIES: tuple[Quantity, ...] = ("first_token_s", "total_s")


@dataclass(frozen=True)
class SweepSettings:
    """What was asked for."""

    model: str
    dtype: Dtype
    chunks: tuple[ChunkChoice, ...]
    lengths: tuple[int, ...]
    baselines: tuple[Baseline, ...]
    repeats: int
    decode_tokens: int  # generated in all
    max_spread: float
    seed: int
    with_memory: bool = False


@dataclass(frozen=True)
class Timed:
    """One turn of a cell. `index` counts the turns of the whole run, in the order they ran."""

    cell: Cell
    index: int
    done: Pass

    @property
    def first_token_s(self) -> float:
        return self.done.first_token_s

    @property
    def total_s(self) -> float:
        """From the call to the last token."""
        return self.done.first_token_s + (self.done.decode_s or 0.0)


@dataclass(frozen=True)
class CellMemory:
    """How much a fresh process grew."""

    cell: Cell
    growth: Growth


@dataclass(frozen=True)
class Noisy:
    """A figure that is not given, since its repeats lie too far apart."""

    cell: Cell
    quantity: Quantity
    share: float  # of the median: how far the quartiles lie apart


@dataclass(frozen=True)
class SweepResults:
    machine: Machine
    settings: SweepSettings
    timings: tuple[Timed, ...]
    memory: tuple[CellMemory, ...]
    duration_s: float
    llama_cpp: str | None = None  # which it is, where it is among the systems

    @cached_property
    def cells(self) -> list[Cell]:
        """Configurations in the order they were asked for, each at all its lengths."""
        return sorted(
            {timed.cell for timed in self.timings},
            key=lambda cell: (_rank(cell.configuration), cell.prompt_tokens),
        )

    @property
    def configurations(self) -> list[Configuration]:
        return list(dict.fromkeys(cell.configuration for cell in self.cells))

    def spread(self, cell: Cell, quantity: Quantity) -> Spread:
        return Spread.of(getattr(timed, quantity) for timed in self.timings if timed.cell == cell)

    def figure(self, cell: Cell, quantity: Quantity) -> Spread | None:
        """The spread of a quantity, where it is small enough to be spoken of."""
        spread = self.spread(cell, quantity)
        return None if spread.relative > self.settings.max_spread else spread

    @cached_property
    def noisy(self) -> list[Noisy]:
        return [
            Noisy(cell, quantity, self.spread(cell, quantity).relative)
            for cell in self.cells
            for quantity in QUANTITIES
            if self.figure(cell, quantity) is None
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: a noisy figure has its raw values and no median."""
        return {
            "schema": SCHEMA,
            "suite": SWEEP,
            "machine": asdict(self.machine),
            "settings": asdict(self.settings),
            "llama_cpp": self.llama_cpp,
            "duration_s": self.duration_s,
            "cells": [self._cell_dict(cell) for cell in self.cells],
            "memory_method": METHOD if self.memory else None,
            "memory": [
                {
                    **_named(each.cell),
                    "growth_bytes": each.growth.growth_bytes,
                    "cache_bytes": each.growth.cache_bytes,
                    "activation_bytes": each.growth.activation_bytes,
                }
                for each in self.memory
            ],
            "turns": [
                {
                    "index": timed.index,
                    "round": timed.done.round_index,
                    **_named(timed.cell),
                    "first_token_s": timed.first_token_s,
                    "total_s": timed.total_s,
                }
                for timed in self.timings
            ],
        }

    def _cell_dict(self, cell: Cell) -> dict[str, Any]:
        first_token = self.figure(cell, "first_token_s")
        return {
            **_named(cell),
            **{quantity: self._quantity_dict(cell, quantity) for quantity in QUANTITIES},
            "tokens_per_s": None if first_token is None else cell.prompt_tokens / first_token.median,
        }

    def _quantity_dict(self, cell: Cell, quantity: Quantity) -> dict[str, Any]:
        spread, figure = self.spread(cell, quantity), self.figure(cell, quantity)
        known = {"is_noisy": figure is None, "relative_spread": spread.relative, "values": spread.values}
        if figure is None:
            return known
        first, third = figure.quartiles
        return {**known, "median": figure.median, "first_quartile": first, "third_quartile": third}


def _rank(configuration: Configuration) -> tuple[int, int]:
    """Penstock's first, by size, whole ones last of an engine's sizes."""
    system = configuration.system
    engine = 0 if configuration.is_ours else 1 if system.startswith("transformers") else 2
    return (2 * engine + system.endswith("auto"), configuration.chunk or 1 << 62)


def _named(cell: Cell) -> dict[str, Any]:
    configuration = cell.configuration
    return {
        "system": configuration.system.value,
        "chunk": configuration.chunk,
        "prompt_tokens": cell.prompt_tokens,
    }
