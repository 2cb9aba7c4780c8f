"""The block pool: cache space handed out in contiguous runs of blocks, with reference counts."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from penstock.errors import CacheFullError

BLOCK_TOKENS = 64

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
    """Blocks [0, num_blocks). A block is free, or held by as many owners as it has references.

    Free space is a sorted list of runs that neither overlap nor touch, so the work of an allocation grows
    with the number of runs and of blocks handed out, not with the size of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, not {num_blocks}")
        self._references = [0] * num_blocks
        self._runs = [Extent(0, num_blocks)]
        self._num_free = num_blocks

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return self._num_free

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self._num_free

    def allocate(self, num_blocks: int, after: int | None = None) -> list[Extent]:
        """Take `num_blocks` blocks with one reference each, in as few extents as the free space allows.

        All or nothing: raises CacheFullError and changes nothing if there are not enough. `after` is the end
        of the sequence's last extent: free blocks that begin there are taken first, so that the extent grows
        in place. The extents come in the order of use; the last one is where the sequence will grow.
        """
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if after is not None and not (0 < after <= self.num_blocks and self._references[after - 1]):
            raise ValueError(f"no extent in use ends at block {after}")
        if not self.can_allocate(num_blocks):
            raise CacheFullError(
                f"the K/V cache has no room: {num_blocks} blocks of {BLOCK_TOKENS} tokens wanted, "
                f"{self.num_free} free of {self.num_blocks}; use a larger cache or fewer tokens"
            )
        taken: list[Extent] = []
        wanted = num_blocks
        if wanted and after is not None and (run := self._run_starting_at(after)):
            taken.append(Extent(after, min(after + wanted, run.end)))
            self._take(taken[-1])
            wanted -= len(taken[-1])
        while wanted:
            taken.append(self._find_place(wanted, moving=after is not None))
            self._take(taken[-1])
            wanted -= len(taken[-1])
        return taken

    def retain(self, extents: Iterable[Extent]) -> None:
        """Add an owner to blocks that are in use. All or nothing."""
        blocks = self._blocks_of(extents)
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"cannot retain block {block}: it is free")
        for block in blocks:
            self._references[block] += 1

    def release(self, extents: Iterable[Extent]) -> None:
        """Take an owner from each block; a block without owners is free. All or nothing."""
        blocks = self._blocks_of(extents)
        for index, block in enumerate(blocks):
            if not self._references[block]:
                for released in blocks[:index]:
                    self._references[released] += 1
                raise ValueError(f"cannot release block {block}: it is free")
            self._references[block] -= 1
        for run in _runs_of(sorted({block for block in blocks if not self._references[block]})):
            self._give_back(run)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free runs are the unreferenced blocks, sorted and coalesced."""
        for left, right in pairwise(self._runs):
            if right.start < left.end:
                raise AssertionError(f"free runs {left} and {right} overlap or are out of order")
            if right.start == left.end:
                raise AssertionError(f"free runs {left} and {right} touch and should be one")
        negative = [block for block, count in enumerate(self._references) if count < 0]
        if negative:
            raise AssertionError(f"blocks {negative} have fewer than 0 references")
        free = {block for run in self._runs for block in range(run.start, run.end)}
        unreferenced = {block for block, count in enumerate(self._references) if not count}
        if free - unreferenced:
            raise AssertionError(f"blocks {sorted(free - unreferenced)} are in a free run but not free")
        if unreferenced - free:
            raise AssertionError(f"blocks {sorted(unreferenced - free)} leaked: no owner, and in no free run")
        if len(free) != self._num_free:
            raise AssertionError(f"{self._num_free} blocks are counted as free, {len(free)} are")

    def _find_place(self, wanted: int, moving: bool) -> Extent:
        """Where the next extent of `wanted` blocks goes: a part of one free run, or all of the largest run.

        A sequence may outgrow what it asked for, and so may its neighbour, so a place leaves room for both:

            [run.start, place.start)   for the sequence that ends at run.start, if there is one
            [place.start, place.end)   the place
            [place.end, run.end)       for this sequence

        A new sequence takes the smallest run with room, or else the smallest that holds it, so that large
        runs stay whole for long prompts. One that moves on because it could not grow in place takes the
        middle of the largest run: two that grow side by side would otherwise leapfrog, an extent each time.
        """
        runs = [run for run in self._runs if len(run) >= wanted]
        if not runs:
            return max(self._runs, key=len)
        if moving:
            run = max(runs, key=len)
            before = (len(run) - wanted) // 2 if run.start else 0
        else:
            roomy = [run for run in runs if len(run) >= wanted + _ROOM_BLOCKS + _room_before(run)]
            run = min(roomy or runs, key=len)
            before = _room_before(run) if roomy else 0
        return Extent(run.start + before, run.start + before + wanted)

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


def _room_before(run: Extent) -> int:
    """The room to leave at the start of a run. No sequence ends at block 0."""
    return _ROOM_BLOCKS if run.start else 0


def _runs_of(blocks: Sequence[int]) -> list[Extent]:
    """The contiguous runs of sorted block ids."""
    runs: list[Extent] = []
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            runs.append(Extent(blocks[start], blocks[end - 1] + 1))
            start = end
    return runs
