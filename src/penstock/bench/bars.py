"""What Penstock promises about its speed and memory, checked against a result."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.bench.results import (
    DECODE_OVER_TRANSFORMERS,
    PREFILL_OVER_CHUNKED,
    PREFILL_OVER_TOKENWISE,
    PREFILL_OVER_WHOLE,
    TILED_OVER_UNTILED,
    Results,
)
from penstock.bench.spread import Noise
from penstock.bench.suites import SuiteName
from penstock.bench.systems import SystemName
from penstock.plan.config import DEFAULT_CHUNK_SIZE

_DTYPE = "bfloat16"
_CHUNK = DEFAULT_CHUNK_SIZE


@dataclass(frozen=True)
class Bar:
    """A value and the limit it must keep. `noise` says why the value should be taken with care."""

    name: str
    value: float
    limit: float
    is_lower_limit: bool
    noise: Noise = ""

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.is_lower_limit else self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_met": self.is_met}


@dataclass(frozen=True)
class _Limits:
    """Of one suite. By ratio: the limit, and whether it is a lower one. Activations must not grow with the
    prompt: those of the longer of two, over those of the shorter."""

    ratios: Mapping[str, tuple[float, bool]]
    lengths: range  # of the prompts whose ratios have a limit
    lengths_in_words: str
    memory_lengths: tuple[int, int]
    memory: float


_LIMITS = {
    SuiteName.PREFILL: _Limits(
        ratios={
            PREFILL_OVER_WHOLE: (0.95, True),
            PREFILL_OVER_CHUNKED: (1.1, True),
            DECODE_OVER_TRANSFORMERS: (2.0, True),
            TILED_OVER_UNTILED: (1.05, False),
        },
        lengths=range(_CHUNK, sys.maxsize),
        lengths_in_words=f"{_CHUNK} tokens or more",
        memory_lengths=(2048, 8000),
        memory=1.5,
    ),
    SuiteName.HYBRID: _Limits(
        ratios={PREFILL_OVER_TOKENWISE: (5.0, True), PREFILL_OVER_WHOLE: (1.0, True)},
        lengths=range(1000, 1001),
        lengths_in_words="1,000 tokens",
        memory_lengths=(2000, 8000),
        memory=1.1,
    ),
}
# Growth below this is not told apart from none.
_RESOLUTION_BYTES = 1 << 20


def scope(suite: SuiteName) -> str:
    """Where the bars on speed and memory hold."""
    limits = _LIMITS[suite]
    shorter, longer = limits.memory_lengths
    return (
        f"Bars on speed and memory are for {_DTYPE} and chunk {_CHUNK}: speed at {limits.lengths_in_words}, "
        f"memory at {shorter:,} and {longer:,}."
    )


def check_bars(results: Results) -> list[Bar]:
    """The bars for which there is a measurement. Those on speed and memory hold where `scope` says."""
    limits, bars = _LIMITS[results.settings.suite], []
    if results.settings.dtype == _DTYPE and results.settings.chunk == _CHUNK:
        bars = [*_ratio_bars(results, limits), *_memory_bar(results, limits)]
    return [*bars, *_token_bars(results)]


def _ratio_bars(results: Results, limits: _Limits) -> list[Bar]:
    bars = []
    for name, (limit, is_lower_limit) in limits.ratios.items():
        for ratio in results.ratios:
            if ratio.name == name and ratio.prompt_tokens in limits.lengths:
                label = f"{name}, {ratio.prompt_tokens:,} tokens"
                bars.append(Bar(label, ratio.spread.median, limit, is_lower_limit, ratio.spread.noise))
    return bars


def _memory_bar(results: Results, limits: _Limits) -> list[Bar]:
    activations = {
        each.prompt_tokens: each.activation_bytes
        for each in results.memory
        if each.system is SystemName.PENSTOCK
    }
    few, many = limits.memory_lengths
    if few not in activations or many not in activations:
        return []
    shorter, longer = activations[few], activations[many]
    name = f"activation memory, Penstock, {many:,} over {few:,} tokens"
    ratio = max(longer.median, _RESOLUTION_BYTES) / max(shorter.median, _RESOLUTION_BYTES)
    return [Bar(name, ratio, limits.memory, False, shorter.noise or longer.noise)]


def _token_bars(results: Results) -> list[Bar]:
    """Chunked and whole, in every round, Penstock's first token is the same one. Token by token, chunks end
    within the blocks of a recurrent state, which may round it otherwise."""
    bars = []
    for length in sorted({each.prompt_tokens for each in results.passes}):
        first = [
            each.token_ids[0]
            for each in results.passes
            if each.prompt_tokens == length
            and each.system in (SystemName.PENSTOCK, SystemName.PENSTOCK_WHOLE)
        ]
        if first:
            name = f"share of Penstock's passes with the same first token, {length:,} tokens"
            bars.append(Bar(name, first.count(first[0]) / len(first), 1.0, True))
    return bars
