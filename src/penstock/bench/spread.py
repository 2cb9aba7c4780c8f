"""Repeated measurements of one thing: their middle, and how far they lie apart."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Literal

# Quartiles further apart than this share of the median: the middle is not worth quoting by itself.
NOISY_SHARE = 0.15
# Fewer values than this have no spread to speak of.
MIN_VALUES = 3

Noise = Literal["", "noisy", "too few"]


@dataclass(frozen=True)
class Spread:
    """Values in the order they were measured; there is at least one."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a spread needs at least one value")

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def smallest(self) -> float:
        return min(self.values)

    @property
    def largest(self) -> float:
        return max(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third; between measured values they are interpolated."""
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        first, _, third = quantiles(self.values, n=4, method="inclusive")
        return first, third

    @property
    def relative(self) -> float:
        """How far the quartiles lie apart, as a share of the median."""
        first, third = self.quartiles
        return (third - first) / abs(self.median) if third > first else 0.0

    @property
    def noise(self) -> Noise:
        """Why the median should not be trusted by itself; empty where nothing speaks against it."""
        if len(self.values) < MIN_VALUES:
            return "too few"
        first, third = self.quartiles
        return "noisy" if third - first > NOISY_SHARE * abs(self.median) else ""

    def to_dict(self) -> dict[str, Any]:
        first, third = self.quartiles
        return {
            "median": self.median,
            "min": self.smallest,
            "max": self.largest,
            "first_quartile": first,
            "third_quartile": third,
            "noise": self.noise,
            "values": list(self.values),
        }
