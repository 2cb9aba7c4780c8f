"""Everything that a comparison measured, and what follows from it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from penstock.bench.peers_process import Answered
from penstock.bench.peers_workload import PEERS, Candidate, PeerSystem, PeerWorkload, Quantity
from penstock.bench.spread import Spread
from penstock.measure.machine import Machine

SCHEMA = 1
METHOD = (
    "every engine in a process of its own, in its own environment, on the same token ids; one computes at a time; "
    "after a warm-up all take turns, in another order each round; each engine stamps its tokens itself, from the "
    "call to the token; prefill: prompt tokens over the time to the first token; decode: tokens after the first over "
    "their time; ratios are formed round by round, and their median is compared with the bar"
)


@dataclass(frozen=True)
class PeerSettings:
    """What was asked for."""

    model: str
    dtype: str
    num_threads: int
    workload: PeerWorkload
    weights: str | None = None  # the form in which Penstock keeps them; None: its own choice


@dataclass(frozen=True)
class Trial:
    """A candidate's settings tried before the rounds; of several passes, the best."""

    candidate: Candidate
    prompt_tokens: int
    first_token_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True)
class Choice:
    """With which settings a system runs at a length; `decode` is None where it does not decode."""

    system: PeerSystem
    prompt_tokens: int
    prefill: Candidate
    decode: Candidate | None


@dataclass(frozen=True)
class Sample:
    """One turn. `quantities` are those it counts for: where settings differ between them, there are two turns."""

    index: int  # of all turns, in the order they ran
    round_index: int
    system: PeerSystem
    prompt_tokens: int
    candidate: Candidate
    quantities: tuple[Quantity, ...]
    answered: Answered

    def speed(self, quantity: Quantity) -> float | None:
        """In tokens/s; None where it does not count for that."""
        if quantity not in self.quantities:
            return None
        if quantity == "prefill":
            return self.prompt_tokens / self.answered.first_token_s
        return self.answered.decode_tokens_per_s


@dataclass(frozen=True)
class PeerResults:
    machine: Machine
    settings: PeerSettings
    about: Mapping[str, str]  # by engine: its version
    left_out: Mapping[str, str]  # by system: why it was not measured
    trials: tuple[Trial, ...]
    choices: tuple[Choice, ...]
    samples: tuple[Sample, ...]
    duration_s: float
    weights: Mapping[str, str] = field(default_factory=dict)  # by engine that tells: how they lay in memory

    @cached_property
    def systems(self) -> list[PeerSystem]:
        measured = {sample.system for sample in self.samples}
        return [system for system in PeerSystem if system in measured]

    def speed(self, system: PeerSystem, prompt_tokens: int, quantity: Quantity) -> Spread | None:
        by_round = self._by_round(system, prompt_tokens, quantity)
        return Spread.of(by_round.values()) if by_round else None

    def ratio(
        self, ours: PeerSystem, theirs: PeerSystem, prompt_tokens: int, quantity: Quantity
    ) -> Spread | None:
        """Our speed over theirs, round by round; None where no round has both."""
        our, their = (self._by_round(each, prompt_tokens, quantity) for each in (ours, theirs))
        shared = sorted(our.keys() & their.keys())
        return Spread.of(our[index] / their[index] for index in shared) if shared else None

    def num_agreed(self, system: PeerSystem, prompt_tokens: int) -> tuple[int, int] | None:
        """How many tokens from the first on are Penstock's too, of how many; None where one gave no answer."""
        ours, theirs = (self._answer(each, prompt_tokens) for each in (PeerSystem.PENSTOCK, system))
        if not ours or not theirs:
            return None
        most = min(len(ours), len(theirs))
        equal = next((index for index in range(most) if ours[index] != theirs[index]), most)
        return equal, most

    def _answer(self, system: PeerSystem, prompt_tokens: int) -> tuple[int, ...]:
        answers = [
            sample.answered.token_ids
            for sample in self.samples
            if sample.system is system and sample.prompt_tokens == prompt_tokens
        ]
        return max(answers, key=len, default=())

    def _by_round(self, system: PeerSystem, prompt_tokens: int, quantity: Quantity) -> dict[int, float]:
        return {
            sample.round_index: speed
            for sample in self.samples
            if sample.system is system
            and sample.prompt_tokens == prompt_tokens
            and (speed := sample.speed(quantity)) is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        workload = self.settings.workload
        quantities: tuple[Quantity, ...] = ("prefill", "decode")
        return {
            "schema": SCHEMA,
            "suite": PEERS,
            "method": METHOD,
            "machine": asdict(self.machine),
            "settings": asdict(self.settings),
            "engines": dict(self.about),
            "weights": dict(self.weights),
            "left_out": dict(self.left_out),
            "duration_s": self.duration_s,
            "choices": [_choice_dict(choice) for choice in self.choices],
            "speeds": [
                {
                    "system": system.value,
                    "quantity": quantity,
                    "prompt_tokens": length,
                    "tokens_per_s": spread.to_dict(),
                }
                for quantity in quantities
                for system in self.systems
                for length in workload.lengths
                if (spread := self.speed(system, length, quantity)) is not None
            ],
            "trials": [
                {
                    "settings": trial.candidate.label,
                    "prompt_tokens": trial.prompt_tokens,
                    "first_token_s": trial.first_token_s,
                    "decode_tokens_per_s": trial.decode_tokens_per_s,
                }
                for trial in self.trials
            ],
            "turns": [_sample_dict(sample) for sample in self.samples],
        }


def _choice_dict(choice: Choice) -> dict[str, Any]:
    return {
        "system": choice.system.value,
        "prompt_tokens": choice.prompt_tokens,
        "prefill": choice.prefill.label,
        "decode": None if choice.decode is None else choice.decode.label,
    }


def _sample_dict(sample: Sample) -> dict[str, Any]:
    return {
        "index": sample.index,
        "round": sample.round_index,
        "system": sample.system.value,
        "prompt_tokens": sample.prompt_tokens,
        "settings": sample.candidate.label,
        "counts_for": list(sample.quantities),
        "token_ids": list(sample.answered.token_ids),
        "stamps_s": [round(stamp, 6) for stamp in sample.answered.stamps_s],
    }
