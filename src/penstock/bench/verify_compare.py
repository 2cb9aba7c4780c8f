"""Two ways of running one prompt, compared token by token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.bench.verify_results import (
    CacheSeries,
    Comparison,
    Greedy,
    GreedyDifference,
    Law,
    Series,
    StateDifference,
)
from penstock.bench.verify_runs import Recomputed, Trace
from penstock.cache.kv import KV

# Rows of logits that are compared at once: what is computed of them takes memory, too.
_ROWS = 64


def compare_traces(
    name: str, positions: Sequence[int], trace: Trace, expected: Trace, law: Law
) -> Comparison:
    """All that a way left behind, against what the expected one did."""
    return Comparison(
        name,
        law,
        logits=compare_logits(positions, trace.logits, expected.logits),
        cache=compare_caches(range(len(expected.layers[0].keys)), trace.layers, expected.layers),
        states=_compare_states(trace.states, expected.states),
        greedy=compare_greedy(positions, trace.logits, expected.logits),
    )


def compare_recomputed(name: str, recomputed: Recomputed, law: Law) -> Comparison:
    """Keys and values that were computed twice: the later ones against those that were in the cache."""
    return Comparison(
        name, law, cache=compare_caches(recomputed.positions, recomputed.after, recomputed.before)
    )


def compare_logits(positions: Sequence[int], ours: Tensor, theirs: Tensor) -> Series:
    """Rows [positions, vocab]. Relative to the largest logit of the same row of `theirs`."""
    same: list[bool] = []
    absolute: list[float] = []
    relative: list[float] = []
    for ours_part, theirs_part in zip(torch.split(ours, _ROWS), torch.split(theirs, _ROWS), strict=True):
        difference = _far((ours_part - theirs_part).abs()).amax(dim=1)
        same += (ours_part == theirs_part).all(dim=1).tolist()
        absolute += difference.tolist()
        relative += _far(difference / _scale(theirs_part, 1)).tolist()
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
    absolute = torch.zeros(len(positions))
    relative = torch.zeros(len(positions))
    for layer, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for part, other_part in ((mine.keys, other.keys), (mine.values, other.values)):
            is_same[layer] &= (part == other_part).flatten(1).all(dim=1)
            difference = _far((part.float() - other_part.float()).abs()).flatten(1).amax(dim=1)
            absolute = torch.maximum(absolute, difference)
            relative = torch.maximum(relative, _far(difference / _scale(other_part.float().flatten(), 0)))
    columns = [column for column, same in enumerate(is_same.all(dim=0).tolist()) if not same]
    first = min(columns, key=lambda column: positions[column], default=None)
    return CacheSeries(
        tuple(positions),
        tuple(is_same.all(dim=0).tolist()),
        tuple(absolute.tolist()),
        tuple(relative.tolist()),
        first_layer=None if first is None else is_same[:, first].tolist().index(False),
    )


def _compare_states(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> StateDifference | None:
    """Relative to the largest value of each tensor."""
    if not theirs:
        return None
    pairs = list(zip(ours, theirs, strict=True))
    differences = [_far((mine.float() - other.float()).abs()).max() for mine, other in pairs]
    scales = [_scale(other.float().flatten(), 0) for _, other in pairs]
    return StateDifference(
        is_same=all(torch.equal(mine, other) for mine, other in pairs),
        absolute=float(torch.stack(differences).max()),
        relative=float(
            torch.stack([_far(far / scale) for far, scale in zip(differences, scales, strict=True)]).max()
        ),
    )


def _far(difference: Tensor) -> Tensor:
    """What is no number is infinitely far away."""
    return torch.nan_to_num(difference, nan=torch.inf, posinf=torch.inf)


def _scale(values: Tensor, dim: int) -> Tensor:
    """The largest magnitude, never 0. One that is no number makes all differences infinite."""
    return values.abs().amax(dim=dim).clamp_min(torch.finfo(torch.float32).tiny)
