"""Everything a benchmark of the prefix cache measured, and what follows from it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from penstock.bench.cache_runs import Answer
from penstock.bench.cache_workload import CACHE, CacheWorkload, Way
from penstock.bench.spread import Spread
from penstock.engine.llm import Dtype
from penstock.measure.machine import Machine

SCHEMA = 1
WRITING_OVER_COLD = "time to first token, written to disk over cold"
COLD_OVER_MEMORY = "time to first token, cold over from memory"
COLD_OVER_DISK = "time to first token, cold over from disk"
COLD_OVER_RESUMED = "time to first token, cold over resumed"
_RATIOS = {
    WRITING_OVER_COLD: (Way.WRITING, Way.COLD),
    COLD_OVER_MEMORY: (Way.COLD, Way.MEMORY),
    COLD_OVER_DISK: (Way.COLD, Way.DISK),
    COLD_OVER_RESUMED: (Way.COLD, Way.RESUMED),
}
METHOD = (
    "a new prompt every round, read in every way; another way begins each round. Cold: a service that keeps nothing. "
    "Written to disk: one that keeps what it reads in memory, and writes it to a new folder meanwhile. From memory: "
    "the same service is asked again when all is on disk. These have run a short prompt before. From disk: a new "
    "process on that folder, whose first request this is. Resumed: a process is killed (SIGKILL) when half of the "
    "prompt is on disk, and a new one goes on. Times are from a request's submission to its first token: looking on "
    "disk, reading and checking files are in it, loading the model is not. Files are in the system's file cache, "
    "since they were written just before"
)


@dataclass(frozen=True)
class CacheSettings:
    """What was asked for."""

    model: str
    dtype: Dtype
    workload: CacheWorkload
    repeats: int


@dataclass(frozen=True)
class CacheRun:
    """One prompt, read in one way."""

    way: Way
    round_index: int
    answer: Answer
    expected_tokens: int  # of the prompt, that must have been in the cache
    load_s: float | None = None  # of a new process: its model's
    flushed_s: float | None = None  # where it was written: from the submission until all was on disk
    disk_bytes: int | None = None  # what was written

    @property
    def first_token_s(self) -> float:
        return self.answer.first_token_s


@dataclass(frozen=True)
class CacheResults:
    machine: Machine
    settings: CacheSettings
    file_system: str | None  # that the store's folder was on
    runs: tuple[CacheRun, ...]
    duration_s: float

    @property
    def ways(self) -> list[Way]:
        """Those that ran, from the slowest to the soonest."""
        return [way for way in Way if self.of(way)]

    def of(self, way: Way) -> list[CacheRun]:
        return [run for run in self.runs if run.way is way]

    def first_token(self, way: Way) -> Spread:
        return Spread.of(run.first_token_s for run in self.of(way))

    def figure(self, way: Way) -> Spread | None:
        """The times to the first token, where they lie close enough together to be spoken of."""
        spread = self.first_token(way)
        return None if spread.noise == "noisy" else spread

    @property
    def ratios(self) -> dict[str, Spread]:
        """By name, round by round."""
        return {
            name: Spread.of(first / second for first, second in self._paired(*ways))
            for name, ways in _RATIOS.items()
            if self._paired(*ways)
        }

    @property
    def saved_s(self) -> Spread | None:
        """By which the first token comes sooner where half was read before a kill, round by round."""
        pairs = self._paired(Way.COLD, Way.RESUMED)
        return Spread.of(cold - resumed for cold, resumed in pairs) if pairs else None

    def has_right_answer(self, run: CacheRun) -> bool:
        """Whether a prompt's tokens are those of the cold run in the same round."""
        cold = {each.round_index: each.answer.token_ids for each in self.of(Way.COLD)}
        return run.answer.token_ids == cold.get(run.round_index)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: what was measured and what follows from it. A noisy figure has no median."""
        saved = self.saved_s
        return {
            "schema": SCHEMA,
            "suite": CACHE,
            "machine": asdict(self.machine),
            "settings": asdict(self.settings),
            "method": METHOD,
            "file_system": self.file_system,
            "duration_s": self.duration_s,
            "ways": [self._way_dict(way) for way in self.ways],
            "ratios": {name: spread.to_dict() for name, spread in self.ratios.items()},
            "resumed": {
                "saved_s": None if saved is None else saved.to_dict(),
                "tokens_not_read_again": [run.answer.cached_tokens for run in self.of(Way.RESUMED)],
            },
            "runs": [
                {**asdict(run), "way": run.way.value, "is_right": self.has_right_answer(run)}
                for run in self.runs
            ],
        }

    def _way_dict(self, way: Way) -> dict[str, Any]:
        spread, figure, runs = self.first_token(way), self.figure(way), self.of(way)
        times = {"is_noisy": figure is None, "relative_spread": spread.relative, "values": spread.values}
        return {
            "way": way.value,
            "first_token_s": times if figure is None else {**times, **figure.to_dict()},
            "cached_tokens": [run.answer.cached_tokens for run in runs],
            "load_s": _known(run.load_s for run in runs),
            "flushed_s": _known(run.flushed_s for run in runs),
            "disk_bytes": _known(run.disk_bytes for run in runs),
        }

    def _paired(self, first: Way, second: Way) -> list[tuple[float, float]]:
        """Times to the first token of two ways, in every round that has both."""
        theirs = {run.round_index: run.first_token_s for run in self.of(second)}
        return [
            (run.first_token_s, theirs[run.round_index])
            for run in self.of(first)
            if run.round_index in theirs
        ]


def _known(values: Iterable[float | None]) -> list[float] | None:
    """None where nothing was measured."""
    found = [value for value in values if value is not None]
    return found or None
