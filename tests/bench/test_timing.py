"""Turns, and ratios between those of the same round."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.systems import OnToken, SystemName
from penstock.bench.timing import Pass, Turn, paired, rounds, take_turns

OURS, THEIRS = SystemName.PENSTOCK, SystemName.TRANSFORMERS


class Counting:
    """Gives the tokens 0, 1, 2, ...; notes that it ran."""

    def __init__(self, name: SystemName, log: list[SystemName], missing: int = 0) -> None:
        self.name = name
        self._log = log
        self._missing = missing

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> int:
        self._log.append(self.name)
        for token in range(num_tokens - self._missing):
            on_token(token)
        return 0


@given(num_items=st.integers(1, 6), num_rounds=st.integers(1, 12))
def test_each_round_has_all_and_each_begins_in_turn(num_items: int, num_rounds: int) -> None:
    items = list(range(num_items))
    orders = list(rounds(items, num_rounds))
    assert len(orders) == num_rounds
    assert all(sorted(order) == items for order in orders)
    assert [order[0] for order in orders] == [index % num_items for index in range(num_rounds)]


def test_passes_say_who_and_when() -> None:
    log: list[SystemName] = []
    told: list[Pass] = []
    turns = [Turn(Counting(OURS, log), 4, 3), Turn(Counting(THEIRS, log), 1, 3)]
    passes = take_turns(turns, [1] * 10, told.append)
    assert log == [OURS, THEIRS, THEIRS, OURS, OURS, THEIRS]
    assert told == passes
    assert [each.round_index for each in passes] == [0, 0, 1, 1, 2, 2]
    for each in passes:
        assert each.prompt_tokens == 10
        assert each.first_token_s > 0
        assert each.token_ids == ((0, 1, 2, 3) if each.system is OURS else (0,))
        assert (each.decode_tokens_per_s is None) == (each.system is THEIRS)


def test_who_has_fewer_rounds_has_the_first() -> None:
    log: list[SystemName] = []
    turns = [Turn(Counting(OURS, log), 1, 4), Turn(Counting(THEIRS, log), 1, 2)]
    passes = take_turns(turns, [1], lambda done: None)
    assert log == [OURS, THEIRS, THEIRS, OURS, OURS, OURS]
    assert [each.round_index for each in passes if each.system is THEIRS] == [0, 1]
    spread = paired(passes, OURS, THEIRS, lambda each: each.first_token_s)
    assert spread is not None
    assert len(spread.values) == 2


def test_speeds() -> None:
    timed = Pass(OURS, 0, 100, (1, 2, 3), first_token_s=0.5, decode_s=0.25)
    assert timed.prefill_tokens_per_s == 200
    assert timed.decode_tokens_per_s == 8


def test_a_system_that_stops_early_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="3 tokens where 4"):
        take_turns([Turn(Counting(OURS, [], missing=1), 4, 1)], [1], lambda done: None)


@given(
    times=st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=1, max_size=6), data=st.data()
)
def test_ratios_pair_the_passes_of_a_round(times: list[tuple[float, float]], data: st.DataObject) -> None:
    passes = [
        Pass(name, index, 10, (1,), seconds, None)
        for index, pair in enumerate(times)
        for name, seconds in zip((OURS, THEIRS), pair, strict=True)
    ]
    shuffled = data.draw(st.permutations(passes))
    spread = paired(shuffled, OURS, THEIRS, lambda each: each.first_token_s)
    assert spread is not None
    assert spread.values == tuple(ours / theirs for ours, theirs in times)


def test_no_ratio_without_a_partner() -> None:
    passes = [Pass(OURS, 0, 10, (1,), 1.0, None), Pass(THEIRS, 1, 10, (1,), 1.0, None)]
    assert paired(passes, OURS, THEIRS, lambda each: each.first_token_s) is None
    assert paired(passes, OURS, OURS, lambda each: each.decode_tokens_per_s) is None
