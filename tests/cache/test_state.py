import subprocess
import sys

import pytest

from penstock.cache import EMPTY, SequenceState, SlotPool, StateStep, StateWrite
from penstock.errors import CacheFullError


def standing_at(pool: SlotPool, *positions: int) -> SequenceState:
    """A sequence that keeps its states at these positions."""
    state = SequenceState(pool)
    state.reserve(0, positions)
    state.commit()
    return state


def test_a_new_sequence_is_empty_and_holds_nothing() -> None:
    pool = SlotPool(2)
    state = SequenceState(pool)
    assert (state.num_tokens, state.slot, state.positions) == (0, EMPTY, ())
    assert pool.num_free == 2


def test_a_step_reads_the_state_where_it_begins_and_writes_free_slots() -> None:
    pool = SlotPool(8)
    state = SequenceState(pool)
    assert state.reserve(0, [64, 100]) == StateStep(EMPTY, (StateWrite(64, 0), StateWrite(100, 1)))
    state.commit()
    assert (state.num_tokens, state.slot, state.positions) == (100, 1, (64, 100))
    assert state.reserve(100, [101]) == StateStep(1, (StateWrite(101, 2),))
    state.commit()
    assert (state.num_tokens, state.slot, state.positions) == (101, 2, (101,))
    assert pool.num_free == 7


def test_decoding_takes_turns_between_two_slots() -> None:
    """Double buffering: whatever the length, one state and the one that is being written."""
    pool = SlotPool(2)
    state = SequenceState(pool)
    for token in range(20):
        step = state.reserve(token, [token + 1])
        assert step.read == state.slot != step.writes[0].slot
        state.commit()
    assert pool.num_free == 1


def test_a_chunk_that_overlaps_begins_with_the_state_kept_there() -> None:
    pool = SlotPool(4)
    state = SequenceState(pool)
    first = state.reserve(0, [48, 64])
    state.commit()
    second = state.reserve(48, [96, 112])
    assert second.read == first.writes[0].slot
    assert not {write.slot for write in first.writes} & {write.slot for write in second.writes}
    state.commit()
    assert state.positions == (96, 112)
    assert pool.num_free == 2


def test_a_step_may_always_begin_again_at_token_0() -> None:
    state = standing_at(SlotPool(4), 10)
    assert state.reserve(0, [20]).read == EMPTY
    state.abort()
    assert state.positions == (10,)


def test_until_it_is_committed_a_step_changes_nothing() -> None:
    pool = SlotPool(5)
    state = standing_at(pool, 10, 20)
    before = (state.num_tokens, state.slot, state.positions)
    state.reserve(20, [30, 40])
    assert (state.num_tokens, state.slot, state.positions) == before
    assert pool.num_free == 1
    state.abort()
    assert (state.num_tokens, state.slot, state.positions) == before
    assert pool.num_free == 3
    state.abort()  # nothing is reserved: nothing to do
    assert pool.num_free == 3
    assert state.reserve(10, [30]).read == 0


def test_a_reserve_that_fails_changes_nothing() -> None:
    pool = SlotPool(4)
    state = standing_at(pool, 10, 20)
    with pytest.raises(CacheFullError, match="3 slots wanted, 2 free of 4"):
        state.reserve(20, [30, 40, 50])
    assert state.positions == (10, 20)
    assert pool.num_free == 2
    state.reserve(20, [30, 40])  # no step was left behind


@pytest.mark.parametrize("start", [-1, 1, 15, 21])
def test_a_step_begins_only_where_a_state_is_kept(start: int) -> None:
    pool = SlotPool(4)
    state = standing_at(pool, 10, 20)
    with pytest.raises(ValueError, match=f"begin a step at token {start}: .* 0, 10, 20$"):
        state.reserve(start, [100])
    assert pool.num_free == 2


@pytest.mark.parametrize("ends", [[], [10], [9], [30, 30], [30, 20], [-1]])
def test_states_are_kept_only_at_ascending_positions_after_the_start(ends: list[int]) -> None:
    pool = SlotPool(4)
    state = standing_at(pool, 10)
    with pytest.raises(ValueError, match="ascending, above 10"):
        state.reserve(10, ends)
    assert pool.num_free == 3


def test_nothing_moves_under_a_step() -> None:
    pool = SlotPool(5)
    state = standing_at(pool, 10, 20)
    step = state.reserve(20, [30])
    with pytest.raises(ValueError, match="a step is reserved; commit or abort it first"):
        state.adopt(40, step.read)
    assert pool.num_free == 2
    state.commit()
    assert state.slot == step.writes[0].slot
    with pytest.raises(ValueError, match="no step is reserved"):
        state.commit()
    with pytest.raises(ValueError, match="none is reserved"):
        state.withdraw()


def test_a_slot_with_another_owner_outlives_its_sequence() -> None:
    pool = SlotPool(3)
    state = standing_at(pool, 10)
    pinned = state.slot
    pool.retain(pinned)
    assert pool.num_free == 2
    state.reserve(10, [20])
    state.commit()
    state.free()
    assert pool.num_free == 2
    assert pool.allocate(2) == (1, 2)  # not the pinned one
    pool.release(pinned)
    assert pool.num_free == 1


def test_a_state_is_adopted_by_several_sequences() -> None:
    pool = SlotPool(4)
    origin = standing_at(pool, 10)
    others = [SequenceState(pool), standing_at(pool, 5)]
    for state in others:
        state.adopt(10, origin.slot)
        assert (state.num_tokens, state.positions) == (10, (10,))
    assert {state.slot for state in others} == {origin.slot}
    assert pool.num_free == 3
    for state in (origin, *others):
        step = state.reserve(10, [11])
        assert step.read == 0 != step.writes[0].slot
    assert pool.num_free == 0
    for state in (origin, *others):
        state.commit()
    assert pool.num_free == 1


def test_free_gives_a_reserved_step_back_too_and_the_sequence_may_be_used_again() -> None:
    pool = SlotPool(4)
    state = SequenceState(pool)
    for _ in range(3):
        state.reserve(0, [10, 20])
        state.commit()
        state.reserve(20, [30, 40])
        state.free()
        state.free()
        assert (state.num_tokens, state.slot, state.positions) == (0, EMPTY, ())
        assert pool.num_free == 4
        pool.check_integrity()


def test_state_accounting_needs_no_torch() -> None:
    code = "import sys, penstock.cache.states; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
