"""What Penstock promises against other engines on a CPU, checked against a result."""

from dataclasses import asdict, dataclass
from typing import Any

from penstock.bench.peers_results import PeerResults
from penstock.bench.peers_workload import OURS, PeerSystem, Quantity
from penstock.bench.spread import Noise

_DTYPE = "bfloat16"


@dataclass(frozen=True)
class PeerBar:
    """A ratio and the least that it must be. A ratio that was not measured is None, and its bar is not met."""

    name: str
    value: float | None
    limit: float
    noise: Noise = ""
    why_not_measured: str = ""

    @property
    def is_met(self) -> bool:
        return self.value is not None and self.value >= self.limit

    @property
    def verdict(self) -> str:
        if self.value is None:
            return f"not measured ({self.why_not_measured})"
        return ("pass" if self.is_met else "MISS") + (f" ({self.noise})" if self.noise else "")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_met": self.is_met}


@dataclass(frozen=True)
class _Limit:
    quantity: Quantity
    theirs: PeerSystem
    by_length: tuple[tuple[int, float], ...]


_LIMITS = (
    _Limit("prefill", PeerSystem.LLAMA_FILE, ((512, 3.0), (2048, 4.0), (8000, 4.0))),
    _Limit("prefill", PeerSystem.LLAMA_BEST, ((2048, 2.0), (8000, 2.0))),
    _Limit("prefill", PeerSystem.VLLM, ((512, 1.1), (2048, 1.1), (8000, 1.1))),
    _Limit("prefill", PeerSystem.TRANSFORMERS, ((2048, 1.2), (8000, 1.5))),
    _Limit("decode", PeerSystem.LLAMA_FILE, ((512, 1.5), (8000, 1.5))),
    _Limit("decode", PeerSystem.LLAMA_BEST, ((512, 1.1), (8000, 1.1))),
)


def scope() -> str:
    """How the bars are judged."""
    return f"Bars are for {_DTYPE}: the median of the ratios of speeds, round by round."


def check_bars(results: PeerResults) -> list[PeerBar]:
    """All bars, also those that could not be measured. Prefill is judged with fixed and with automatic chunks."""
    return [
        _bar(results, ours, limit, length, least)
        for limit in _LIMITS
        for ours in (OURS if limit.quantity == "prefill" else OURS[:1])
        for length, least in limit.by_length
    ]


def _bar(results: PeerResults, ours: PeerSystem, limit: _Limit, length: int, least: float) -> PeerBar:
    verb = "prefill of" if limit.quantity == "prefill" else "decode after"
    whose = ours.label if limit.quantity == "prefill" else "Penstock"
    name = f"{verb} {length:,}: {whose} over {limit.theirs.label}"
    ratio = results.ratio(ours, limit.theirs, length, limit.quantity)
    if results.settings.dtype != _DTYPE:
        return PeerBar(name, None, least, why_not_measured=f"this is {results.settings.dtype}")
    if ratio is None:
        absent = limit.theirs.value in results.left_out
        return PeerBar(name, None, least, why_not_measured="left out" if absent else "no such turns")
    return PeerBar(name, ratio.median, least, ratio.noise)
