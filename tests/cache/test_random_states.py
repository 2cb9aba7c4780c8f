"""Random lives of several sequences with snapshots in one small pool, against an oracle that knows every token.

A state is computed as a model does it: from the slot that the step reads and the tokens that it runs. So a slot that
is reused too early is seen in every state after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.cache import EMPTY, SequenceState, SlotPool, StateStep
from penstock.cache.tensors import RecurrentCache, RecurrentSpec
from penstock.errors import CacheFullError

SPEC = RecurrentSpec(
    num_layers=2, conv_tail=3, conv_size=1, num_heads=1, key_dim=1, value_dim=2, dtype=torch.float32
)
NUM_SEQUENCES = 3
MAX_DEPTH = 4  # steps of a sequence in flight
MODULUS = 16_777_213  # a prime below 2**24, so that every stamp is a float32


def stamp_after(stamp: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        stamp = (stamp * 31 + token) % MODULUS
    return stamp


def run(cache: RecurrentCache, step: StateStep, start: int, tokens: Sequence[int]) -> None:
    """Run `tokens`, those from `start` on: each state from the one before it, the first from the slot read."""
    for layer in range(SPEC.num_layers):
        tail = [int(value) for value in cache.layer(layer).tail(step.read).flatten()]
        stamp = int(cache.layer(layer).matrix(step.read).flatten()[0])
        done = start
        for write in step.writes:
            part = [token + layer for token in tokens[done - start : write.end - start]]
            tail, stamp, done = [*tail, *part][-3:], stamp_after(stamp, part), write.end
            cache.layer(layer).tail_out(write.slot).copy_(torch.tensor(tail).unsqueeze(1))
            cache.layer(layer).matrix_out(write.slot).copy_(torch.tensor([[[stamp, -stamp]]]))


def check_state(cache: RecurrentCache, slot: int, tokens: Sequence[int]) -> None:
    """The slot holds the state after exactly these tokens."""
    for layer in range(SPEC.num_layers):
        shifted = [token + layer for token in tokens]
        stamp = stamp_after(0, shifted)
        assert cache.layer(layer).tail(slot).flatten().tolist() == [0, 0, 0, *shifted][-3:]
        assert cache.layer(layer).matrix(slot).flatten().tolist() == [stamp, -stamp]


@dataclass(frozen=True, eq=False)
class InFlight:
    """A step that is reserved and written, and all tokens of the sequence once it is committed."""

    step: StateStep
    tokens: list[int]

    @property
    def slots(self) -> dict[int, int]:
        return {write.end: write.slot for write in self.step.writes}


@dataclass(eq=False)
class Life:
    """A sequence, its committed tokens, the slots that it should hold, and its steps in flight."""

    state: SequenceState
    tokens: list[int] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)  # position -> slot
    steps: list[InFlight] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Held:
    """A slot that another owner holds, and the tokens whose state it should be."""

    slot: int
    tokens: tuple[int, ...]


class StateMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(2, 14), pinned=st.integers(0, 2))
    def start(self, num_slots: int, pinned: int) -> None:
        """Slots that others hold throughout are never the sequences'."""
        self.pool = SlotPool(num_slots)
        self.cache = RecurrentCache(SPEC, num_slots)
        self.lives = [Life(SequenceState(self.pool)) for _ in range(NUM_SEQUENCES)]
        self.held: list[Held] = []
        self.pinned = self.pool.allocate(min(pinned, num_slots - 1))
        self.next_token = 1

    def draw_life(self, data: st.DataObject, in_step: bool | None = False) -> Life | None:
        lives = [life for life in self.lives if in_step is None or bool(life.steps) == in_step]
        return data.draw(st.sampled_from(lives)) if lives else None

    def draw_held(self, data: st.DataObject) -> Held:
        return self.held[data.draw(st.integers(0, len(self.held) - 1))]

    def slots_in_use(self) -> set[int]:
        slots = {*self.pinned, *(held.slot for held in self.held)}
        for life in self.lives:
            slots.update(life.slots.values())
            for flying in life.steps:
                slots.update(flying.slots.values())
        return slots - {EMPTY}

    @rule(data=st.data(), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4))
    def begin_step(self, data: st.DataObject, lengths: list[int]) -> None:
        """Reserve and write, behind steps in flight. Reserving must work exactly when there are enough slots, else
        change nothing."""
        life = self.draw_life(data, in_step=None)
        if life is None or len(life.steps) == MAX_DEPTH:
            return
        known = life.steps[-1].slots if life.steps else life.slots
        before = life.steps[-1].tokens if life.steps else life.tokens
        begin = data.draw(st.sampled_from([0, *known]))
        ends = [begin + sum(lengths[: index + 1]) for index in range(len(lengths))]
        in_use, num_free = self.slots_in_use(), self.pool.num_free
        if not self.pool.can_allocate(len(ends)):
            with pytest.raises(CacheFullError):
                life.state.reserve(begin, ends)
            assert self.pool.num_free == num_free
            return
        step = life.state.reserve(begin, ends)
        assert step.read == known.get(begin, EMPTY)
        assert [write.end for write in step.writes] == ends
        slots = {write.slot for write in step.writes}
        assert len(slots) == len(ends)
        assert not slots & in_use
        num_new = max(0, ends[-1] - len(before))
        # An overlap runs the tokens that it has; new ones are like no others.
        tokens = before[: ends[-1]] + [self.next_token + index for index in range(num_new)]
        self.next_token += num_new
        life.steps.append(InFlight(step, tokens))
        run(self.cache, step, begin, tokens[begin:])

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        life = self.draw_life(data, in_step=True)
        if life is None:
            return
        life.state.commit()
        oldest = life.steps.pop(0)
        life.tokens, life.slots = oldest.tokens, oldest.slots

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        life = self.draw_life(data, in_step=True)
        if life is not None:
            life.state.withdraw()
            life.steps.pop()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        life = self.draw_life(data, in_step=None)
        if life is not None:
            life.state.abort()
            life.steps.clear()

    @rule(data=st.data())
    def keep_last(self, data: st.DataObject) -> None:
        life = self.draw_life(data, in_step=None)
        if life is not None:
            life.state.keep_last()
            read = life.steps[0].step.read if life.steps else None
            last = len(life.tokens)
            life.slots = {at: slot for at, slot in life.slots.items() if at == last or slot == read}

    @rule(data=st.data())
    def take_snapshot(self, data: st.DataObject) -> None:
        life = self.draw_life(data, in_step=None)
        if life is not None and life.tokens:
            num_free = self.pool.num_free
            self.pool.retain(life.state.slot)
            self.held.append(Held(life.state.slot, tuple(life.tokens)))
            assert self.pool.num_free == num_free

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_snapshot(self, data: st.DataObject) -> None:
        held = self.draw_held(data)
        self.held.remove(held)
        self.pool.release(held.slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """Go on from a state that is further on, or begin again and go on from any."""
        life, held = self.draw_life(data), self.draw_held(data)
        if life is not None:
            if len(held.tokens) <= len(life.tokens):
                with pytest.raises(ValueError, match="cannot adopt"):
                    life.state.adopt(len(held.tokens), held.slot)
                life.state.free()
            life.state.adopt(len(held.tokens), held.slot)
            life.tokens = list(held.tokens)
            life.slots = {len(held.tokens): held.slot}

    @rule(data=st.data(), use_again=st.booleans())
    def free(self, data: st.DataObject, use_again: bool) -> None:
        life = self.draw_life(data, in_step=None)
        if life is not None:
            life.state.free()
            life.state.free()
            state = life.state if use_again else SequenceState(self.pool)
            self.lives[self.lives.index(life)] = Life(state)

    @invariant()
    def every_slot_is_free_or_owned(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_slots - len(self.slots_in_use())

    @invariant()
    def sequences_stand_where_they_should(self) -> None:
        for life in self.lives:
            assert life.state.num_tokens == len(life.tokens)
            assert life.state.positions == tuple(life.slots)
            assert life.state.slot == life.slots.get(len(life.tokens), EMPTY)

    @invariant()
    def every_state_that_is_held_reads_back(self) -> None:
        for life in self.lives:
            for position, slot in life.slots.items():
                check_state(self.cache, slot, life.tokens[:position])
            for flying in life.steps:
                for position, slot in flying.slots.items():
                    check_state(self.cache, slot, flying.tokens[:position])
        for held in self.held:
            check_state(self.cache, held.slot, held.tokens)
        check_state(self.cache, EMPTY, [])

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for life in self.lives:
            life.state.free()
        for held in self.held:
            self.pool.release(held.slot)
        for slot in self.pinned:
            self.pool.release(slot)
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_slots
        assert sorted(self.pool.allocate(self.pool.num_slots)) == list(range(self.pool.num_slots))


StateMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestStatesUnderRandomOperations = StateMachine.TestCase


@settings(deadline=None, max_examples=100)
@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=10),
    overlap=st.integers(0, 8),
    data=st.data(),
)
def test_chunks_that_overlap_or_fail_end_in_the_state_of_the_whole(
    chunks: list[int], overlap: int, data: st.DataObject
) -> None:
    """Each step keeps the state where the next one will begin; a pool of four slots is enough for that."""
    tokens = list(range(1, sum(chunks) + 1))
    pool = SlotPool(4)
    cache, state = RecurrentCache(SPEC, 4), SequenceState(pool)
    begin = end = 0
    for chunk in chunks:
        end += chunk
        next_begin = max(begin + 1, end - overlap)
        ends = sorted({next_begin, end})
        for _ in range(data.draw(st.integers(0, 2))):
            failed = state.reserve(begin, ends)
            run(cache, failed, begin, [0] * (end - begin))
            state.abort()
        run(cache, state.reserve(begin, ends), begin, tokens[begin:end])
        state.commit()
        begin = next_begin
    assert state.num_tokens == len(tokens)
    check_state(cache, state.slot, tokens)
    state.free()
    assert pool.num_free == 4
