"""Two ways of running one prompt, compared token by token, and the law that the comparison must keep."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.measure.traces import Trace

# Rows of logits that are compared at once: the differences take memory, too.
_ROWS = 64


@dataclass(frozen=True)
class Series:
    """How far two results are apart at each of some tokens; of keys and values, in the worst layer.

    `relative` is in parts of the largest value on the other side: at this token for logits, in this layer for keys
    and values. What is no finite number on either side is infinitely far from everything.
    """

    positions: tuple[int, ...]
    is_same: tuple[bool, ...]  # bit for bit
    absolute: tuple[float, ...]
    relative: tuple[float, ...]
    first_layer: int | None = None  # of those with attention: the first that differs at the first such token

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
        different = (at for at, same in zip(self.positions, self.is_same, strict=True) if not same)
        return min((at for at in different if end is None or at < end), default=None)

    def first_beyond(self, tolerance: float) -> int | None:
        """The first token whose relative difference is larger."""
        pairs = zip(self.positions, self.relative, strict=True)
        return min((at for at, relative in pairs if relative > tolerance), default=None)


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
    cache: Series | None = None
    states: Series | None = None  # recurrent ones, at the prompt's last token
    greedy: Greedy | None = None
    seconds: float = 0.0
    error: str | None = None  # why it could not be run, where others could

    @property
    def passed(self) -> bool:
        return not self.breaks

    @property
    def breaks(self) -> tuple[Break, ...]:
        """Where the law is broken: nothing, if it holds."""
        until, tolerance = self.law.bits_until, self.law.tolerance
        found = [] if self.error is None else [Break(self.error, None, "it could not be run")]
        for what, series in self.series.items():
            other, beyond = series.first_different(until), series.first_beyond(tolerance)
            found += [Break(what, other, "other bits")] if other is not None else []
            found += [Break(what, beyond, "beyond the tolerance")] if beyond is not None else []
        return tuple(found)

    @property
    def series(self) -> dict[str, Series]:
        """What was compared, by name."""
        named = {"logits": self.logits, "keys and values": self.cache, "recurrent states": self.states}
        return {what: series for what, series in named.items() if series is not None}

    def to_dict(self, describe: Callable[[int], str]) -> dict[str, Any]:
        """Plain values; `describe` names a token by its position."""
        plain = asdict(self)
        for name, series in (("logits", self.logits), ("cache", self.cache)):
            if series is not None:
                plain[name] |= {
                    "all_same": series.all_same,
                    "largest_absolute": series.largest_absolute,
                    "largest_relative": series.largest_relative,
                    "worst_position": series.worst_position,
                    "first_different": series.first_different(),
                    "first_beyond_tolerance": series.first_beyond(self.law.tolerance),
                }
        if self.states is not None:
            same, absolute, relative = self.states.is_same, self.states.absolute, self.states.relative
            plain["states"] = {"is_same": same[0], "absolute": absolute[0], "relative": relative[0]}
        breaks = [
            {**asdict(each), "token": None if each.position is None else describe(each.position)}
            for each in self.breaks
        ]
        return {**plain, "passed": self.passed, "breaks": breaks}


def compare_traces(
    name: str, positions: Sequence[int], trace: Trace, expected: Trace, law: Law, seconds: float = 0.0
) -> Comparison:
    """All that a way left behind, against what the expected one did. States are of the token before the answer."""
    last = len(expected.kv[0]) - len(expected.generated)
    return Comparison(
        name,
        law,
        logits=compare_logits(positions, trace.logits, expected.logits),
        cache=compare_caches(range(len(expected.kv[0])), trace.kv, expected.kv),
        states=_compare_states(last, trace.states, expected.states) if expected.states else None,
        greedy=compare_greedy(positions, trace.logits, expected.logits),
        seconds=seconds,
    )


def compare_logits(positions: Sequence[int], ours: Tensor, theirs: Tensor) -> Series:
    """Rows [positions, vocab]. Relative to the largest logit of the same row of `theirs`."""
    pairs = zip(torch.split(ours, _ROWS), torch.split(theirs, _ROWS), strict=True)
    parts = [_differences(mine, other, other.abs().amax(dim=1)) for mine, other in pairs]
    same, absolute, relative = (tuple(torch.cat(each).tolist()) for each in zip(*parts, strict=True))
    return Series(tuple(positions), same, absolute, relative)


def compare_greedy(positions: Sequence[int], ours: Tensor, theirs: Tensor) -> Greedy:
    chosen, expected = ours.argmax(dim=1).tolist(), theirs.argmax(dim=1).tolist()
    differences = [
        GreedyDifference(position, token, other)
        for position, token, other in zip(positions, chosen, expected, strict=True)
        if token != other
    ]
    first = min(differences, key=lambda each: each.position, default=None)
    return Greedy(len(chosen), len(chosen) - len(differences), first)


def compare_caches(positions: Sequence[int], ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Series:
    """Keys, then values, of these tokens, layer by layer. Relative to the largest of a layer's keys, or values."""
    pairs = zip(ours, theirs, strict=True)
    parts = [_differences(mine, other, other.float().abs().max()) for mine, other in pairs]
    same, absolute, relative = (torch.stack(each) for each in zip(*parts, strict=True))  # [tensors, tokens]
    tokens_same = same.all(dim=0).tolist()
    columns = [column for column, is_same in enumerate(tokens_same) if not is_same]
    first = min(columns, key=lambda column: positions[column], default=None)
    return Series(
        tuple(positions),
        tuple(tokens_same),
        tuple(absolute.amax(dim=0).tolist()),
        tuple(relative.amax(dim=0).tolist()),
        first_layer=None if first is None else same[:, first].tolist().index(False) // 2,
    )


def _compare_states(position: int, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Series:
    """Relative to the largest value of each tensor."""
    states = compare_caches([position], [each[None] for each in ours], [each[None] for each in theirs])
    return replace(states, first_layer=None)


def _differences(ours: Tensor, theirs: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: whether it has the same bits, the largest difference, and that in parts of the largest value. What
    is no number is infinitely far away, as is everything from a largest value that is none."""
    same = (ours == theirs).flatten(1).all(dim=1)
    absolute = _infinite((ours.float() - theirs.float()).abs().flatten(1).amax(dim=1))
    relative = _infinite(absolute / largest.clamp_min(torch.finfo(torch.float32).tiny))  # never by 0
    return same.cpu(), absolute.cpu(), relative.cpu()


def _infinite(difference: Tensor) -> Tensor:
    return torch.nan_to_num(difference, nan=torch.inf, posinf=torch.inf)
