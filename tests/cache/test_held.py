"""Blocks and states of a sequence change together, or not at all."""

import pytest

from penstock.cache import BlockPool, SequenceCache, SlotPool
from penstock.errors import CacheFullError


def step(cache: SequenceCache, end: int) -> None:
    cache.reserve(cache.num_tokens, [end])
    cache.commit(end)


def test_a_step_without_room_for_its_state_takes_no_blocks() -> None:
    blocks, slots = BlockPool(4), SlotPool(1)
    cache = SequenceCache(blocks, slots)
    step(cache, 64)
    with pytest.raises(CacheFullError):
        cache.reserve(64, [128])
    assert (blocks.num_free, slots.num_free, cache.num_tokens) == (3, 0, 64)


def test_a_step_without_room_for_its_tokens_takes_no_slots() -> None:
    blocks, slots = BlockPool(1), SlotPool(2)
    cache = SequenceCache(blocks, slots)
    step(cache, 64)
    with pytest.raises(CacheFullError):
        cache.reserve(64, [65])
    assert (blocks.num_free, slots.num_free, cache.num_tokens) == (0, 1, 64)
    cache.free()
    assert (blocks.num_free, slots.num_free) == (1, 2)


def test_a_second_step_does_not_abort_the_first() -> None:
    cache = SequenceCache(BlockPool(4), SlotPool(4))
    cache.reserve(0, [64])
    with pytest.raises(ValueError, match="step is reserved"):
        cache.reserve(0, [32])
    cache.commit(64)
    assert cache.num_tokens == 64


def test_restore_goes_back_in_both() -> None:
    blocks, slots = BlockPool(4), SlotPool(4)
    cache = SequenceCache(blocks, slots)
    step(cache, 64)
    snapshot = cache.snapshot()
    assert cache.state is not None
    slot = cache.state.slot
    step(cache, 200)
    cache.restore(snapshot)
    assert (cache.num_tokens, cache.state.num_tokens, cache.state.slot) == (64, 64, slot)
    assert blocks.num_free == 3
    snapshot.release()
    cache.free()
    assert slots.num_free == 4


def test_a_snapshot_beyond_a_return_is_refused() -> None:
    """Other tokens may have been written since where its keys and values were."""
    cache = SequenceCache(BlockPool(4), SlotPool(6))
    step(cache, 50)
    early = cache.snapshot()
    step(cache, 100)
    late = cache.snapshot()
    cache.restore(early)
    step(cache, 150)
    with pytest.raises(ValueError, match="went back to 50"):
        cache.restore(late)
    assert cache.num_tokens == 150
    cache.restore(early)


def test_models_without_state() -> None:
    blocks = BlockPool(4)
    cache = SequenceCache(blocks)
    assert cache.reserve(0, [100]) is None
    cache.commit(100)
    snapshot = cache.snapshot()
    step(cache, 200)
    cache.restore(snapshot)
    assert cache.num_tokens == 100
    with_state = SequenceCache(BlockPool(4), SlotPool(1))
    step(with_state, 100)
    with pytest.raises(ValueError, match="another model"):
        with_state.restore(snapshot)
