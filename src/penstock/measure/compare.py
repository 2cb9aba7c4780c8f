"""Two ways of running one prompt, compared token by token, and the law that the comparison must keep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cache.kv import KV
from penstock.measure.traces import Recomputed, Trace

# Rows of logits that are compared at once: the differences take memory, too.
_ROWS = 64


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
        first = self._first(lambda index: not self.is_same[index])
        return None if first is None or (end is not None and first >= end) else first

    def first_beyond(self, tolerance: float) -> int | None:
        """The first token whose relative difference is larger."""
        return self._first(lambda index: self.relative[index] > tolerance)

    def _first(self, differs: Callable[[int], bool]) -> int | None:
        return min(
            (position for index, position in enumerate(self.positions) if differs(index)), default=None
        )


@dataclass(frozen=True)
class CacheSeries(Series):
    """The same of keys and values, the worst layer's of each token."""

    first_layer: (
        int | None
    )  # among those with attention: the first that differs at the first token that differs


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
    """The same bits at tokens before `bits_until`, and no more than the tolerance at any token."""

    bits_until: int
    tolerance: float


@dataclass(frozen=True)
class Break:
    """The first token at which a law is broken. None: it has no place among the tokens."""

    what: str
    position: int | None
    how: str


@dataclass(frozen=True)
class Comparison:
    """One way against another, and the law between them."""

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
    def breaks(self) -> tuple[Break, ...]:
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
            what = "recurrent states at the prompt's end"
            if not self.states.is_same and self.law.bits_until:
                found.append(Break(what, None, "other bits"))
            if self.states.relative > self.law.tolerance:
                found.append(Break(what, None, "beyond the tolerance"))
        return tuple(found)


def compare_traces(
    name: str, positions: Sequence[int], trace: Trace, expected: Trace, law: Law, seconds: float = 0.0
) -> Comparison:
    """All that a way left behind, against what the expected one did."""
    return Comparison(
        name,
        law,
        logits=compare_logits(positions, trace.logits, expected.logits),
        cache=compare_caches(range(len(expected.layers[0].keys)), trace.layers, expected.layers),
        states=_compare_states(trace.states, expected.states),
        greedy=compare_greedy(positions, trace.logits, expected.logits),
        seconds=seconds,
    )


def compare_recomputed(name: str, recomputed: Recomputed, law: Law) -> Comparison:
    """Keys and values that were computed twice: the later ones against those that were in the cache."""
    cache = compare_caches(recomputed.positions, recomputed.after, recomputed.before)
    return Comparison(name, law, cache=cache)


def compare_logits(positions: Sequence[int], ours: Tensor, theirs: Tensor) -> Series:
    """Rows [positions, vocab]. Relative to the largest logit of the same row of `theirs`."""
    same: list[bool] = []
    absolute: list[float] = []
    relative: list[float] = []
    for ours_part, theirs_part in zip(torch.split(ours, _ROWS), torch.split(theirs, _ROWS), strict=True):
        difference = _distance(ours_part, theirs_part).amax(dim=1)
        same += (ours_part == theirs_part).all(dim=1).tolist()
        absolute += difference.tolist()
        relative += _relative(difference, theirs_part.abs().amax(dim=1)).tolist()
    return Series(tuple(positions), tuple(same), tuple(absolute), tuple(relative))


def compare_greedy(positions: Sequence[int], ours: Tensor, theirs: Tensor) -> Greedy:
    chosen, expected = ours.argmax(dim=1).tolist(), theirs.argmax(dim=1).tolist()
    differences = [
        GreedyDifference(position, token, other)
        for position, token, other in zip(positions, chosen, expected, strict=True)
        if token != other
    ]
    first = min(differences, key=lambda each: each.position, default=None)
    return Greedy(len(chosen), len(chosen) - len(differences), first)


def compare_caches(positions: Sequence[int], ours: Sequence[KV], theirs: Sequence[KV]) -> CacheSeries:
    """Layers of keys and values of these tokens. Relative to the largest of a layer's keys, or values."""
    is_same = torch.ones(len(ours), len(positions), dtype=torch.bool)  # [layers, tokens]
    absolute, relative = torch.zeros(len(positions)), torch.zeros(len(positions))
    for layer, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for part, other_part in ((mine.keys, other.keys), (mine.values, other.values)):
            is_same[layer] &= (part == other_part).flatten(1).all(dim=1).cpu()
            difference = _distance(part, other_part).flatten(1).amax(dim=1).cpu()
            absolute = torch.maximum(absolute, difference)
            relative = torch.maximum(relative, _relative(difference, other_part.float().abs().max().cpu()))
    tokens_same = is_same.all(dim=0).tolist()
    columns = [column for column, same in enumerate(tokens_same) if not same]
    first = min(columns, key=lambda column: positions[column], default=None)
    return CacheSeries(
        tuple(positions),
        tuple(tokens_same),
        tuple(absolute.tolist()),
        tuple(relative.tolist()),
        first_layer=None if first is None else is_same[:, first].tolist().index(False),
    )


def _compare_states(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> StateDifference | None:
    """Relative to the largest value of each tensor."""
    if not theirs:
        return None
    pairs = list(zip(ours, theirs, strict=True))
    differences = [_distance(mine, other).max() for mine, other in pairs]
    shares = [
        _relative(difference, other.float().abs().max())
        for difference, (_, other) in zip(differences, pairs, strict=True)
    ]
    return StateDifference(
        is_same=all(torch.equal(mine, other) for mine, other in pairs),
        absolute=float(torch.stack(differences).max()),
        relative=float(torch.stack(shares).max()),
    )


def _distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """What is no number is infinitely far away."""
    return _infinite((ours.float() - theirs.float()).abs())


def _relative(difference: Tensor, largest: Tensor) -> Tensor:
    """Never divided by 0. A largest value that is no number makes all differences infinite."""
    return _infinite(difference / largest.clamp_min(torch.finfo(torch.float32).tiny))


def _infinite(difference: Tensor) -> Tensor:
    return torch.nan_to_num(difference, nan=torch.inf, posinf=torch.inf)
