"""Systems take turns on one prompt; every token is stamped as it comes."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.bench.spread import Spread
from penstock.bench.systems import System, SystemName

T = TypeVar("T")


@dataclass(frozen=True)
class Pass:
    """One prompt through one system."""

    system: SystemName
    round_index: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    first_token_s: float  # from the call to the first token
    decode_s: float | None  # from the first token to the last; None where there was no second

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.first_token_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        return None if self.decode_s is None else (len(self.token_ids) - 1) / self.decode_s


@dataclass(frozen=True)
class Turn:
    """A system, how many tokens it generates in its turn, and in how many of the rounds it has one."""

    system: System
    num_tokens: int
    num_rounds: int


def time_pass(turn: Turn, prompt: Sequence[int], round_index: int) -> Pass:
    """One turn. What earlier turns left behind is collected first, outside the time."""
    gc.collect()
    token_ids: list[int] = []
    stamps: list[float] = []

    def on_token(token: int) -> None:
        stamps.append(time.perf_counter())
        token_ids.append(token)

    started = time.perf_counter()
    turn.system.generate(prompt, turn.num_tokens, on_token)
    if len(stamps) != turn.num_tokens:
        raise RuntimeError(
            f"{turn.system.name} gave {len(stamps)} tokens where {turn.num_tokens} were asked for"
        )
    return Pass(
        system=turn.system.name,
        round_index=round_index,
        prompt_tokens=len(prompt),
        token_ids=tuple(token_ids),
        first_token_s=stamps[0] - started,
        decode_s=stamps[-1] - stamps[0] if len(stamps) > 1 else None,
    )


def rounds(items: Sequence[T], num_rounds: int) -> Iterator[list[T]]:
    """The items in every round, each round beginning with the next one."""
    for index in range(num_rounds):
        shift = index % len(items)
        yield [*items[shift:], *items[:shift]]


def take_turns(turns: Sequence[Turn], prompt: Sequence[int], on_pass: Callable[[Pass], None]) -> list[Pass]:
    """All passes, in the order they ran. Who has fewer rounds than others has the first ones."""
    passes: list[Pass] = []
    for index, order in enumerate(rounds(turns, max(turn.num_rounds for turn in turns))):
        for turn in order:
            if index < turn.num_rounds:
                passes.append(time_pass(turn, prompt, index))
                on_pass(passes[-1])
    return passes


def paired(
    passes: Sequence[Pass], ours: SystemName, theirs: SystemName, value: Callable[[Pass], float | None]
) -> Spread | None:
    """The ratio of a value of ours to theirs, round by round; None where no round has both."""
    by_round: dict[SystemName, dict[int, float]] = {ours: {}, theirs: {}}
    for each in passes:
        measured = value(each)
        if each.system in by_round and measured is not None:
            by_round[each.system][each.round_index] = measured
    shared = sorted(by_round[ours].keys() & by_round[theirs].keys())
    if not shared:
        return None
    return Spread.of(by_round[ours][index] / by_round[theirs][index] for index in shared)
