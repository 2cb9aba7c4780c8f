"""What a comparison of two ways to run one prompt found, token by token, and whether it keeps its law."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from penstock.kernels.probe.probe import ProbeResult
from penstock.measure.machine import Machine

# A list of numbers, truth values and nulls.
_FLAT_LIST = re.compile(r"\[[^\[\]{}\"]*\]")


@dataclass(frozen=True)
class Series:
    """How far two results are apart at each of some tokens.

    `relative` is in parts of the largest value on the other side: at this token for logits, in this layer for keys
    and values. What is no finite number on either side is infinitely far from everything.
    """

    positions: tuple[int, ...]
    is_same: tuple[bool, ...]  # bit for bit
    absolute: tuple[float, ...]
    relative: tuple[float, ...]

    @property
    def all_same(self) -> bool:
        return all(self.is_same)

    @property
    def largest_absolute(self) -> float:
        return max(self.absolute)

    @property
    def largest_relative(self) -> float:
        return max(self.relative)

    @property
    def worst_position(self) -> int:
        """Where the largest relative difference is."""
        return self.positions[self.relative.index(self.largest_relative)]

    def first_different(self, end: int | None = None) -> int | None:
        """The first token whose bits differ; before `end`, where that is given."""
        return self._first(lambda index: not self.is_same[index], end)

    def first_beyond(self, tolerance: float) -> int | None:
        """The first token whose relative difference is larger."""
        return self._first(lambda index: self.relative[index] > tolerance, None)

    def _first(self, is_meant: Callable[[int], bool], end: int | None) -> int | None:
        meant = (
            position
            for index, position in enumerate(self.positions)
            if is_meant(index) and (end is None or position < end)
        )
        return min(meant, default=None)


@dataclass(frozen=True)
class CacheSeries(Series):
    """The same of keys and values, the worst layer's of each token."""

    first_layer: (
        int | None
    )  # the first layer, among those with attention, that differs at the first token that does


@dataclass(frozen=True)
class StateDifference:
    """How far two recurrent states at the prompt's end are apart, in the worst layer."""

    is_same: bool
    absolute: float
    relative: float


@dataclass(frozen=True)
class GreedyDifference:
    """The first token after which the likeliest one is another."""

    position: int
    token: int
    expected: int


@dataclass(frozen=True)
class Greedy:
    """The likeliest tokens of both sides."""

    num_tokens: int
    num_equal: int
    first: GreedyDifference | None


@dataclass(frozen=True)
class Law:
    """What must hold: the same bits at tokens before `bits_until`, and no more than the tolerance at any token."""

    bits_until: int
    tolerance: float


@dataclass(frozen=True)
class Comparison:
    """One way against another, and what became of the law."""

    name: str
    law: Law
    logits: Series | None = None
    cache: CacheSeries | None = None
    states: StateDifference | None = None
    greedy: Greedy | None = None
    seconds: float = 0.0
    error: str | None = None  # why it could not be run, where others could

    @property
    def passed(self) -> bool:
        return not self.breaks

    @property
    def breaks(self) -> tuple["Break", ...]:
        """Where the law is broken: nothing, if it holds."""
        found: list[Break] = []
        if self.error is not None:
            found.append(Break(self.error, None, "it could not be run"))
        for what, series in (("logits", self.logits), ("keys and values", self.cache)):
            if series is None:
                continue
            if (first := series.first_different(self.law.bits_until)) is not None:
                found.append(Break(what, first, "other bits"))
            if (first := series.first_beyond(self.law.tolerance)) is not None:
                found.append(Break(what, first, "beyond the tolerance"))
        if self.states is not None:
            if not self.states.is_same and self.law.bits_until:
                found.append(Break("recurrent states at the prompt's end", None, "other bits"))
            if self.states.relative > self.law.tolerance:
                found.append(Break("recurrent states at the prompt's end", None, "beyond the tolerance"))
        return tuple(found)


@dataclass(frozen=True)
class Break:
    """The first token at which something must not be as it is. None: it has no place among the tokens."""

    what: str
    position: int | None
    how: str


@dataclass(frozen=True)
class VerifyResults:
    """Everything that a verification found, and what it was found on."""

    machine: Machine
    model: str
    dtype: str
    kernels: str
    probe: ProbeResult
    token_ids: tuple[int, ...]  # of the prompt, then those generated
    texts: dict[int, str]  # of every token id that is named
    num_prompt: int
    num_positions: int  # of the tokens, those after which logits are compared
    tolerance: float
    strict: bool
    comparisons: tuple[Comparison, ...]
    duration_s: float

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.comparisons)

    def describe(self, position: int) -> str:
        """A token by its place and its text."""
        what = "token" if position < self.num_prompt else "generated token"
        return f"{what} {position} {self.texts[self.token_ids[position]]!r}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values. JSON has no infinity: that is None."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain |= {
            "machine": asdict(self.machine),
            "probe": {**asdict(self.probe), "same_bits": self.probe.same_bits},
            "comparisons": [self._comparison_dict(each) for each in self.comparisons],
            "passed": self.passed,
        }
        finite: dict[str, Any] = _finite(plain)
        return finite

    def to_json(self) -> str:
        """Indented, but a list of numbers on one line: there are hundreds of them."""
        text = json.dumps(self.to_dict(), indent=2)
        return _FLAT_LIST.sub(lambda match: " ".join(match[0].split()), text) + "\n"

    def _comparison_dict(self, comparison: Comparison) -> dict[str, Any]:
        plain = asdict(comparison)
        for name in ("logits", "cache"):
            series: Series | None = getattr(comparison, name)
            if series is not None:
                plain[name] |= {
                    "all_same": series.all_same,
                    "largest_absolute": series.largest_absolute,
                    "largest_relative": series.largest_relative,
                    "worst_position": series.worst_position,
                    "first_different": series.first_different(),
                    "first_beyond_tolerance": series.first_beyond(comparison.law.tolerance),
                }
        breaks = [
            {**asdict(each), "token": None if each.position is None else self.describe(each.position)}
            for each in comparison.breaks
        ]
        return {**plain, "passed": comparison.passed, "breaks": breaks}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
