"""A cache with several K/V groups: each has its own shape and its own pool, and a sequence holds them together."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import BLOCK_TOKENS, BlockPool, Extent, SequenceCache, SlotPool
from penstock.cache.space import CacheSpace
from penstock.cache.store.block_store import StoredState
from penstock.cache.tensors import KV, CacheSpec, CacheTensors
from penstock.cache.transfer import copy_in, copy_out, copy_state_in, copy_state_out
from penstock.errors import CacheFullError
from tests.cache.storing import GROUPS, PLAIN, bytes_in, keys_of, open_store

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    cache_spec: CacheSpec
    device: torch.device = CPU

    @property
    def has_state(self) -> bool:
        return self.cache_spec.recurrent is not None


def tokens_of(layer: KV, start: int, end: int) -> torch.Tensor:
    """What a layer's keys of tokens [start, end) are in these tests; values are the next numbers, of fewer elements
    maybe."""
    shape = layer.keys.shape[1:]
    numbers = (torch.arange(start, end) % 127).to(layer.keys.dtype)
    return numbers.view(-1, 1, 1).expand(-1, *shape)


def write(space: CacheSpace, cache: SequenceCache, start: int, end: int) -> None:
    for group, blocks in enumerate(cache.kv_groups):
        for index, layer in enumerate(space.tensors.kv_groups[group].layers):
            assert space.tensors.layer(group, index) is layer
            keys = tokens_of(layer, start, end)
            layer.write(blocks.locate(start, end), keys, keys[..., : layer.values.shape[-1]] + 1)


def check(space: CacheSpace, cache: SequenceCache) -> None:
    for blocks, tensors in zip(cache.kv_groups, space.tensors.kv_groups, strict=True):
        assert blocks.num_tokens == cache.num_tokens
        for layer in tensors.layers:
            read = layer.read(blocks.locate(0, cache.num_tokens))
            expected = tokens_of(layer, 0, cache.num_tokens)
            assert torch.equal(read.keys, expected)
            assert torch.equal(read.values, expected[..., : read.values.shape[-1]] + 1)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_groups_grow_shrink_and_go_together(data: st.DataObject) -> None:
    """The second pool is in pieces, so its blocks have other numbers than the first's."""
    space = CacheSpace.for_tokens(Model(GROUPS), 12 * BLOCK_TOKENS, num_slots=3)
    assert [pool.num_blocks for pool in space.pools] == [12, 12]
    space.pools[1].allocate(12)
    space.pools[1].release([Extent(block, block + 1) for block in range(0, 12, 2)])
    cache = space.new_sequence()
    for _ in range(data.draw(st.integers(1, 8))):
        start = cache.num_tokens
        end = start + data.draw(st.integers(1, 200))
        before = [blocks.num_blocks for blocks in cache.kv_groups]
        if end > 6 * BLOCK_TOKENS:  # the first group has room for it
            with pytest.raises(CacheFullError):
                cache.reserve(start, [end])
            assert [blocks.num_blocks for blocks in cache.kv_groups] == before
            assert cache.num_in_flight == 0
            continue
        cache.reserve(start, [end])
        write(space, cache, start, end)
        if data.draw(st.booleans()):
            cache.commit(end)
        else:
            cache.abort()
            assert [blocks.num_blocks for blocks in cache.kv_groups] == before
        check(space, cache)
        for pool in space.pools:
            pool.check_integrity()
    cache.free()
    assert [pool.num_free for pool in space.pools] == [12, 6]
    assert space.slots is not None
    assert space.slots.num_free == 3


def test_a_group_without_room_takes_nothing_of_the_others() -> None:
    pools, slots = [BlockPool(8), BlockPool(2)], SlotPool(2)
    cache = SequenceCache(pools, slots)
    with pytest.raises(CacheFullError):
        cache.reserve(0, [3 * BLOCK_TOKENS])
    assert ([pool.num_free for pool in pools], slots.num_free) == ([8, 2], 2)
    cache.reserve(0, [BLOCK_TOKENS])
    with pytest.raises(CacheFullError):  # the step in flight keeps its blocks
        cache.reserve(BLOCK_TOKENS, [3 * BLOCK_TOKENS])
    assert ([pool.num_free for pool in pools], slots.num_free) == ([7, 1], 1)
    cache.commit(BLOCK_TOKENS)


def test_all_groups_are_adopted_or_none() -> None:
    pools = [BlockPool(4), BlockPool(4)]
    pools[0].allocate(2)
    pools[1].allocate(4)
    pools[1].release([Extent(0, 2)])
    cache = SequenceCache(pools)
    for blocks, message in (
        ([[0, 1], [1, 2]], "block 1: it is free"),
        ([[0, 1], [2]], "as many"),
        ([[0]], "as many"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.adopt(blocks, None)
        assert [group.num_blocks for group in cache.kv_groups] == [0, 0]
    cache.adopt([[0, 1], [3, 2]], None)
    assert [group.block_ids for group in cache.kv_groups] == [[0, 1], [3, 2]]
    assert cache.num_tokens == 128


def test_a_cut_is_of_all_groups_or_none() -> None:
    pools = [BlockPool(4), BlockPool(4)]
    cache = SequenceCache(pools)
    cache.reserve(0, [128])
    cache.commit(128)
    pools[1].reclaim = lambda number: None
    pools[1].keep(1)  # shared: it is not written over
    with pytest.raises(ValueError, match=r"block 1, which has tokens \[64, 128\), is shared"):
        cache.cut(100)
    assert [group.num_tokens for group in cache.kv_groups] == [128, 128]
    cache.cut(64)
    assert [group.num_blocks for group in cache.kv_groups] == [1, 1]


def test_room_is_asked_of_every_group() -> None:
    space = CacheSpace.for_tokens(Model(GROUPS), 4 * BLOCK_TOKENS, num_slots=2)
    assert space.has_room(4 * BLOCK_TOKENS, 2)
    assert not space.has_room(4 * BLOCK_TOKENS, 3)
    assert not space.has_room(4 * BLOCK_TOKENS + 1, 2)
    space.pools[1].allocate(1)
    assert not space.has_room(4 * BLOCK_TOKENS, 2)
    assert space.has_room(3 * BLOCK_TOKENS, 2)
    plain = CacheSpace.for_tokens(Model(PLAIN), 64)
    assert plain.slots is None
    assert plain.has_room(64, 100)


def test_bytes_are_the_sum_over_groups() -> None:
    first, second = GROUPS.kv_groups
    per_token = 2 * 2 * 3 * 2 + 3 * 2 * (8 + 5) * 4
    assert first.bytes_per_token + second.bytes_per_token == GROUPS.bytes_per_token == per_token
    assert GROUPS.recurrent is not None
    assert GROUPS.bytes_per_slot == GROUPS.recurrent.bytes_per_slot
    assert PLAIN.bytes_per_slot == 0
    assert GROUPS.num_bytes(5, 3) == 5 * 64 * per_token + 3 * GROUPS.bytes_per_slot
    tensors = CacheTensors.of(GROUPS, [5, 5], 3, CPU)
    assert tensors.num_bytes == GROUPS.num_bytes(5, 3)
    assert tensors.state_bytes == 3 * GROUPS.bytes_per_slot
    plain = CacheTensors.of(PLAIN, [2], 0, CPU)
    assert (plain.num_bytes, plain.state_bytes) == (PLAIN.num_bytes(2, 7), 0)


def test_the_first_group_is_asked_for_without_its_number() -> None:
    space = CacheSpace.for_tokens(Model(GROUPS), 64)
    sequence = space.new_sequence()
    assert GROUPS.kv is GROUPS.kv_groups[0]
    assert space.tensors.kv is space.tensors.kv_groups[0]
    assert space.blocks is space.pools[0]
    assert sequence.blocks is sequence.kv_groups[0]


def test_groups_go_to_disk_and_come_back(tmp_path: Path) -> None:
    """From one cache by a store into another, where the blocks have other numbers."""
    keys = keys_of(3)
    space = CacheSpace.for_tokens(Model(GROUPS), 8 * BLOCK_TOKENS)
    cache = space.new_sequence()
    step = cache.reserve(0, [3 * BLOCK_TOKENS])
    assert step is not None
    write(space, cache, 0, 3 * BLOCK_TOKENS)
    for layer in space.tensors.states.layers:
        layer.tail_out(step.writes[0].slot).fill_(3)
        layer.matrix_out(step.writes[0].slot).fill_(4)
    cache.commit(3 * BLOCK_TOKENS)
    assert cache.state is not None
    store = open_store(tmp_path, GROUPS)
    blocks = [group.block_ids for group in cache.kv_groups]
    assert store.put_blocks(0, keys, copy_out(space.tensors, blocks))
    store.put_state(3, keys[-1], StoredState(*copy_state_out(space.tensors, cache.state.slot)))
    assert store.flush(60)

    other = CacheSpace.for_tokens(Model(GROUPS), 8 * BLOCK_TOKENS)
    other.pools[0].allocate(1)
    other.pools[1].allocate(4)
    again = other.new_sequence()
    step = again.reserve(0, [3 * BLOCK_TOKENS])
    assert step is not None
    found = store.find(keys, 0, needs_state=True)
    assert found is not None
    assert found.state is not None
    with closing(found):
        copy_in(other.tensors, [group.block_ids for group in again.kv_groups], found.blocks)
        copy_state_in(other.tensors, step.writes[0].slot, found.state)
    again.commit(3 * BLOCK_TOKENS)
    check(other, again)
    assert again.state is not None
    expected = copy_state_out(space.tensors, cache.state.slot)
    assert all(map(torch.equal, copy_state_out(other.tensors, again.state.slot), expected))
    store.close()


def test_groups_in_a_store_are_told_apart(tmp_path: Path) -> None:
    """A model with the groups the other way round finds nothing that it could take for its own."""
    keys = keys_of(2)
    store = open_store(tmp_path, GROUPS)
    space = CacheSpace.for_tokens(Model(GROUPS), 2 * BLOCK_TOKENS)
    for group in space.tensors.kv_groups:
        for layer in group.layers:
            layer.keys.fill_(1)
    copied = copy_out(space.tensors, [[0, 1], [0, 1]])
    for spec, own in zip(GROUPS.kv_groups, copied, strict=True):
        assert [any(bytes_in(part)) for part in spec.parts_of(own)] == [True, False]
    with pytest.raises(ValueError, match="must be"):
        store.put_blocks(0, keys, copied[::-1])
    with pytest.raises(ValueError, match="zip"):
        store.put_blocks(0, keys, copied[:1])
    assert store.put_blocks(0, keys, copied)
    assert store.flush(60)
    store.close()
    swapped = open_store(tmp_path, CacheSpec(GROUPS.kv_groups[::-1]))
    assert swapped.find(keys, 0, needs_state=False) is None
    swapped.close()
