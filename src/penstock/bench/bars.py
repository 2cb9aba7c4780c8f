"""What Penstock promises about its speed and memory, checked against a result."""

from dataclasses import asdict, dataclass
from typing import Any

from penstock.bench.results import (
    DECODE_OVER_TRANSFORMERS,
    PREFILL_OVER_CHUNKED,
    PREFILL_OVER_WHOLE,
    TILED_OVER_UNTILED,
    Results,
)
from penstock.bench.spread import Noise
from penstock.bench.systems import SystemName
from penstock.plan.config import DEFAULT_CHUNK_SIZE

_DTYPE = "bfloat16"
_CHUNK = DEFAULT_CHUNK_SIZE
SCOPE = f"Bars on speed and memory are for {_DTYPE}, chunk {_CHUNK} and prompts of {_CHUNK} tokens or more."


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


# By ratio: the limit, and whether it is a lower one.
_RATIO_LIMITS = {
    PREFILL_OVER_WHOLE: (0.95, True),
    PREFILL_OVER_CHUNKED: (1.1, True),
    DECODE_OVER_TRANSFORMERS: (2.0, True),
    TILED_OVER_UNTILED: (1.05, False),
}
# Activations must not grow with the prompt: those of the longer, over those of the shorter.
_MEMORY_LENGTHS = (2048, 8000)
_MEMORY_LIMIT = 1.5
# Growth below this is not told apart from none.
_RESOLUTION_BYTES = 1 << 20


def check_bars(results: Results) -> list[Bar]:
    """The bars for which there is a measurement. Those on speed and memory hold where `SCOPE` says."""
    bars = []
    if results.settings.dtype == _DTYPE and results.settings.chunk == _CHUNK:
        bars = [*_ratio_bars(results), *_memory_bar(results)]
    return [*bars, *_token_bars(results)]


def _ratio_bars(results: Results) -> list[Bar]:
    bars = []
    for name, (limit, is_lower_limit) in _RATIO_LIMITS.items():
        for ratio in results.ratios:
            if ratio.name == name and ratio.prompt_tokens >= _CHUNK:
                label = f"{name}, {ratio.prompt_tokens:,} tokens"
                bars.append(Bar(label, ratio.spread.median, limit, is_lower_limit, ratio.spread.noise))
    return bars


def _memory_bar(results: Results) -> list[Bar]:
    activations = {
        each.prompt_tokens: each.activation_bytes
        for each in results.memory
        if each.system is SystemName.PENSTOCK
    }
    if not all(length in activations for length in _MEMORY_LENGTHS):
        return []
    shorter, longer = (activations[length] for length in _MEMORY_LENGTHS)
    name = f"activation memory, Penstock, {_MEMORY_LENGTHS[1]:,} over {_MEMORY_LENGTHS[0]:,} tokens"
    ratio = max(longer.median, _RESOLUTION_BYTES) / max(shorter.median, _RESOLUTION_BYTES)
    return [Bar(name, ratio, _MEMORY_LIMIT, False, shorter.noise or longer.noise)]


def _token_bars(results: Results) -> list[Bar]:
    """Chunked and whole, in every round, Penstock's first token is the same one."""
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
