"""Everything a benchmark measured, and what follows from it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.bench.memory import Growth
from penstock.bench.spread import Spread
from penstock.bench.suites import SuiteName
from penstock.bench.systems import SystemName
from penstock.bench.timing import Pass, paired
from penstock.measure.growth import METHOD
from penstock.measure.machine import Machine

SCHEMA = 1


@dataclass(frozen=True)
class Settings:
    """What was asked for."""

    suite: SuiteName
    model: str
    dtype: str
    chunk: int
    lengths: tuple[int, ...]
    memory_lengths: tuple[int, ...]
    repeats: int | None  # None: by length
    decode_tokens: int
    memory_repeats: int
    full: bool = False
    with_timings: bool = True
    with_memory: bool = True


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one system at one length."""

    system: SystemName
    prompt_tokens: int
    prefill: Spread
    decode: Spread | None


@dataclass(frozen=True)
class Ratio:
    """Penstock's value over another's, round by round."""

    name: str
    prompt_tokens: int
    spread: Spread


@dataclass(frozen=True)
class GrowthSummary:
    """Memory of one system at one length; the cache is the same in every process."""

    system: SystemName
    prompt_tokens: int
    growth_bytes: Spread
    activation_bytes: Spread
    cache_bytes: int


@dataclass(frozen=True)
class Agreement:
    """How far Penstock and transformers generated the same tokens. In bfloat16 rounding may part them."""

    prompt_tokens: int
    num_tokens: int
    num_equal: int
    num_equal_from_start: int


PREFILL_OVER_WHOLE = "prefill tokens/s, Penstock over transformers whole"
PREFILL_OVER_CHUNKED = "prefill tokens/s, Penstock over transformers chunked"
DECODE_OVER_TRANSFORMERS = "decode tokens/s, Penstock over transformers"
TILED_OVER_UNTILED = "prefill time, with the tile grid over without"
CHUNKED_OVER_WHOLE = "prefill time, Penstock chunked over whole"
PREFILL_OVER_TOKENWISE = "prefill tokens/s, Penstock over token by token"


@dataclass(frozen=True)
class Results:
    machine: Machine
    settings: Settings
    passes: tuple[Pass, ...]
    growths: tuple[Growth, ...]
    duration_s: float

    @property
    def speeds(self) -> list[Speed]:
        speeds = []
        for length, passes in _by_length(self.passes):
            for name in SystemName:
                own = [each for each in passes if each.system is name]
                if own:
                    decode = [
                        each.decode_tokens_per_s for each in own if each.decode_tokens_per_s is not None
                    ]
                    prefill = Spread.of(each.prefill_tokens_per_s for each in own)
                    speeds.append(Speed(name, length, prefill, Spread.of(decode) if decode else None))
        return speeds

    @property
    def ratios(self) -> list[Ratio]:
        def speed(each: Pass) -> float:
            return each.prefill_tokens_per_s

        def seconds(each: Pass) -> float:
            return each.first_token_s

        def decode(each: Pass) -> float | None:
            return each.decode_tokens_per_s

        ours = SystemName.PENSTOCK
        ratios = []
        for length, passes in _by_length(self.passes):
            spreads = {
                PREFILL_OVER_WHOLE: paired(passes, ours, SystemName.TRANSFORMERS, speed),
                PREFILL_OVER_CHUNKED: paired(passes, ours, SystemName.TRANSFORMERS_CHUNKED, speed),
                DECODE_OVER_TRANSFORMERS: paired(passes, ours, SystemName.TRANSFORMERS, decode),
                TILED_OVER_UNTILED: paired(passes, ours, SystemName.PENSTOCK_UNTILED, seconds),
                CHUNKED_OVER_WHOLE: paired(passes, ours, SystemName.PENSTOCK_WHOLE, seconds),
                PREFILL_OVER_TOKENWISE: paired(passes, ours, SystemName.PENSTOCK_TOKENWISE, speed),
            }
            ratios += [Ratio(name, length, spread) for name, spread in spreads.items() if spread is not None]
        return ratios

    @property
    def memory(self) -> list[GrowthSummary]:
        summaries = []
        for length in _lengths(each.prompt_tokens for each in self.growths):
            for name in SystemName:
                own = [each for each in self.growths if each.system is name and each.prompt_tokens == length]
                if own:
                    summaries.append(
                        GrowthSummary(
                            name,
                            length,
                            Spread.of(each.growth_bytes for each in own),
                            Spread.of(each.activation_bytes for each in own),
                            own[0].cache_bytes,
                        )
                    )
        return summaries

    @property
    def agreements(self) -> list[Agreement]:
        agreements = []
        for length, passes in _by_length(self.passes):
            by_system = {each.system: each.token_ids for each in passes}
            if SystemName.PENSTOCK in by_system and SystemName.TRANSFORMERS in by_system:
                ours, theirs = by_system[SystemName.PENSTOCK], by_system[SystemName.TRANSFORMERS]
                equal = [one == other for one, other in zip(ours, theirs, strict=True)]
                from_start = equal.index(False) if False in equal else len(equal)
                agreements.append(Agreement(length, len(equal), sum(equal), from_start))
        return agreements

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: what was measured and what follows from it."""
        return {
            "schema": SCHEMA,
            "machine": asdict(self.machine),
            "settings": asdict(self.settings),
            "duration_s": self.duration_s,
            "speeds": [
                {
                    "system": speed.system.value,
                    "prompt_tokens": speed.prompt_tokens,
                    "prefill_tokens_per_s": speed.prefill.to_dict(),
                    "decode_tokens_per_s": speed.decode.to_dict() if speed.decode else None,
                }
                for speed in self.speeds
            ],
            "ratios": [
                {"name": ratio.name, "prompt_tokens": ratio.prompt_tokens, **ratio.spread.to_dict()}
                for ratio in self.ratios
            ],
            "memory": {
                "method": METHOD,
                "growth": [
                    {
                        "system": each.system.value,
                        "prompt_tokens": each.prompt_tokens,
                        "cache_bytes": each.cache_bytes,
                        "growth_bytes": each.growth_bytes.to_dict(),
                        "activation_bytes": each.activation_bytes.to_dict(),
                    }
                    for each in self.memory
                ],
            },
            "agreement": [asdict(each) for each in self.agreements],
            "passes": [
                {**asdict(each), "system": each.system.value, "token_ids": list(each.token_ids)}
                for each in self.passes
            ],
        }


def _lengths(lengths: Iterable[int]) -> list[int]:
    return sorted(set(lengths))


def _by_length(passes: Sequence[Pass]) -> list[tuple[int, list[Pass]]]:
    return [
        (length, [each for each in passes if each.prompt_tokens == length])
        for length in _lengths(each.prompt_tokens for each in passes)
    ]
