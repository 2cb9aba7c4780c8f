import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import BlockPool, Extent
from penstock.errors import CacheFullError


def pool_with(occupied: Sequence[bool]) -> BlockPool:
    """A pool in which exactly the blocks marked True are in use."""
    pool = BlockPool(len(occupied))
    pool.allocate(len(occupied))
    pool.release([Extent(block, block + 1) for block, used in enumerate(occupied) if not used])
    pool.check_integrity()
    return pool


def free_run_lengths(occupied: Sequence[bool]) -> list[int]:
    runs = "".join("x" if used else "." for used in occupied).split("x")
    return [len(run) for run in runs if run]


def blocks_of(extents: Sequence[Extent]) -> list[int]:
    return [block for extent in extents for block in range(extent.start, extent.end)]


def layout(text: str) -> list[bool]:
    """`x` is a block in use, `.` a free one."""
    return [mark == "x" for mark in text]


occupancies = st.lists(st.booleans(), min_size=1, max_size=100)


@settings(deadline=None)
@given(num_blocks=st.integers(1, 500), data=st.data())
def test_fresh_pool_gives_one_extent_from_block_0(num_blocks: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(1, num_blocks))
    pool = BlockPool(num_blocks)
    assert pool.allocate(wanted) == [Extent(0, wanted)]
    assert pool.num_free == num_blocks - wanted
    pool.check_integrity()


@settings(deadline=None)
@given(steps=st.lists(st.integers(1, 20), min_size=1, max_size=20))
def test_growth_in_an_otherwise_free_pool_stays_in_place(steps: list[int]) -> None:
    pool = BlockPool(sum(steps))
    end = pool.allocate(steps[0])[-1].end
    for step in steps[1:]:
        assert pool.allocate(step, after=end) == [Extent(end, end + step)]
        end += step
    assert pool.num_free == 0


@settings(deadline=None)
@given(occupied=occupancies, data=st.data())
def test_allocation_takes_free_blocks_in_the_fewest_extents(
    occupied: list[bool], data: st.DataObject
) -> None:
    pool = pool_with(occupied)
    lengths = free_run_lengths(occupied)
    wanted = data.draw(st.integers(0, pool.num_free))
    extents = pool.allocate(wanted)
    blocks = blocks_of(extents)
    assert len(set(blocks)) == len(blocks) == wanted
    assert not any(occupied[block] for block in blocks)
    fewest = sum(1 for total in accumulate(sorted(lengths, reverse=True), initial=0) if total < wanted)
    assert len(extents) == fewest
    pool.check_integrity()
    pool.release(extents)
    pool.check_integrity()
    assert pool.num_free == sum(lengths)


@settings(deadline=None)
@given(occupied=occupancies.filter(any), data=st.data())
def test_growth_takes_what_continues_first_and_then_the_fewest_extents(
    occupied: list[bool], data: st.DataObject
) -> None:
    pool = pool_with(occupied)
    after = data.draw(st.sampled_from([block + 1 for block, used in enumerate(occupied) if used]))
    wanted = data.draw(st.integers(0, pool.num_free))
    in_place = 0
    while after + in_place < len(occupied) and not occupied[after + in_place] and in_place < wanted:
        in_place += 1
    extents = pool.allocate(wanted, after)
    if in_place:
        assert extents[0] == Extent(after, after + in_place)
    others = list(occupied)
    others[after : after + in_place] = [True] * in_place
    lengths = sorted(free_run_lengths(others), reverse=True)
    fewest = sum(1 for total in accumulate(lengths, initial=0) if total < wanted - in_place)
    assert len(extents) == fewest + bool(in_place)
    assert not any(others[block] for block in blocks_of(extents[bool(in_place) :]))
    pool.check_integrity()


def test_a_new_sequence_takes_the_smallest_run_that_holds_it() -> None:
    assert pool_with(layout("x.....x...x..x....x")).allocate(3) == [Extent(7, 10)]


def test_a_new_sequence_leaves_room_when_there_is_some() -> None:
    pool = BlockPool(200)
    first = pool.allocate(20)
    second = pool.allocate(20)
    assert pool.allocate(10, after=first[-1].end) == [Extent(20, 30)]
    assert pool.allocate(10, after=second[-1].end) == [Extent(second[-1].end, second[-1].end + 10)]


def test_several_extents_are_largest_first_and_the_rest_where_it_fits_best() -> None:
    extents = pool_with(layout("x....x...x......x..")).allocate(8)
    assert extents == [Extent(10, 16), Extent(17, 19)]


@pytest.mark.parametrize("num_sequences", [2, 5, 16])
def test_sequences_that_grow_in_turns_keep_few_extents(num_sequences: int) -> None:
    pool = BlockPool(64 * num_sequences * 2)
    ends = [pool.allocate(1)[-1].end for _ in range(num_sequences)]
    moves = [0] * num_sequences
    for _ in range(63):
        for index, end in enumerate(ends):
            (extent,) = pool.allocate(1, after=end)
            moves[index] += extent.start != end
            ends[index] = extent.end
    pool.check_integrity()
    assert max(moves) <= 3  # one move per block, 63, if new places were packed tightly


@pytest.mark.parametrize("num_sequences", [2, 5, 16])
def test_where_it_is_known_how_far_they_grow_each_lies_in_one_place(num_sequences: int) -> None:
    pool = BlockPool(100 * num_sequences)
    ends = [pool.allocate(4, num_later=60)[-1].end for _ in range(num_sequences)]
    for num_later in range(56, -4, -4):
        for index, end in enumerate(ends):
            assert pool.allocate(4, after=end, num_later=num_later) == [Extent(end, end + 4)]
            ends[index] = end + 4
    pool.check_integrity()
    # Others begin behind what is still to come, and no further once nothing is.
    (behind,) = pool.allocate(1)
    assert behind.start == ends[-1] + 16
    # What is given back was nobody's room.
    pool.release([Extent(ends[-1] - 64, ends[-1]), behind])
    (again,) = pool.allocate(1)
    assert again.start == (ends[-2] + 16 if num_sequences > 1 else 0)


def test_one_that_has_to_move_goes_where_all_of_it_has_room() -> None:
    pool = pool_with(layout("xx" + 100 * "." + "x" + 300 * "."))
    assert pool.allocate(10, after=2) == [Extent(2, 12)]
    assert pool.allocate(10, after=1, num_later=50) == [Extent(28, 38)]


@settings(deadline=None)
@given(occupied=occupancies, excess=st.integers(1, 10))
def test_a_failed_allocation_changes_nothing(occupied: list[bool], excess: int) -> None:
    pool = pool_with(occupied)
    num_free = pool.num_free
    wanted = num_free + excess
    assert not pool.can_allocate(wanted)
    with pytest.raises(CacheFullError) as caught:
        pool.allocate(wanted)
    for number in (wanted, num_free, len(occupied)):
        assert str(number) in str(caught.value)
    pool.check_integrity()
    assert pool.num_free == num_free
    assert pool.can_allocate(num_free)
    assert sorted(blocks_of(pool.allocate(num_free))) == [b for b, used in enumerate(occupied) if not used]


def test_a_block_is_free_when_its_last_owner_releases_it() -> None:
    pool = BlockPool(8)
    extents = pool.allocate(6)
    pool.retain([Extent(1, 3)])
    pool.release(extents)
    assert pool.num_free == 6
    pool.check_integrity()
    pool.release([Extent(1, 3)])
    assert pool.num_free == 8
    pool.check_integrity()
    assert pool.allocate(8) == [Extent(0, 8)]


def test_one_release_may_take_several_references() -> None:
    pool = BlockPool(4)
    extents = pool.allocate(2)
    pool.retain(extents)
    pool.release([*extents, *extents])
    pool.check_integrity()
    assert pool.num_free == 4


@pytest.mark.parametrize(
    "extents",
    [
        [Extent(4, 5)],
        [Extent(0, 4), Extent(2, 3)],
        [Extent(0, 2), Extent(3, 6)],
        [Extent(0, 4), Extent(7, 9)],
    ],
)
def test_a_wrong_release_is_an_error_and_changes_nothing(extents: list[Extent]) -> None:
    pool = BlockPool(8)
    owned = pool.allocate(4)
    with pytest.raises(ValueError, match=r"free|outside"):
        pool.release(extents)
    pool.check_integrity()
    assert pool.num_free == 4
    pool.release(owned)
    assert pool.num_free == 8


def test_retaining_a_free_block_is_an_error_and_changes_nothing() -> None:
    pool = BlockPool(8)
    owned = pool.allocate(4)
    with pytest.raises(ValueError, match="block 4"):
        pool.retain([Extent(2, 5)])
    pool.release(owned)
    assert pool.num_free == 8


@pytest.mark.parametrize("after", [0, 3, 9, -1])
def test_growth_after_a_block_that_nobody_owns_is_an_error(after: int) -> None:
    pool = BlockPool(8)
    pool.allocate(2)
    with pytest.raises(ValueError, match="ends at block"):
        pool.allocate(1, after)


def test_nonsense_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)
    with pytest.raises(ValueError, match="-1"):
        BlockPool(1).allocate(-1)
    for start, end in ((3, 3), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="start < end"):
            Extent(start, end)


def test_integrity_check_sees_every_kind_of_damage() -> None:
    def damaged(runs: list[Extent], references: list[int], num_free: int) -> BlockPool:
        pool = BlockPool(4)
        pool._runs, pool._references, pool._num_free = runs, references, num_free
        return pool

    damaged([Extent(0, 1), Extent(2, 4)], [0, 1, 0, 0], 3).check_integrity()
    for message, pool in (
        ("overlap", damaged([Extent(0, 3), Extent(2, 4)], [0, 0, 0, 0], 4)),
        ("out of order", damaged([Extent(2, 4), Extent(0, 1)], [0, 1, 0, 0], 3)),
        ("touch", damaged([Extent(0, 2), Extent(2, 4)], [0, 0, 0, 0], 4)),
        ("not free", damaged([Extent(0, 4)], [0, 1, 0, 0], 4)),
        ("not free", damaged([Extent(0, 5)], [0, 0, 0, 0], 5)),
        ("leaked", damaged([Extent(0, 1)], [0, 1, 0, 1], 1)),
        ("fewer than 0", damaged([Extent(0, 4)], [0, -1, 0, 0], 4)),
        ("counted", damaged([Extent(0, 4)], [0, 0, 0, 0], 3)),
    ):
        with pytest.raises(AssertionError, match=message):
            pool.check_integrity()


def test_block_accounting_needs_no_torch() -> None:
    code = "import sys, penstock.cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
