"""Everything a benchmark of serving measured, and what follows from it."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

from penstock.bench.serve_gaps import Gap, GapSummary, gaps_of
from penstock.bench.serve_workload import Variant, Workload
from penstock.bench.spread import Spread
from penstock.bench.suites import SERVE
from penstock.measure.machine import Machine

SCHEMA = 1
_NUMBERS = re.compile(r"\[[-+.eE\d,\s]*\]")
K = TypeVar("K")

STALL_UNCHUNKED_OVER_MIXED = "longest stall, unchunked over mixed"
THROUGHPUT_MIXED_OVER_UNCHUNKED = "tokens/s of everything, mixed over unchunked"
AT_ONCE_OVER_IN_TURN = "time of all requests, at once over one after the other"
STRICT_AT_ONCE = "time at once, strict over plain"
STRICT_MANY = "decode step of all requests, strict over plain"
STRICT_ONE = "decode step of one request, strict over plain"


@dataclass(frozen=True)
class ServeSettings:
    """What was asked for."""

    model: str
    dtype: str
    workload: Workload
    repeats: int | None = None  # None: fewer for variants without a bar
    full: bool = False


@dataclass(frozen=True)
class StallRun:
    """Streams decode, a long prompt arrives. Times are seconds since its arrival."""

    variant: Variant
    round_index: int
    stream_stamps: tuple[tuple[float, ...], ...]  # of each stream's tokens, those before the arrival negative
    first_token_s: float  # of the long prompt
    first_token: int
    seconds: float  # from the first submission to the last token
    num_tokens: int  # of everything, read or generated

    @cached_property
    def gaps(self) -> list[Gap]:
        return [gap for stamps in self.stream_stamps for gap in gaps_of(stamps)]

    @property
    def whole(self) -> GapSummary:
        return GapSummary.of(self.gaps)

    @property
    def reading(self) -> GapSummary:
        """Of the gaps that lie, or reach, into the time when the long prompt was read."""
        return GapSummary.of([gap for gap in self.gaps if gap.overlaps(0.0, self.first_token_s)])

    @property
    def longest_gap(self) -> Gap:
        return max(self.gaps, key=lambda gap: gap.seconds)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def num_outlasting(self) -> int:
        """Streams that still decoded when the long prompt had been read."""
        return sum(stamps[-1] > self.first_token_s for stamps in self.stream_stamps)


class Arrival(StrEnum):
    """How requests come: all of them at once, or each when the one before has ended."""

    AT_ONCE = "at-once"
    IN_TURN = "one-after-the-other"


@dataclass(frozen=True)
class BurstRun:
    """All requests of the second part through one service."""

    arrival: Arrival
    strict: bool
    round_index: int
    seconds: float
    decode_step_s: float  # median gap while as many requests decode as ever do: all of them, or one
    token_ids: tuple[tuple[int, ...], ...]  # by request


@dataclass(frozen=True)
class NamedRatio:
    """One value over another, round by round."""

    name: str
    spread: Spread


@dataclass(frozen=True)
class Agreement:
    """Requests that got the same tokens at once and one after the other, in the worst pair of runs."""

    strict: bool
    num_equal: int
    num_requests: int


@dataclass(frozen=True)
class ServeResults:
    machine: Machine
    settings: ServeSettings
    same_bits: bool  # whether the laws that strict decoding rests on hold on this machine
    stalls: tuple[StallRun, ...]
    bursts: tuple[BurstRun, ...]
    duration_s: float

    def of_variant(self, variant: Variant) -> list[StallRun]:
        return [run for run in self.stalls if run.variant is variant]

    def spread_of(self, variant: Variant, value: Callable[[StallRun], float]) -> Spread:
        return Spread.of(value(run) for run in self.of_variant(variant))

    def of_burst(self, arrival: Arrival, *, strict: bool) -> list[BurstRun]:
        return [run for run in self.bursts if run.arrival is arrival and run.strict is strict]

    @property
    def ratios(self) -> list[NamedRatio]:
        def stall(value: Callable[[StallRun], float], over: Variant, under: Variant) -> Spread | None:
            return _paired(
                {run.round_index: value(run) for run in self.of_variant(over)},
                {run.round_index: value(run) for run in self.of_variant(under)},
            )

        def seconds(arrival: Arrival, *, strict: bool = False) -> dict[int, float]:
            return {run.round_index: run.seconds for run in self.of_burst(arrival, strict=strict)}

        def step(arrival: Arrival, *, strict: bool = False) -> dict[int, float]:
            return {run.round_index: run.decode_step_s for run in self.of_burst(arrival, strict=strict)}

        at_once, in_turn = Arrival.AT_ONCE, Arrival.IN_TURN
        spreads = {
            STALL_UNCHUNKED_OVER_MIXED: stall(
                lambda run: run.longest_gap.seconds, Variant.UNCHUNKED, Variant.MIXED
            ),
            THROUGHPUT_MIXED_OVER_UNCHUNKED: stall(
                lambda run: run.tokens_per_s, Variant.MIXED, Variant.UNCHUNKED
            ),
            AT_ONCE_OVER_IN_TURN: _paired(seconds(at_once), seconds(in_turn)),
            STRICT_AT_ONCE: _paired(seconds(at_once, strict=True), seconds(at_once)),
            STRICT_MANY: _paired(step(at_once, strict=True), step(at_once)),
            STRICT_ONE: _paired(step(in_turn, strict=True), step(in_turn)),
        }
        return [NamedRatio(name, spread) for name, spread in spreads.items() if spread is not None]

    @property
    def agreements(self) -> list[Agreement]:
        agreements = []
        for strict in (False, True):
            at_once = self.of_burst(Arrival.AT_ONCE, strict=strict)
            in_turn = self.of_burst(Arrival.IN_TURN, strict=strict)
            counts = [
                sum(one == other for one, other in zip(ours.token_ids, theirs.token_ids, strict=True))
                for ours in at_once
                for theirs in in_turn
            ]
            if counts:
                agreements.append(Agreement(strict, min(counts), len(at_once[0].token_ids)))
        return agreements

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: what was measured and what follows from it."""
        return {
            "schema": SCHEMA,
            "suite": SERVE,
            "machine": asdict(self.machine),
            "settings": asdict(self.settings),
            "same_bits": self.same_bits,
            "duration_s": self.duration_s,
            "stall": [_variant_dict(self, variant) for variant in Variant if self.of_variant(variant)],
            "ratios": [{"name": ratio.name, **ratio.spread.to_dict()} for ratio in self.ratios],
            "agreement": [asdict(each) for each in self.agreements],
            "stall_runs": [_stall_dict(run) for run in self.stalls],
            "burst_runs": [
                {key: value for key, value in asdict(run).items() if key != "token_ids"}
                for run in self.bursts
            ],
        }


def to_json(plain: Mapping[str, Any]) -> str:
    """Indented, but a list of numbers on one line: there are thousands of them."""
    return _NUMBERS.sub(lambda match: " ".join(match[0].split()), json.dumps(plain, indent=2)) + "\n"


def _variant_dict(results: ServeResults, variant: Variant) -> dict[str, Any]:
    def spread(value: Callable[[StallRun], float]) -> dict[str, Any]:
        return results.spread_of(variant, value).to_dict()

    def gaps(summary: Callable[[StallRun], GapSummary]) -> dict[str, Any]:
        return {
            "p50_s": spread(lambda run: summary(run).p50_s),
            "p95_s": spread(lambda run: summary(run).p95_s),
            "p99_s": spread(lambda run: summary(run).p99_s),
        }

    return {
        "variant": variant.value,
        "gap_whole_run": gaps(lambda run: run.whole),
        "gap_while_reading": gaps(lambda run: run.reading),
        "longest_stall_s": spread(lambda run: run.longest_gap.seconds),
        "first_token_s": spread(lambda run: run.first_token_s),
        "seconds": spread(lambda run: run.seconds),
        "tokens_per_s": spread(lambda run: run.tokens_per_s),
        "fewest_streams_outlasting": min(run.num_outlasting for run in results.of_variant(variant)),
    }


def _stall_dict(run: StallRun) -> dict[str, Any]:
    return {
        "variant": run.variant.value,
        "round_index": run.round_index,
        "first_token_s": run.first_token_s,
        "first_token": run.first_token,
        "seconds": run.seconds,
        "num_tokens": run.num_tokens,
        "stream_stamps_s": [[round(stamp, 4) for stamp in stamps] for stamps in run.stream_stamps],
    }


def _paired(ours: Mapping[K, float], theirs: Mapping[K, float]) -> Spread | None:
    """Ours over theirs in every round that has both; None where there is none."""
    shared = [key for key in ours if key in theirs]
    return Spread.of(ours[key] / theirs[key] for key in shared) if shared else None
