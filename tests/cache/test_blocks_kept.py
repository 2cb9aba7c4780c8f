"""Blocks that are kept when their last owner goes are idle, and given up when space is needed."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import BlockPool, Extent
from penstock.errors import CacheFullError


class Keeper:
    """A pool, and the simplest one that could keep its blocks: the one that became idle first goes first."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.idle: list[int] = []
        self.asked: list[int] = []
        self.pool.reclaim = self.reclaim
        self.pool.on_idle = self.idle.extend

    def reclaim(self, num_blocks: int) -> None:
        self.asked.append(num_blocks)
        for block in [block for block in dict.fromkeys(self.idle) if self.pool.is_idle(block)][:num_blocks]:
            self.pool.drop(block)
        self.idle[:] = [block for block in self.idle if self.pool.is_idle(block)]

    def idle_pool(self, num_idle: int) -> BlockPool:
        """Blocks [0, num_idle) are idle, the others free."""
        self.pool.allocate(num_idle)
        for block in range(num_idle):
            self.pool.keep(block)
        self.pool.release([Extent(0, num_idle)])
        return self.pool


def test_a_kept_block_is_idle_when_its_last_owner_goes_and_in_use_when_one_comes() -> None:
    pool = Keeper(4).pool
    pool.allocate(2)
    pool.keep(1)
    pool.retain([Extent(1, 2)])
    pool.release([Extent(0, 2)])
    assert (pool.num_free, pool.num_idle, pool.is_idle(1)) == (3, 0, False)
    pool.release([Extent(1, 2)])
    assert (pool.num_free, pool.num_idle, pool.is_idle(1)) == (3, 1, True)
    pool.retain([Extent(1, 2)])
    assert (pool.num_free, pool.num_idle, pool.is_idle(1)) == (3, 0, False)
    pool.check_integrity()


def test_a_dropped_block_is_free_when_nobody_owns_it() -> None:
    pool = Keeper(4).pool
    pool.allocate(2)
    pool.keep(0)
    pool.keep(1)
    pool.drop(1)
    pool.release([Extent(0, 2)])
    assert (pool.num_free, pool.num_idle) == (3, 1)
    pool.drop(0)
    assert (pool.num_free, pool.num_idle) == (4, 0)
    pool.check_integrity()


def test_free_blocks_are_taken_first_and_only_what_is_missing_is_given_up() -> None:
    keeper = Keeper(10)
    pool = keeper.idle_pool(6)
    assert pool.num_available == 10
    assert pool.allocate(4) == [Extent(6, 10)]
    assert keeper.asked == []
    assert pool.allocate(2) == [Extent(0, 2)]
    assert keeper.asked == [2]
    assert (pool.num_free, pool.num_idle, pool.num_available) == (0, 4, 4)
    pool.check_integrity()


def test_growth_in_place_passes_over_an_idle_block() -> None:
    pool = Keeper(8).pool
    pool.allocate(4)
    pool.keep(2)
    pool.release([Extent(2, 4)])
    (extent,) = pool.allocate(1, after=2)
    assert extent.start > 2
    assert pool.is_idle(2)


def test_an_allocation_that_idle_blocks_do_not_suffice_for_gives_none_up() -> None:
    keeper = Keeper(8)
    pool = keeper.idle_pool(3)
    pool.allocate(4)
    assert pool.can_allocate(4)
    assert not pool.can_allocate(5)
    with pytest.raises(CacheFullError, match="5 blocks of 64 tokens wanted, 4 free of 8"):
        pool.allocate(5)
    assert (keeper.asked, pool.num_free, pool.num_idle) == ([], 1, 3)


def test_who_was_asked_to_give_blocks_up_and_does_not_is_named() -> None:
    pool = Keeper(4).idle_pool(4)
    pool.reclaim = lambda num_blocks: None
    with pytest.raises(RuntimeError, match="1 idle blocks were to be given up, 0 were"):
        pool.allocate(1)
    pool.check_integrity()


def test_an_owner_may_write_where_nobody_else_counts_on_what_is_there() -> None:
    pool = Keeper(4).pool
    pool.allocate(1)
    assert pool.can_write(0)
    pool.keep(0)
    assert not pool.can_write(0)  # whoever finds it may adopt it
    pool.retain([Extent(0, 1)])
    pool.drop(0)
    assert not pool.can_write(0)  # somebody did
    pool.release([Extent(0, 1)])
    assert pool.can_write(0)


@pytest.mark.parametrize(
    ("action", "block", "message"),
    [
        ("keep", 0, "block 0: it is kept"),
        ("keep", 2, "block 2: it is idle"),
        ("keep", 3, "block 3: it is free"),
        ("keep", 4, "block 4 lies outside"),
        ("keep", -1, "block -1 lies outside"),
        ("drop", 1, "block 1: it is in use"),
        ("drop", 3, "block 3: it is free"),
        ("drop", -1, "block -1 lies outside"),
        ("retain", 3, "block 3: it is free"),
        ("release", 2, "block 2: it is idle"),
    ],
)
def test_what_does_not_suit_a_block_is_an_error_and_changes_nothing(
    action: str, block: int, message: str
) -> None:
    pool = Keeper(4).pool
    pool.allocate(3)
    pool.keep(0)
    pool.keep(2)
    pool.release([Extent(2, 3)])
    argument = block if action in ("keep", "drop") else [Extent(block, block + 1)]
    with pytest.raises(ValueError, match=message):
        getattr(pool, action)(argument)
    pool.check_integrity()
    assert (pool.num_free, pool.num_idle) == (1, 1)


def test_a_pool_that_nobody_would_give_blocks_up_for_keeps_none() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    with pytest.raises(ValueError, match="`reclaim` is not set"):
        pool.keep(0)


@settings(deadline=None)
@given(num_blocks=st.integers(1, 12), data=st.data())
def test_every_block_is_in_use_or_idle_or_free(num_blocks: int, data: st.DataObject) -> None:
    keeper = Keeper(num_blocks)
    pool = keeper.pool
    owners: Counter[int] = Counter()
    kept: set[int] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        in_use = sorted(owners.elements())
        idle = sorted(kept - owners.keys())
        match data.draw(st.sampled_from(["allocate", "retain", "release", "keep", "drop"])):
            case "allocate":
                wanted = data.draw(st.integers(0, pool.num_available))
                for extent in pool.allocate(wanted):
                    blocks = range(extent.start, extent.end)
                    assert not owners.keys() & set(blocks)
                    owners.update(blocks)
                kept -= {block for block in idle if not pool.is_idle(block)}
            case "retain" if in_use or idle:
                block = data.draw(st.sampled_from(in_use + idle))
                pool.retain([Extent(block, block + 1)])
                owners[block] += 1
            case "release" if in_use:
                released = data.draw(st.lists(st.sampled_from(range(len(in_use))), min_size=1, unique=True))
                pool.release([Extent(in_use[index], in_use[index] + 1) for index in released])
                owners -= Counter(in_use[index] for index in released)
            case "keep" if set(in_use) - kept:
                block = data.draw(st.sampled_from(sorted(set(in_use) - kept)))
                pool.keep(block)
                kept.add(block)
            case "drop" if kept:
                block = data.draw(st.sampled_from(sorted(kept)))
                pool.drop(block)
                kept.remove(block)
        pool.check_integrity()
        idle = sorted(kept - owners.keys())
        assert [block for block in range(num_blocks) if pool.is_idle(block)] == idle
        assert pool.num_idle == len(idle)
        assert pool.num_free == num_blocks - len(idle) - len(owners)


def test_integrity_check_sees_damage_to_what_is_kept() -> None:
    def damaged(kept: set[int], published: set[int], num_idle: int) -> BlockPool:
        pool = BlockPool(4)
        pool.allocate(2)
        pool._runs, pool._references, pool._num_free = [Extent(3, 4)], [1, 1, 0, 0], 1
        pool._kept, pool._published, pool._num_idle = kept, published, num_idle
        return pool

    damaged({1, 2}, {0, 1, 2}, 1).check_integrity()
    for message, pool in (
        ("leaked", damaged({1}, {1}, 0)),
        ("not free", damaged({1, 2, 3}, {1, 2, 3}, 2)),
        ("counted as idle", damaged({1, 2}, {1, 2}, 2)),
        ("not published", damaged({1, 2}, {2}, 1)),
        ("published but free", damaged({1, 2}, {1, 2, 3}, 1)),
    ):
        with pytest.raises(AssertionError, match=message):
            pool.check_integrity()
