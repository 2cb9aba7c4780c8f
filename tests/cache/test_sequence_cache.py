"""Blocks and states of a sequence change together, or not at all."""

import pytest

from penstock.cache import BlockPool, Extent, SequenceCache, SequenceState, SlotPool
from penstock.errors import CacheFullError


def step(cache: SequenceCache, end: int) -> None:
    cache.reserve(cache.num_tokens, [end])
    cache.commit(end)


def test_a_step_without_room_for_its_state_takes_no_blocks() -> None:
    blocks, slots = BlockPool(4), SlotPool(1)
    cache = SequenceCache([blocks], slots)
    step(cache, 64)
    with pytest.raises(CacheFullError):
        cache.reserve(64, [128])
    assert (blocks.num_free, slots.num_free, cache.num_tokens) == (3, 0, 64)


def test_a_step_without_room_for_its_tokens_takes_no_slots() -> None:
    blocks, slots = BlockPool(1), SlotPool(2)
    cache = SequenceCache([blocks], slots)
    step(cache, 64)
    with pytest.raises(CacheFullError):
        cache.reserve(64, [65])
    assert (blocks.num_free, slots.num_free, cache.num_tokens) == (0, 1, 64)
    cache.free()
    assert (blocks.num_free, slots.num_free) == (1, 2)


def test_a_second_step_does_not_abort_the_first() -> None:
    cache = SequenceCache([BlockPool(4)], SlotPool(4))
    cache.reserve(0, [64])
    with pytest.raises(ValueError, match="accepted are 0, 64"):
        cache.reserve(32, [96])
    assert cache.num_in_flight == 1
    cache.commit(64)
    assert cache.num_tokens == 64


def test_models_without_state() -> None:
    cache = SequenceCache([BlockPool(4)])
    assert cache.reserve(0, [100]) is None
    cache.commit(100)
    assert cache.num_tokens == 100
    cache.cut(64)
    assert (cache.num_tokens, cache.blocks.num_blocks) == (64, 1)


def test_a_recurrent_state_is_cut_to_nothing_only() -> None:
    blocks, slots = BlockPool(4), SlotPool(2)
    cache = SequenceCache([blocks], slots)
    step(cache, 130)
    with pytest.raises(ValueError, match="only to 0"):
        cache.cut(64)
    assert cache.num_tokens == 130
    cache.cut(0)
    assert (cache.num_tokens, blocks.num_free, slots.num_free) == (0, 4, 2)


def shared(num_blocks: int) -> tuple[BlockPool, SlotPool, list[int], int]:
    """Pools in which somebody holds so many blocks, and the state after them."""
    blocks, slots = BlockPool(8), SlotPool(4)
    blocks.allocate(num_blocks)
    return blocks, slots, list(range(num_blocks)), slots.allocate(1)[0]


def test_adopting_goes_on_in_both() -> None:
    blocks, slots, ids, slot = shared(2)
    cache = SequenceCache([blocks], slots)
    cache.adopt([ids], slot)
    assert cache.state is not None
    assert (cache.num_tokens, cache.state.num_tokens, cache.state.slot) == (128, 128, slot)
    step = cache.reserve(128, [150])
    assert step is not None
    assert step.read == slot
    assert [write.slot for write in step.writes] != [slot]
    cache.commit(150)
    cache.free()
    assert (blocks.num_free, slots.num_free) == (6, 3)
    slots.release(slot)
    slots.check_integrity()


def test_adopting_more_replaces_the_state() -> None:
    blocks, slots, ids, slot = shared(3)
    cache = SequenceCache([blocks], slots)
    early = slots.allocate(1)[0]
    cache.adopt([ids[:1]], early)
    cache.adopt([ids[1:]], slot)
    slots.release(early)
    assert cache.state is not None
    assert (cache.state.positions, slots.num_free) == ((192,), 3)


def test_adopting_all_or_nothing() -> None:
    blocks, slots, ids, slot = shared(2)
    cache = SequenceCache([blocks], slots)
    for adopted, at, message in (
        (ids, slot + 1, "slot 1: it is free"),
        (ids, None, "the slot with the state"),
        ([], slot, "no slot"),
        ([2], slot, "block 2: it is free"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.adopt([adopted], at)
        blocks.check_integrity()
        assert cache.state is not None
        assert (cache.num_tokens, cache.blocks.num_blocks, cache.state.positions) == (0, 0, ())
    cache.adopt([[]], None)
    assert (cache.num_tokens, slots.num_free) == (0, 3)
    blocks.release([Extent(0, 2)])
    assert blocks.num_free == 8


def test_adopting_without_state() -> None:
    blocks = BlockPool(4)
    blocks.allocate(2)
    cache = SequenceCache([blocks])
    with pytest.raises(ValueError, match="no slot"):
        cache.adopt([[0, 1]], 0)
    cache.adopt([[0, 1]], None)
    assert cache.num_tokens == 128
    step(cache, 200)
    cache.cut(64)
    assert cache.blocks.block_ids == [0]


def test_a_state_is_not_adopted_backwards_or_within_a_step() -> None:
    slots = SlotPool(4)
    slot = slots.allocate(1)[0]
    state = SequenceState(slots)
    state.adopt(64, slot)
    with pytest.raises(ValueError, match="more than 64"):
        state.adopt(64, slot)
    state.reserve(64, [70])
    with pytest.raises(ValueError, match="step is reserved"):
        state.adopt(128, slot)
    state.free()
    slots.release(slot)
    assert slots.num_free == 4


def test_states_within_a_step_are_given_up_but_for_the_last() -> None:
    slots = SlotPool(4)
    state = SequenceState(slots)
    state.keep_last()
    state.reserve(0, [64, 128, 150])
    state.keep_last()
    state.commit()
    last, read = state.slots[150], state.slots[128]
    assert state.reserve(128, [160]).read == read
    state.keep_last()  # the step in flight reads one of them
    assert (state.slots, slots.num_free) == ({128: read, 150: last}, 1)
    state.abort()
    state.keep_last()
    assert (state.slots, slots.num_free) == ({150: last}, 3)
