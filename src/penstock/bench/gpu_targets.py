"""What is to be reached on an H200, beside what others reach and what the card can do at most."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from penstock.bench.gpu_memory import ACTIVATIONS, OFF_BY
from penstock.bench.gpu_prefill import TILES_COST
from penstock.bench.gpu_results import Figure, GpuResults, Unit
from penstock.bench.gpu_start import READY
from penstock.bench.gpu_workload import PLAN, DecodeCase, GpuModel, PrefillCase, Section

VLLM = "vLLM 0.26 (FA3)"
Verdict = Literal["pass", "MISS", "not measured"]


@dataclass(frozen=True)
class Target:
    """The most that a figure may be. Those of others were measured apart, on the same kind of card."""

    section: Section
    name: str
    unit: Unit
    bar: float
    stretch: float | None = None
    limit: float | None = None  # of the card: arithmetic at its peak, or bytes at its bandwidth
    vllm: float | None = None


@dataclass(frozen=True)
class Judged:
    target: Target
    ours: Figure | None
    theirs: Figure | None  # transformers'

    @property
    def verdict(self) -> Verdict:
        if self.ours is None:
            return "not measured"
        return "pass" if self.ours.median <= self.target.bar else "MISS"

    @property
    def is_met(self) -> bool:
        return self.verdict == "pass"

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.target),
            "penstock": self.ours.median if self.ours else None,
            "transformers": self.theirs.median if self.theirs else None,
            "verdict": self.verdict,
        }


def judge(results: GpuResults, sections: Sequence[Section]) -> list[Judged]:
    """The targets of these sections."""
    return [
        Judged(target, results.figure(target.name), results.figure(target.name, "transformers"))
        for target in TARGETS
        if target.section in sections
    ]


def _prefill(
    section: Section,
    case: PrefillCase,
    bar: float,
    stretch: float,
    limit: float,
    vllm: float | None = None,
) -> Target:
    return Target(section, case.label, "ms", bar, stretch, limit, vllm)


def _decode(case: DecodeCase, bar: float, vllm: float) -> Target:
    return Target(Section.DECODE, case.label, "ms", bar, vllm=vllm)


TARGETS = (
    _prefill(Section.LARGE, PrefillCase(GpuModel.LARGE, 32_768, 2048), 1260, 1180, 1060, vllm=1274),
    _prefill(Section.LARGE, PrefillCase(GpuModel.LARGE, 32_768, 0), 1250, 1170, 1060, vllm=1240),
    _prefill(Section.LARGE, PrefillCase(GpuModel.LARGE, 32_768, 512), 1400, 1250, 1060, vllm=1438),
    _prefill(Section.LARGE, PrefillCase(GpuModel.LARGE, 131_072, 2048), 11_200, 10_600, 9820, vllm=11_271),
    _prefill(Section.LARGE, PrefillCase(GpuModel.LARGE, 8192, 2048), 222, 205, 177, vllm=224),
    _prefill(Section.SMALL, PrefillCase(GpuModel.SMALL, 32_768, 2048), 320, 270, 219, vllm=366),
    _prefill(Section.SMALL, PrefillCase(GpuModel.SMALL, 32_768, 512), 500, 350, 219, vllm=775),
    _prefill(Section.SMALL, PrefillCase(GpuModel.SMALL, 8192, 2048), 60, 40, 21, vllm=87),
    _prefill(Section.HYBRID, PrefillCase(GpuModel.HYBRID, 32_768, 2048), 1150, 980, 820),
    _prefill(Section.HYBRID, PrefillCase(GpuModel.HYBRID, 32_768, 0), 1100, 950, 820),
    _prefill(Section.HYBRID, PrefillCase(GpuModel.HYBRID, 32_768, 512), 1700, 1200, 820),
    _decode(DecodeCase(GpuModel.LARGE, 1, 128), 5.83, vllm=5.30),
    _decode(DecodeCase(GpuModel.LARGE, 32, 128), 6.64, vllm=6.04),
    _decode(DecodeCase(GpuModel.LARGE, 1, 32_768), 6.95, vllm=6.32),
    _decode(DecodeCase(GpuModel.SMALL, 1, 128), 1.84, vllm=1.67),
    _decode(DecodeCase(GpuModel.SMALL, 32, 128), 2.53, vllm=2.30),
    Target(Section.MEMORY, f"{PLAN.memory.label}, {ACTIVATIONS}", "GiB", 0.30),
    Target(Section.MEMORY, f"{PLAN.memory.label}, {OFF_BY}", "share", 0.10),
    Target(Section.START, f"{PLAN.start}, {READY}", "s", 15.0),
    Target(Section.TILES, f"{PLAN.tiles.label}, {TILES_COST}", "share", 0.03),
)
