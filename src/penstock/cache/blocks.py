"""The block pool: cache space handed out in contiguous runs of blocks, with reference counts."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from penstock.errors import CacheFullError
from penstock.plan.grids import BLOCK_TOKENS

# The room to grow that a new sequence leaves its neighbour and wants for itself: 1,024 tokens, a long answer.
_ROOM_BLOCKS = 16

_start_of = attrgetter("start")


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous run of blocks [start, end), never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"an extent has 0 <= start < end, not [{self.start}, {self.end})")

    def __len__(self) -> int:
        return self.end - self.start


class BlockPool:
    """Blocks [0, num_blocks). A block is in use, by as many owners as it has references; or idle; or free.

        in use, not kept   its last owner releases it: free
        in use, kept       its last owner releases it: idle, with what it holds, for who comes next
        idle               `retain` puts it in use again; `drop` frees it

    Who keeps blocks (a prefix index) sets `reclaim`, which is asked to drop that many idle blocks when the free ones
    do not suffice, and may set `on_idle`, which is told of blocks that became idle.

    Free space is a sorted list of runs that neither overlap nor touch, so the work of an allocation grows
    with the number of runs and of blocks handed out, not with the size of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, not {num_blocks}")
        self._references = [0] * num_blocks
        self._runs = [Extent(0, num_blocks)]
        self._num_free = num_blocks
        self._kept: set[int] = set()
        self._num_idle = 0
        # Kept at some time since they were last free: there may be owners that count on what is in them.
        self._published: set[int] = set()
        # By the block behind a sequence's last: those that it is still to get, where that is known.
        self._awaited: dict[int, int] = {}
        self.reclaim: Callable[[int], None] | None = None
        self.on_idle: Callable[[Sequence[int]], None] | None = None

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_idle(self) -> int:
        return self._num_idle

    @property
    def num_available(self) -> int:
        """Blocks that nobody owns: free, or idle and given up when space is needed."""
        return self._num_free + self._num_idle

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_available

    def num_owners(self, block: int) -> int:
        return self._references[block]

    def is_kept(self, block: int) -> bool:
        return block in self._kept

    def is_idle(self, block: int) -> bool:
        return block in self._kept and not self._references[block]

    def can_write(self, block: int) -> bool:
        """Whether an owner may write over what it has in this block: nobody else counts on that."""
        return block not in self._published or (block not in self._kept and self._references[block] == 1)

    def allocate(self, num_blocks: int, after: int | None = None, num_later: int = 0) -> list[Extent]:
        """Take `num_blocks` blocks with one reference each, in as few extents as the free space allows.

        All or nothing: raises CacheFullError and changes nothing if there are not enough. Idle blocks are given up
        only if the free ones do not suffice. `after` is the end of the sequence's last extent: free blocks that begin
        there are taken first, so that the extent grows in place. The extents come in the order of use; the last one
        is where the sequence will grow, by `num_later` blocks if that is known: they find room there, where there is
        a run for all of them, and others begin behind it.
        """
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if after is not None and not (0 < after <= self.num_blocks and self._references[after - 1]):
            raise ValueError(f"no extent in use ends at block {after}")
        if not self.can_allocate(num_blocks):
            raise CacheFullError(
                f"the K/V cache has no room: {num_blocks} blocks of {BLOCK_TOKENS} tokens wanted, "
                f"{self.num_available} free of {self.num_blocks}; use a larger cache or fewer tokens"
            )
        if num_blocks > self._num_free:
            self._reclaim(num_blocks - self._num_free)
        taken: list[Extent] = []
        wanted = num_blocks
        if wanted and after is not None and (run := self._run_starting_at(after)):
            taken.append(Extent(after, min(after + wanted, run.end)))
            self._take(taken[-1])
            wanted -= len(taken[-1])
        while wanted:
            taken.append(self._find_place(wanted, num_later, moving=after is not None))
            self._take(taken[-1])
            wanted -= len(taken[-1])
        if taken:
            self._awaited.pop(after or 0, None)
            if num_later > _ROOM_BLOCKS:
                self._awaited[taken[-1].end] = num_later
        return taken

    def retain(self, extents: Iterable[Extent]) -> None:
        """Add an owner to blocks that are in use or idle. All or nothing."""
        blocks = self._blocks_of(extents)
        for block in blocks:
            if not self._references[block] and block not in self._kept:
                raise ValueError(f"cannot retain block {block}: it is free")
        for block in blocks:
            if not self._references[block]:
                self._num_idle -= 1
            self._references[block] += 1

    def release(self, extents: Iterable[Extent]) -> None:
        """Take an owner from each block; one without owners is free, or idle if it is kept. All or nothing."""
        blocks = self._blocks_of(extents)
        for index, block in enumerate(blocks):
            if not self._references[block]:
                for released in blocks[:index]:
                    self._references[released] += 1
                state = "idle" if block in self._kept else "free"
                raise ValueError(f"cannot release block {block}: it is {state}")
            self._references[block] -= 1
        ownerless = {block for block in blocks if not self._references[block]}
        idle = ownerless & self._kept
        self._free(ownerless - idle)
        self._num_idle += len(idle)
        if idle and self.on_idle is not None:
            self.on_idle(sorted(idle))

    def keep(self, block: int) -> None:
        """Keep what is in this block, which is in use, when its last owner goes."""
        self._check_inside(block)
        if not self._references[block] or block in self._kept:
            raise ValueError(f"cannot keep block {block}: it is {self._state_of(block)}, not in use")
        if self.reclaim is None:
            raise ValueError(f"cannot keep block {block}: `reclaim` is not set, so nobody would give it up")
        self._kept.add(block)
        self._published.add(block)

    def drop(self, block: int) -> None:
        """Keep this block no more: it is free if it was idle, and otherwise when its last owner goes."""
        self._check_inside(block)
        if block not in self._kept:
            raise ValueError(f"cannot drop block {block}: it is {self._state_of(block)}, not kept")
        self._kept.remove(block)
        if not self._references[block]:
            self._num_idle -= 1
            self._free({block})

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free runs are the unreferenced blocks that are not kept, sorted and
        coalesced, and the counts are right."""
        for left, right in pairwise(self._runs):
            assert left.end < right.start, f"free runs {left} and {right} touch, overlap or are out of order"
        assert min(self._references) >= 0, "a block has fewer than 0 references"
        free = {block for run in self._runs for block in range(run.start, run.end)}
        ownerless = {block for block, count in enumerate(self._references) if not count}
        unowned, idle = ownerless - self._kept, ownerless & self._kept
        assert free <= unowned, f"blocks {sorted(free - unowned)} are in a free run but not free"
        assert unowned <= free, f"blocks {sorted(unowned - free)} leaked: no owner, and in no free run"
        assert len(free) == self._num_free, f"{self._num_free} blocks are counted as free, {len(free)} are"
        assert len(idle) == self._num_idle, f"{self._num_idle} blocks are counted as idle, {len(idle)} are"
        unpublished = self._kept - self._published
        assert not unpublished, f"blocks {sorted(unpublished)} are kept but not published"
        assert not self._published & free, f"blocks {sorted(self._published & free)} are published but free"

    def _reclaim(self, num_blocks: int) -> None:
        before = self._num_free
        if self.reclaim is not None:
            self.reclaim(num_blocks)
        if self._num_free - before < num_blocks:
            raise RuntimeError(
                f"{num_blocks} idle blocks were to be given up, {self._num_free - before} were: a defect of `reclaim`"
            )

    def _free(self, blocks: set[int]) -> None:
        """Put blocks without owners, not kept, into the free runs."""
        self._published -= blocks
        for run in extents_of(sorted(blocks)):
            self._give_back(run)

    def _state_of(self, block: int) -> str:
        if block in self._kept:
            return "kept" if self._references[block] else "idle"
        return "in use" if self._references[block] else "free"

    def _check_inside(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} lies outside the pool's {self.num_blocks} blocks")

    def _find_place(self, wanted: int, num_later: int, moving: bool) -> Extent:
        """Where the next extent of `wanted` blocks goes: a part of one free run, or all of the largest run.

        A sequence may outgrow what it asked for, and so may its neighbour, so a place leaves room for both:

            [run.start, place.start)   for the sequence that ends at run.start, if there is one
            [place.start, place.end)   the place
            [place.end, run.end)       for this sequence

        A new sequence takes the smallest run with room, or else the smallest that holds it, so that large
        runs stay whole for long prompts. One that moves on because it could not grow in place takes the
        middle of the largest run: two that grow side by side would otherwise leapfrog, an extent each time. Where
        it is known how far it will grow, it takes the smallest run that holds all of it, too.
        """
        runs = [run for run in self._runs if len(run) >= wanted]
        if not runs:
            return max(self._runs, key=len)
        room = max(num_later, _ROOM_BLOCKS)
        roomy = [run for run in runs if len(run) >= wanted + room + self._room_before(run)]
        if moving and not (num_later and roomy):
            run = max(runs, key=len)
            before = (len(run) - wanted) // 2 if run.start else 0
        else:
            if not roomy:
                roomy = [run for run in runs if len(run) >= wanted + _ROOM_BLOCKS + self._room_before(run)]
            run = min(roomy or runs, key=len)
            before = self._room_before(run) if roomy else 0
        return Extent(run.start + before, run.start + before + wanted)

    def _room_before(self, run: Extent) -> int:
        """The room to leave at the start of a run. No sequence ends at block 0."""
        return self._awaited.get(run.start, _ROOM_BLOCKS) if run.start else 0

    def _run_starting_at(self, block: int) -> Extent | None:
        index = bisect_left(self._runs, block, key=_start_of)
        if index < len(self._runs) and self._runs[index].start == block:
            return self._runs[index]
        return None

    def _take(self, place: Extent) -> None:
        index = bisect_right(self._runs, place.start, key=_start_of) - 1
        run = self._runs[index]
        sides = ((run.start, place.start), (place.end, run.end))
        self._runs[index : index + 1] = [Extent(start, end) for start, end in sides if start < end]
        self._references[place.start : place.end] = [1] * len(place)
        self._num_free -= len(place)

    def _give_back(self, run: Extent) -> None:
        start, end = run.start, run.end
        self._awaited.pop(end, None)
        first = last = bisect_left(self._runs, start, key=_start_of)
        if first > 0 and self._runs[first - 1].end == start:
            first -= 1
            start = self._runs[first].start
        if last < len(self._runs) and self._runs[last].start == end:
            end = self._runs[last].end
            last += 1
        self._runs[first:last] = [Extent(start, end)]
        self._num_free += len(run)

    def _blocks_of(self, extents: Iterable[Extent]) -> list[int]:
        blocks: list[int] = []
        for extent in extents:
            if extent.end > self.num_blocks:
                raise ValueError(f"{extent} lies outside the pool's {self.num_blocks} blocks")
            blocks.extend(range(extent.start, extent.end))
        return blocks


def extents_of(blocks: Iterable[int]) -> list[Extent]:
    """The same blocks in the same order, with those that continue each other in one extent."""
    return joined((block, block + 1) for block in blocks)


def joined(runs: Iterable[tuple[int, int]]) -> list[Extent]:
    """Runs [start, end) in the same order, with those that continue each other in one extent."""
    extents: list[Extent] = []
    start = end = -1
    for next_start, next_end in runs:
        if next_start != end:
            if end > start:
                extents.append(Extent(start, end))
            start = next_start
        end = next_end
    if end > start:
        extents.append(Extent(start, end))
    return extents
