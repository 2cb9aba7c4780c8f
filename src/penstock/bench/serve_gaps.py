"""Arithmetic of waiting: the gaps between a stream's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Gap:
    """From one token of a stream, at `start_s`, to its next, at `end_s`."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def overlaps(self, start_s: float, end_s: float) -> bool:
        """Whether a part of it lies in [start, end)."""
        return self.start_s < end_s and self.end_s > start_s


def gaps_of(stamps: Sequence[float]) -> list[Gap]:
    """Between the tokens of one stream, which came at these times; the wait for its first is none of them."""
    return [Gap(start, end) for start, end in pairwise(stamps)]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of the values that at least so many percent of them do not exceed. It is a wait that somebody had:
    nothing is interpolated."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    return sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]


@dataclass(frozen=True)
class GapSummary:
    """Percentiles of the gaps of several streams together, in seconds."""

    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, gaps: Sequence[Gap]) -> "GapSummary":
        seconds = [gap.seconds for gap in gaps]
        return cls(percentile(seconds, 50), percentile(seconds, 95), percentile(seconds, 99))
