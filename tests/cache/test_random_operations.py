"""Random lives of several sequences in one small pool, against an oracle that knows every token."""

from dataclasses import dataclass, field
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.cache import BLOCK_TOKENS, BlockPool, Extent, SequenceBlocks
from penstock.cache.tensors import KVCache, KVSpec
from penstock.errors import CacheFullError

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=2, dtype=torch.float32)
NUM_SEQUENCES = 3

num_tokens_strategy = st.one_of(st.integers(1, 8), st.integers(1, 3 * BLOCK_TOKENS), st.just(BLOCK_TOKENS))


def blocks_of(extents: tuple[Extent, ...]) -> set[int]:
    return {block for extent in extents for block in range(extent.start, extent.end)}


@dataclass(eq=False)
class Life:
    """A sequence and what its committed tokens should be."""

    blocks: SequenceBlocks
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Share:
    """Extents that someone else holds too, and the sequence that they came from."""

    extents: tuple[Extent, ...]
    origin: Life


class CacheMachine(RuleBasedStateMachine):
    @initialize(pinned=st.lists(st.booleans(), min_size=8, max_size=32))
    def start(self, pinned: list[bool]) -> None:
        """The pinned blocks are in use throughout, so that the free space is in pieces."""
        num_blocks = len(pinned)
        self.pool = BlockPool(num_blocks)
        self.cache = KVCache(SPEC, num_blocks)
        self.lives = [Life(SequenceBlocks(self.pool)) for _ in range(NUM_SEQUENCES)]
        self.shares: list[Share] = []
        self.next_token = 1
        self.pool.allocate(num_blocks)
        self.pinned = [Extent(block, block + 1) for block in range(num_blocks) if pinned[block]]
        self.pool.release(Extent(block, block + 1) for block in range(num_blocks) if not pinned[block])

    def draw_life(self, data: st.DataObject) -> Life:
        return self.lives[data.draw(st.integers(0, NUM_SEQUENCES - 1))]

    def new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def try_reserve(self, life: Life, num_tokens: int) -> bool:
        """Reserve. It must work exactly when there are enough blocks, and otherwise change nothing."""
        blocks, num_free = life.blocks, self.pool.num_free
        before = (blocks.extents, blocks.num_tokens)
        missing = max(0, -(-num_tokens // BLOCK_TOKENS) - blocks.num_blocks)
        if not self.pool.can_allocate(missing):
            with pytest.raises(CacheFullError):
                blocks.reserve(num_tokens)
            assert (blocks.extents, blocks.num_tokens) == before
            assert self.pool.num_free == num_free
            return False
        blocks.reserve(num_tokens)
        assert blocks.capacity_tokens >= num_tokens
        assert self.pool.num_free == num_free - missing
        return True

    def write(self, life: Life, start: int, tokens: list[int]) -> None:
        places = life.blocks.locate(start, start + len(tokens))
        for layer in range(SPEC.num_layers):
            keys = torch.tensor([[[t, layer]] for t in tokens], dtype=torch.float32)
            self.cache.layer(layer).write(places, keys, -keys)

    @rule(data=st.data(), count=num_tokens_strategy)
    def reserve(self, data: st.DataObject, count: int) -> None:
        life = self.draw_life(data)
        self.try_reserve(life, life.blocks.num_tokens + count)

    @rule(data=st.data(), count=num_tokens_strategy, overlap=st.integers(0, 70))
    def run_step(self, data: st.DataObject, count: int, overlap: int) -> None:
        """Reserve, write, commit. Overlapping tokens are written again with the values they have."""
        life = self.draw_life(data)
        length = life.blocks.num_tokens
        if self.try_reserve(life, length + count):
            start = max(0, length - overlap)
            tokens = self.new_tokens(count)
            self.write(life, start, life.tokens[start:] + tokens)
            life.blocks.commit(length + count)
            life.tokens += tokens

    @rule(data=st.data(), count=num_tokens_strategy, give_back=st.booleans())
    def fail_step(self, data: st.DataObject, count: int, give_back: bool) -> None:
        """Reserve and write, but never commit."""
        life = self.draw_life(data)
        length = life.blocks.num_tokens
        if self.try_reserve(life, length + count):
            self.write(life, length, self.new_tokens(count))
            if give_back:
                life.blocks.truncate(length)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        life = self.draw_life(data)
        length = data.draw(st.integers(0, life.blocks.num_tokens))
        life.blocks.truncate(length)
        assert life.blocks.num_blocks == -(-length // BLOCK_TOKENS)
        del life.tokens[length:]

    @rule(data=st.data(), use_again=st.booleans())
    def free(self, data: st.DataObject, use_again: bool) -> None:
        life = self.draw_life(data)
        life.blocks.free()
        life.blocks.free()
        life.tokens.clear()
        if not use_again:
            self.lives[self.lives.index(life)] = Life(SequenceBlocks(self.pool))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        life = self.draw_life(data)
        self.pool.retain(life.blocks.extents)
        self.shares.append(Share(life.blocks.extents, life))

    @precondition(lambda self: self.shares)
    @rule(data=st.data())
    def end_share(self, data: st.DataObject) -> None:
        self.pool.release(self.shares.pop(data.draw(st.integers(0, len(self.shares) - 1))).extents)

    @invariant()
    def every_block_is_free_or_owned(self) -> None:
        self.pool.check_integrity()
        owned = blocks_of(tuple(self.pinned))
        for extents in [life.blocks.extents for life in self.lives] + [s.extents for s in self.shares]:
            owned |= blocks_of(extents)
        assert self.pool.num_free == self.pool.num_blocks - len(owned)

    @invariant()
    def no_place_serves_two_tokens(self) -> None:
        for life in self.lives:
            places = life.blocks.locate(0, life.blocks.capacity_tokens)
            all_places = [place for part in places for place in range(part.start, part.end)]
            assert len(set(all_places)) == len(all_places) == life.blocks.capacity_tokens
            assert not blocks_of(life.blocks.extents) & blocks_of(tuple(self.pinned))
        for one, other in combinations(self.lives, 2):
            assert not blocks_of(one.blocks.extents) & blocks_of(other.blocks.extents)
        for share in self.shares:
            for life in self.lives:
                if life is not share.origin:
                    assert not blocks_of(share.extents) & blocks_of(life.blocks.extents)

    @invariant()
    def every_committed_token_reads_back(self) -> None:
        for life in self.lives:
            length = life.blocks.num_tokens
            assert length == len(life.tokens)
            places = life.blocks.locate(0, length)
            for layer in range(SPEC.num_layers):
                expected = torch.tensor([[[t, layer]] for t in life.tokens], dtype=torch.float32)
                expected = expected.reshape(length, 1, 2)
                kv = self.cache.layer(layer).read(places)
                assert torch.equal(kv.keys, expected)
                assert torch.equal(kv.values, -expected)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for life in self.lives:
            life.blocks.free()
        for share in self.shares:
            self.pool.release(share.extents)
        self.pool.release(self.pinned)
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks
        assert self.pool.allocate(self.pool.num_blocks) == [Extent(0, self.pool.num_blocks)]


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestCacheUnderRandomOperations = CacheMachine.TestCase


@settings(deadline=None, max_examples=50)
@given(
    num_extents=st.integers(1, 6),
    chunks=st.lists(st.integers(1, 150), min_size=1, max_size=8),
    scattered=st.booleans(),
)
def test_chunks_read_back_as_one_whole_in_one_extent_or_several(
    num_extents: int, chunks: list[int], scattered: bool
) -> None:
    """Chunks of any size, in one extent or in extents of one block each, read back as what was written."""
    num_tokens = min(sum(chunks), num_extents * BLOCK_TOKENS)
    pool = BlockPool(2 * num_extents)
    if scattered:
        pool.allocate(2 * num_extents)
        pool.release(Extent(block, block + 1) for block in range(0, 2 * num_extents, 2))
    cache, sequence = KVCache(SPEC, pool.num_blocks), SequenceBlocks(pool)
    keys = torch.arange(1.0, 2 * num_tokens + 1).reshape(num_tokens, 1, 2)
    for chunk in chunks:
        start = sequence.num_tokens
        end = min(start + chunk, num_tokens)
        sequence.reserve(end)
        cache.layer(0).write(sequence.locate(start, end), keys[start:end], -keys[start:end])
        sequence.commit(end)
    assert len(sequence.extents) == (-(-num_tokens // BLOCK_TOKENS) if scattered else 1)
    places = sequence.locate(0, num_tokens)
    for kv in (cache.layer(0).read(places), cache.layer(0).read_padded(places, num_tokens)):
        assert torch.equal(kv.keys, keys)
        assert torch.equal(kv.values, -keys)
