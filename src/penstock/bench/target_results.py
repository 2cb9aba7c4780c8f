"""Everything a benchmark of latency targets measured, and what follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from penstock.bench.serve_gaps import Gap, percentile
from penstock.bench.spread import Spread
from penstock.bench.target_workload import TARGETS, Sizing, TargetWorkload
from penstock.engine.explain import ChunkRecord
from penstock.measure.machine import Machine
from penstock.plan.sizing import SMALLEST_CHUNK

SCHEMA = 1
# A gap keeps its target up to so much more than it; a sizing does where so many of its gaps do.
SLACK = 1.25
ENOUGH = 0.95
_PERCENTS = (5, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True)
class TargetSettings:
    """What was asked for."""

    model: str
    dtype: str
    workload: TargetWorkload
    repeats: int


@dataclass(frozen=True)
class ArrivalRun:
    """Streams decode, a long prompt arrives. Times are seconds since its arrival."""

    sizing: Sizing
    round_index: int
    first_token_s: float  # of the long prompt
    first_token: int
    decode_gap_s: float  # median between tokens of the streams before it came
    gaps: tuple[Gap, ...]  # of all streams: those that end with a step that read a chunk
    chunks: tuple[ChunkRecord, ...]

    @cached_property
    def gap_seconds(self) -> list[float]:
        return sorted(gap.seconds for gap in self.gaps)


@dataclass(frozen=True)
class LoneRun:
    """A prompt that was read while nothing else ran. `chunk` None is automatic."""

    chunk: int | None
    prompt_tokens: int
    round_index: int
    first_token_s: float


@dataclass(frozen=True)
class Verdict:
    """What came of one target. `share` is that of all gaps which kept it, in all rounds; `worst_share` that of the
    round with the fewest. `best_fixed` is the fixed chunk with the soonest first token of those that keep the target,
    None where none does; `ratio` is the time to the first token with automatic chunks over that chunk's, by round."""

    target_ms: int
    is_reachable: bool
    share: float
    worst_share: float
    best_fixed: int | None
    ratio: Spread | None


@dataclass(frozen=True)
class LoneVerdict:
    """The fixed chunk with the soonest first token, and the time with automatic chunks over its, by round."""

    prompt_tokens: int
    best_fixed: int
    ratio: Spread


@dataclass(frozen=True)
class TargetResults:
    machine: Machine
    settings: TargetSettings
    has_profile: bool  # whether automatic sizes start from one, or from nothing
    arrivals: tuple[ArrivalRun, ...]
    lone: tuple[LoneRun, ...]
    duration_s: float

    @property
    def sizings(self) -> list[Sizing]:
        """Those that ran: fixed chunks from the smallest, then targets from the tightest."""
        ran = {run.sizing for run in self.arrivals}
        return sorted(ran, key=lambda each: (each.fixed is None, each.fixed or each.target_ms))

    def of(self, sizing: Sizing) -> list[ArrivalRun]:
        return [run for run in self.arrivals if run.sizing == sizing]

    def gap_seconds(self, sizing: Sizing) -> list[float]:
        """Of all rounds together."""
        return [seconds for run in self.of(sizing) for seconds in run.gap_seconds]

    def share(self, sizing: Sizing, target_ms: int) -> float:
        return share_within(self.gap_seconds(sizing), target_ms)

    def first_token(self, sizing: Sizing) -> Spread:
        return Spread.of(run.first_token_s for run in self.of(sizing))

    def verdict(self, target_ms: int) -> Verdict:
        auto = Sizing(target_ms=target_ms)
        fixed = [each for each in self.sizings if each.fixed is not None]
        keeping = [each for each in fixed if self.share(each, target_ms) >= ENOUGH]
        best = min(keeping, key=lambda each: self.first_token(each).median, default=None)
        share = self.share(auto, target_ms)
        return Verdict(
            target_ms=target_ms,
            is_reachable=bool(keeping) or share >= ENOUGH or not self._is_out_of_reach(target_ms, fixed),
            share=share,
            worst_share=min(share_within(run.gap_seconds, target_ms) for run in self.of(auto)),
            best_fixed=None if best is None else best.fixed,
            ratio=None if best is None else _paired(self._first_tokens(auto), self._first_tokens(best)),
        )

    @property
    def verdicts(self) -> list[Verdict]:
        ran = {each.target_ms for each in self.sizings if each.target_ms is not None}
        return [self.verdict(target) for target in sorted(ran)]

    def lone_verdict(self, prompt_tokens: int) -> LoneVerdict | None:
        """None where nothing was measured that could be compared."""
        chunks = [chunk for chunk in self.lone_chunks(prompt_tokens) if chunk is not None]
        if not chunks:
            return None
        best = min(
            chunks, key=lambda chunk: Spread.of(self.lone_seconds(chunk, prompt_tokens).values()).median
        )
        ratio = _paired(self.lone_seconds(None, prompt_tokens), self.lone_seconds(best, prompt_tokens))
        return None if ratio is None else LoneVerdict(prompt_tokens, best, ratio)

    @property
    def lone_lengths(self) -> list[int]:
        return sorted({run.prompt_tokens for run in self.lone})

    @property
    def lone_verdicts(self) -> list[LoneVerdict]:
        found = (self.lone_verdict(length) for length in self.lone_lengths)
        return [verdict for verdict in found if verdict is not None]

    def lone_chunks(self, prompt_tokens: int) -> list[int | None]:
        """Those that ran at this length, the automatic one last."""
        ran = {run.chunk for run in self.lone if run.prompt_tokens == prompt_tokens}
        return sorted(ran, key=lambda chunk: (chunk is None, chunk))

    def lone_seconds(self, chunk: int | None, prompt_tokens: int) -> dict[int, float]:
        """To the first token, by round."""
        return {
            run.round_index: run.first_token_s
            for run in self.lone
            if (run.chunk, run.prompt_tokens) == (chunk, prompt_tokens)
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: what was measured and what follows from it."""
        return {
            "schema": SCHEMA,
            "suite": TARGETS,
            "machine": asdict(self.machine),
            "settings": asdict(self.settings),
            "has_profile": self.has_profile,
            "duration_s": self.duration_s,
            "targets": [_verdict_dict(each) for each in self.verdicts],
            "lone": [_verdict_dict(each) for each in self.lone_verdicts],
            "arrival_runs": [_arrival_dict(run, self.settings.workload.targets_ms) for run in self.arrivals],
            "lone_runs": [asdict(run) for run in self.lone],
        }

    def _first_tokens(self, sizing: Sizing) -> dict[int, float]:
        return {run.round_index: run.first_token_s for run in self.of(sizing)}

    def _is_out_of_reach(self, target_ms: int, fixed: Sequence[Sizing]) -> bool:
        """Whether it is known that no chunk keeps the target: decoding alone does not, or none that is as small as an
        automatic one may be."""
        decode_gap_s = Spread.of(run.decode_gap_s for run in self.arrivals).median
        limit_s = SLACK * target_ms / 1000
        smallest = min((each.fixed or 0 for each in fixed), default=None)
        return decode_gap_s > limit_s or (smallest is not None and smallest <= SMALLEST_CHUNK)


def share_within(gap_seconds: Sequence[float], target_ms: int) -> float:
    """The share of gaps that are no longer than the target and its slack."""
    limit_s = SLACK * target_ms / 1000
    return sum(seconds <= limit_s for seconds in gap_seconds) / len(gap_seconds)


def _paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread | None:
    """Ours over theirs in every round that has both; None where there is none."""
    shared = sorted(ours.keys() & theirs.keys())
    return Spread.of(ours[key] / theirs[key] for key in shared) if shared else None


def _verdict_dict(verdict: Verdict | LoneVerdict) -> dict[str, Any]:
    ratio = verdict.ratio
    return {**asdict(verdict), "ratio": None if ratio is None else ratio.to_dict()}


def _arrival_dict(run: ArrivalRun, targets_ms: Sequence[int]) -> dict[str, Any]:
    gaps = run.gap_seconds
    return {
        **asdict(run.sizing),
        "round_index": run.round_index,
        "first_token_s": run.first_token_s,
        "first_token": run.first_token,
        "decode_gap_s": run.decode_gap_s,
        "num_gaps": len(gaps),
        "gap_s": {
            "min": gaps[0],
            **{f"p{each}": percentile(gaps, each) for each in _PERCENTS},
            "max": gaps[-1],
        },
        "share_within": {str(target): share_within(gaps, target) for target in targets_ms},
        "chunk_tokens": [len(chunk) for chunk in run.chunks],
        "chunk_rules": sorted({chunk.rule for chunk in run.chunks}),
        "step_s": [round(chunk.measured_s, 5) for chunk in run.chunks],
        "predicted_s": [
            None if chunk.predicted_s is None else round(chunk.predicted_s, 5) for chunk in run.chunks
        ],
    }
