import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import EMPTY, SlotPool
from penstock.errors import CacheFullError


def test_a_fresh_pool_gives_every_slot_once_from_0() -> None:
    pool = SlotPool(3)
    assert (pool.num_slots, pool.num_free) == (3, 3)
    assert [pool.allocate(1)[0] for _ in range(3)] == [0, 1, 2]
    assert pool.num_free == 0
    pool.check_integrity()


def test_the_slot_that_was_freed_last_is_given_first() -> None:
    pool = SlotPool(8)
    slots = pool.allocate(4)
    pool.release(slots[2])
    pool.release(slots[0])
    assert pool.allocate(3) == (slots[0], slots[2], 4)


@settings(deadline=None)
@given(lives=st.lists(st.integers(1, 6), min_size=1, max_size=30))
def test_no_more_slots_are_touched_than_were_ever_in_use_at_once(lives: list[int]) -> None:
    """What was never written takes no memory, so an untouched slot must wait while a used one is free."""
    pool = SlotPool(100)
    touched: set[int] = set()
    for num_slots in lives:
        slots = pool.allocate(num_slots)
        touched.update(slots)
        for slot in slots:
            pool.release(slot)
    assert len(touched) == max(lives)


@settings(deadline=None)
@given(num_slots=st.integers(1, 20), data=st.data())
def test_a_failed_allocation_changes_nothing(num_slots: int, data: st.DataObject) -> None:
    pool = SlotPool(num_slots)
    used = pool.allocate(data.draw(st.integers(0, num_slots)))
    num_free = num_slots - len(used)
    wanted = num_free + data.draw(st.integers(1, 5))
    assert pool.can_allocate(num_free)
    assert not pool.can_allocate(wanted)
    with pytest.raises(CacheFullError, match=f"{wanted} slots wanted, {num_free} free of {num_slots}"):
        pool.allocate(wanted)
    pool.check_integrity()
    assert pool.num_free == num_free
    assert set(pool.allocate(num_free)) | set(used) == set(range(num_slots))
    with pytest.raises(CacheFullError, match="1 slots wanted, 0 free"):
        pool.allocate(1)[0]
    pool.check_integrity()


@pytest.mark.parametrize("num_owners", [1, 2, 5])
def test_a_slot_is_free_when_its_last_owner_releases_it(num_owners: int) -> None:
    pool = SlotPool(2)
    slot = pool.allocate(1)[0]
    for _ in range(num_owners - 1):
        pool.retain(slot)
    for _ in range(num_owners):
        assert pool.num_free == 1
        pool.release(slot)
        pool.check_integrity()
    assert pool.num_free == 2


def test_a_slot_that_is_free_or_unknown_is_an_error_and_changes_nothing() -> None:
    pool = SlotPool(4)
    owned = pool.allocate(1)[0]
    for slot, message in ((1, "slot 1: it is free"), (4, "outside the pool's 4"), (EMPTY, "outside")):
        with pytest.raises(ValueError, match=f"cannot release .*{message}"):
            pool.release(slot)
        with pytest.raises(ValueError, match=f"cannot retain .*{message}"):
            pool.retain(slot)
    pool.check_integrity()
    assert pool.num_free == 3
    pool.release(owned)
    with pytest.raises(ValueError, match="it is free"):
        pool.release(owned)
    pool.check_integrity()
    assert pool.num_free == 4


def test_nonsense_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1 slot"):
        SlotPool(0)
    with pytest.raises(ValueError, match="-1"):
        SlotPool(1).allocate(-1)
    assert SlotPool(1).allocate(0) == ()


def test_integrity_check_sees_every_kind_of_damage() -> None:
    def damaged(free: list[int], references: list[int]) -> SlotPool:
        pool = SlotPool(4)
        pool._free, pool._references = free, references
        return pool

    damaged([3, 0, 2], [0, 1, 0, 0]).check_integrity()
    for message, pool in (
        ("more than once", damaged([3, 2, 2, 0], [0, 1, 0, 0])),
        ("not free", damaged([3, 2, 1, 0], [0, 1, 0, 0])),
        ("not free", damaged([4, 3, 2, 0], [0, 1, 0, 0])),
        ("leaked", damaged([3, 0], [0, 1, 0, 0])),
        ("fewer than 0", damaged([3, 2, 1, 0], [0, -1, 0, 0])),
    ):
        with pytest.raises(AssertionError, match=message):
            pool.check_integrity()
