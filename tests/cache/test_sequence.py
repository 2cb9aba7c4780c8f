from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import BLOCK_TOKENS, BlockPool, Extent, SequenceBlocks, TokenRange
from penstock.errors import CacheFullError


def checkered_pool(num_blocks: int) -> BlockPool:
    """A pool with every other block in use: each free block is an extent of its own."""
    pool = BlockPool(num_blocks)
    pool.allocate(num_blocks)
    pool.release([Extent(block, block + 1) for block in range(1, num_blocks, 2)])
    return pool


@settings(deadline=None)
@given(chunks=st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_a_lone_sequence_is_one_extent_and_one_range_at_any_chunk_size(chunks: list[int]) -> None:
    pool = BlockPool(-(-sum(chunks) // BLOCK_TOKENS))
    sequence = SequenceBlocks(pool)
    for chunk in chunks:
        start = sequence.num_tokens
        sequence.reserve(start + chunk)
        assert sequence.locate(start, start + chunk) == [TokenRange(start, start + chunk)]
        sequence.commit(start + chunk)
    assert sequence.extents == (Extent(0, pool.num_blocks),)
    assert sequence.num_tokens == sum(chunks)


@settings(deadline=None)
@given(num_blocks=st.integers(1, 8), data=st.data())
def test_places_follow_the_extents_in_order(num_blocks: int, data: st.DataObject) -> None:
    sequence = SequenceBlocks(checkered_pool(2 * num_blocks))
    sequence.reserve(num_blocks * BLOCK_TOKENS)
    assert len(sequence.extents) == num_blocks
    every_place = [
        place
        for extent in sequence.extents
        for place in range(extent.start * BLOCK_TOKENS, extent.end * BLOCK_TOKENS)
    ]
    start = data.draw(st.integers(0, len(every_place)))
    end = data.draw(st.integers(start, len(every_place)))
    ranges = sequence.locate(start, end)
    assert [place for part in ranges for place in range(part.start, part.end)] == every_place[start:end]
    assert all(len(part) > 0 for part in ranges)
    assert all(left.end != right.start for left, right in pairwise(ranges))


def test_reserve_counts_in_total_and_never_shrinks() -> None:
    sequence = SequenceBlocks(BlockPool(4))
    sequence.reserve(65)
    assert sequence.capacity_tokens == 128
    for num_tokens in (0, 1, 65, 128):
        sequence.reserve(num_tokens)
        assert sequence.capacity_tokens == 128
    assert sequence.num_tokens == 0


def test_a_reserve_that_fails_changes_nothing() -> None:
    pool = checkered_pool(8)
    sequence = SequenceBlocks(pool)
    sequence.reserve(100)
    sequence.commit(100)
    extents = sequence.extents
    with pytest.raises(CacheFullError, match="3 blocks of 64 tokens wanted, 2 free of 8"):
        sequence.reserve(5 * BLOCK_TOKENS)
    assert sequence.extents == extents
    assert sequence.num_tokens == 100
    assert pool.num_free == 2


def test_a_failed_step_is_undone_by_truncating_to_the_length() -> None:
    pool = BlockPool(8)
    sequence = SequenceBlocks(pool)
    sequence.reserve(70)
    sequence.commit(70)
    before = sequence.extents
    sequence.reserve(500)
    sequence.truncate(sequence.num_tokens)
    assert sequence.num_tokens == 70
    assert sequence.extents == before
    assert pool.num_free == 6


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2), (256, 4), (300, 5)]
)
def test_truncate_keeps_just_the_blocks_that_are_needed(num_tokens: int, num_blocks: int) -> None:
    pool = checkered_pool(20)
    sequence = SequenceBlocks(pool)
    sequence.reserve(10 * BLOCK_TOKENS)
    sequence.commit(300)
    sequence.truncate(num_tokens)
    assert sequence.num_tokens == num_tokens
    assert sequence.capacity_tokens == num_blocks * BLOCK_TOKENS
    assert pool.num_free == 10 - num_blocks
    pool.check_integrity()


def test_shared_blocks_survive_their_sequence() -> None:
    pool = BlockPool(4)
    sequence = SequenceBlocks(pool)
    sequence.reserve(200)
    prefix = [Extent(0, 2)]
    pool.retain(prefix)
    sequence.free()
    assert pool.num_free == 2
    pool.release(prefix)
    assert pool.num_free == 4
    pool.check_integrity()


def test_free_is_idempotent_and_the_sequence_may_be_used_again() -> None:
    pool = BlockPool(2)
    sequence = SequenceBlocks(pool)
    for _ in range(3):
        sequence.reserve(128)
        sequence.commit(100)
        sequence.free()
        sequence.free()
        assert sequence.extents == ()
        assert sequence.num_tokens == sequence.capacity_tokens == 0
        assert pool.num_free == 2


def test_wrong_lengths_are_errors_and_change_nothing() -> None:
    sequence = SequenceBlocks(BlockPool(4))
    sequence.reserve(128)
    sequence.commit(100)
    for end in (99, 129, -1):
        with pytest.raises(ValueError, match=r"100 \(the length\) to 128 \(the capacity\)"):
            sequence.commit(end)
    for num_tokens in (101, -1):
        with pytest.raises(ValueError, match=r"0 to 100 \(the length\)"):
            sequence.truncate(num_tokens)
    for start, end in ((0, 129), (-1, 3), (5, 4)):
        with pytest.raises(ValueError, match=r"\[0, 128\) \(the capacity\)"):
            sequence.locate(start, end)
    assert sequence.locate(128, 128) == []
    assert sequence.num_tokens == 100
    assert sequence.capacity_tokens == 128


def kept_blocks(num_blocks: int, kept: list[int]) -> BlockPool:
    """A pool in which these blocks are idle, and the others free."""
    pool = BlockPool(num_blocks)
    pool.reclaim = lambda wanted: None
    pool.allocate(num_blocks)
    for block in kept:
        pool.keep(block)
    pool.release([Extent(0, num_blocks)])
    return pool


def test_adopted_blocks_are_the_sequences_tokens_in_their_order() -> None:
    pool = kept_blocks(12, [7, 2, 3, 4])
    sequence = SequenceBlocks(pool)
    sequence.adopt([7, 2, 3])
    sequence.adopt([4])
    assert sequence.extents == (Extent(7, 8), Extent(2, 5))
    assert sequence.block_ids == [7, 2, 3, 4]
    assert sequence.num_tokens == sequence.capacity_tokens == 4 * BLOCK_TOKENS
    assert sequence.locate(60, 70) == [TokenRange(508, 512), TokenRange(128, 134)]
    assert (pool.num_idle, pool.num_free) == (0, 8)
    sequence.reserve(300)
    assert sequence.extents == (Extent(7, 8), Extent(2, 6))
    sequence.free()
    assert (pool.num_idle, pool.num_free) == (4, 8)


def test_a_sequence_goes_on_behind_what_it_adopted() -> None:
    """Its own tokens never come to lie in an adopted block."""
    pool = kept_blocks(8, [0, 1])
    one, other = SequenceBlocks(pool), SequenceBlocks(pool)
    for sequence in (one, other):
        sequence.adopt([0, 1])
        sequence.reserve(200)
        sequence.commit(200)
    assert not {*one.block_ids[2:], *other.block_ids[2:]} & {0, 1}
    one.truncate(128)
    other.truncate(64)
    assert (one.block_ids, other.block_ids) == ([0, 1], [0])
    one.free()
    assert pool.num_idle == 1
    other.free()
    assert (pool.num_idle, pool.num_free) == (2, 6)


def test_blocks_are_adopted_where_a_whole_block_ends_and_nothing_is_reserved() -> None:
    pool = kept_blocks(8, [5])
    sequence = SequenceBlocks(pool)
    sequence.reserve(64)
    with pytest.raises(ValueError, match="after token 0: accepted is the end of the last block held, 64"):
        sequence.adopt([5])
    sequence.commit(63)
    with pytest.raises(ValueError, match="after token 63"):
        sequence.adopt([5])
    sequence.commit(64)
    for blocks, message in (
        ([5, 4], "free"),
        ([5, 8], "outside"),
        ([5, 5], "two places"),
        (sequence.block_ids, "two"),
    ):
        with pytest.raises(ValueError, match=message):
            sequence.adopt(blocks)
    assert (sequence.num_blocks, pool.num_idle) == (1, 1)
    sequence.adopt([5])
    assert sequence.num_tokens == 128


def test_a_length_within_a_shared_block_is_refused_and_changes_nothing() -> None:
    """What comes next would be written over what the index, or another sequence, has there."""
    pool = BlockPool(8)
    pool.reclaim = lambda wanted: None
    writer, reader = SequenceBlocks(pool), SequenceBlocks(pool)
    writer.reserve(300)
    writer.commit(300)
    pool.keep(0)
    pool.keep(1)
    reader.adopt([0])
    pool.drop(0)
    for sequence, length, block in ((writer, 127, 1), (writer, 1, 0), (reader, 63, 0)):
        before = (sequence.num_tokens, sequence.extents)
        with pytest.raises(
            ValueError, match=rf"truncate to {length} tokens: block {block}.* multiples of 64"
        ):
            sequence.truncate(length)
        assert (sequence.num_tokens, sequence.extents) == before
    writer.truncate(200)  # its own
    writer.truncate(128)
    writer.truncate(64)
    reader.free()
    writer.truncate(63)  # nobody else's any more, and not kept
    assert writer.block_ids == [0]


def test_a_step_is_undone_whatever_is_shared() -> None:
    pool = kept_blocks(4, [0])
    sequence = SequenceBlocks(pool)
    sequence.adopt([0])
    for length in (64, 70):
        sequence.commit(length)
        sequence.reserve(150)
        sequence.truncate(length)
        assert sequence.num_tokens == length
        sequence.reserve(70)


def test_what_is_reserved_is_given_back_down_to_the_length() -> None:
    pool = BlockPool(8)
    blocks = SequenceBlocks(pool)
    blocks.reserve(100)
    blocks.commit(100)
    blocks.reserve(400)
    blocks.unreserve(193)
    assert (blocks.num_blocks, blocks.num_tokens, pool.num_free) == (4, 100, 4)
    blocks.unreserve(1000)
    assert blocks.num_blocks == 4
    with pytest.raises(ValueError, match="accepted is 100"):
        blocks.unreserve(99)
    blocks.unreserve(100)
    assert (blocks.num_blocks, pool.num_free) == (2, 6)
