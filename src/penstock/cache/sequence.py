"""One sequence's part of a cache: the blocks of its tokens in each group of layers, and its recurrent states."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cache.blocks import BlockPool, Extent, extents_of, joined
from penstock.cache.states import SequenceState, SlotPool, StateStep
from penstock.plan.grids import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Places [start, end) of the pool, counted in tokens: block id * BLOCK_TOKENS + offset in the block."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class SequenceBlocks:
    """The blocks of one sequence, as a short list of extents.

        tokens [0, num_tokens)                 committed: a step reads them
        tokens [num_tokens, capacity_tokens)   reserved: steps in flight write them, then commit
        blocks [num_gone, num_blocks)          one reference each, held until `unreserve`, `truncate` or `free`
        blocks [0, num_gone)                   were given back by `release_before`: they lie behind the layers' window

    A step reserves, writes and commits; a later one may reserve before that. One that fails does not commit: the
    length is what it was, and `unreserve` gives back what was reserved. Whole blocks of another sequence may be
    adopted; since a step writes behind the length only, they stay as they are.
    """

    def __init__(self, pool: BlockPool, num_tokens: int = 0) -> None:
        """Of a sequence that is expected to have so many tokens, if that is known: it lies in one place if it can."""
        self._pool = pool
        self._num_expected = _num_blocks_for(num_tokens)
        self._extents: tuple[Extent, ...] = ()
        self._num_gone = 0
        self._num_blocks = 0  # those that are gone, and of the extents
        self._num_tokens = 0

    @property
    def extents(self) -> tuple[Extent, ...]:
        return self._extents

    @property
    def block_ids(self) -> list[int]:
        """The blocks that it holds, one by one, in the order of the tokens."""
        return [block for extent in self._extents for block in range(extent.start, extent.end)]

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_gone(self) -> int:
        """Blocks at its beginning that were given back."""
        return self._num_gone

    @property
    def num_blocks(self) -> int:
        """Of all its tokens, those that are gone too."""
        return self._num_blocks

    @property
    def capacity_tokens(self) -> int:
        return self._num_blocks * BLOCK_TOKENS

    def reserve(self, num_tokens: int) -> None:
        """Make room for at least `num_tokens` tokens in total, or raise CacheFullError and change nothing."""
        wanted = _num_blocks_for(num_tokens)
        if wanted > self._num_blocks:
            after = self._extents[-1].end if self._extents else None
            num_later = max(self._num_expected - wanted, 0)
            taken = self._pool.allocate(wanted - self._num_blocks, after, num_later)
            self._set_extents((*self._extents, *taken))

    def adopt(self, blocks: Sequence[int]) -> None:
        """Go on with the tokens in these blocks, which are in use or idle and full. All or nothing.

        The sequence ends with a whole block, and nothing is reserved after it.
        """
        if self._num_tokens != self.capacity_tokens:
            raise ValueError(
                f"cannot adopt blocks after token {self._num_tokens}: accepted is the end of the last block held, "
                f"{self.capacity_tokens}; fill it, or give back what is reserved"
            )
        if len({*self.block_ids, *blocks}) < self.num_blocks + len(blocks):
            raise ValueError(
                f"cannot adopt blocks {list(blocks)}: one of them would serve two places of the sequence"
            )
        adopted = extents_of(blocks)
        self._pool.retain(adopted)
        self._set_extents((*self._extents, *adopted))
        self._num_tokens += len(blocks) * BLOCK_TOKENS

    def adopt_window(self, num_tokens: int, blocks: Sequence[int]) -> None:
        """Stand after `num_tokens` tokens, whole blocks, of which these are the last: they are in use or idle, and
        full. All that it held is given back. All or nothing."""
        num_gone = num_tokens // BLOCK_TOKENS - len(blocks)
        if num_tokens % BLOCK_TOKENS or num_gone < 0 or self._num_tokens != self.capacity_tokens:
            raise ValueError(
                f"cannot adopt {len(blocks)} blocks before token {num_tokens}: accepted are whole blocks, where "
                "nothing is reserved"
            )
        before, adopted = self._extents, extents_of(blocks)
        self._pool.retain(adopted)
        self._pool.release(before)
        self._num_gone = num_gone
        self._set_extents(adopted)
        self._num_tokens = num_tokens

    def release_before(self, token: int) -> None:
        """Give back the whole blocks of committed tokens before this one, which no step reads any more."""
        num_gone = min(token, self._num_tokens) // BLOCK_TOKENS
        if num_gone > self._num_gone:
            released, kept = _split(self._extents, num_gone - self._num_gone)
            self._pool.release(released)
            self._num_gone = num_gone
            self._set_extents(kept)

    def commit(self, end: int) -> None:
        """Make `end` the length: tokens [0, end) are written. It never shrinks nor exceeds the capacity."""
        if not self._num_tokens <= end <= self.capacity_tokens:
            raise ValueError(
                f"cannot commit up to token {end}: accepted is {self._num_tokens} (the length) "
                f"to {self.capacity_tokens} (the capacity)"
            )
        self._num_tokens = end

    def unreserve(self, num_tokens: int) -> None:
        """Release the reserved blocks that the first `num_tokens` tokens do not need: no fewer than the length."""
        if num_tokens < self._num_tokens:
            raise ValueError(
                f"cannot release blocks after token {num_tokens}: accepted is {self._num_tokens} (the length) or more"
            )
        self._keep_first(_num_blocks_for(num_tokens))

    def truncate(self, num_tokens: int) -> None:
        """Shorten to `num_tokens` tokens and release every block that they do not need.

        What follows would be written over the rest of the last block, so that one must be the sequence's alone: a
        length within a block that a prefix index keeps, or that others adopted, is refused.
        """
        self.check_cut(num_tokens)
        if num_tokens == 0:
            self._pool.release(self._extents)
            self._num_gone = 0
            self._set_extents(())
        else:
            self._keep_first(_num_blocks_for(num_tokens))
        self._num_tokens = num_tokens

    def check_cut(self, num_tokens: int) -> None:
        """ValueError where `truncate` would refuse this length."""
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(
                f"cannot truncate to {num_tokens} tokens: accepted is 0 to {self._num_tokens} (the length)"
            )
        if num_tokens == self._num_tokens or num_tokens == 0:
            return
        if self._num_gone:
            raise ValueError(
                f"cannot truncate to {num_tokens} tokens: what lay behind its window is gone; accepted are 0 and "
                f"{self._num_tokens} (the length)"
            )
        if num_tokens % BLOCK_TOKENS == 0:
            return
        (place,) = self.locate(num_tokens, num_tokens + 1)
        block = place.start // BLOCK_TOKENS
        if not self._pool.can_write(block):
            start = num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
            raise ValueError(
                f"cannot truncate to {num_tokens} tokens: block {block}, which has tokens "
                f"[{start}, {start + BLOCK_TOKENS}), is shared; accepted are multiples of {BLOCK_TOKENS}"
            )

    def free(self) -> None:
        """Release everything. The sequence is then empty and may be used again."""
        self.truncate(0)

    def locate(self, start: int, end: int) -> list[TokenRange]:
        """The places of tokens [start, end), committed or reserved, in order: one range per extent."""
        first_token = self._num_gone * BLOCK_TOKENS
        if not first_token <= start <= end <= self.capacity_tokens:
            raise ValueError(
                f"tokens [{start}, {end}) have no places: accepted is a range within "
                f"[{first_token}, {self.capacity_tokens}) (the capacity)"
            )
        places: list[TokenRange] = []
        extent_start = first_token
        for extent in self._extents:
            extent_end = extent_start + (extent.end - extent.start) * BLOCK_TOKENS
            # A decode asks twice, for each request: `max` and `min` would take half of its time.
            first = start if start > extent_start else extent_start
            last = end if end < extent_end else extent_end
            if first < last:
                shift = extent.start * BLOCK_TOKENS - extent_start
                places.append(TokenRange(first + shift, last + shift))
            extent_start = extent_end
        return places

    def _set_extents(self, extents: Sequence[Extent]) -> None:
        self._extents = tuple(joined((extent.start, extent.end) for extent in extents))
        self._num_blocks = self._num_gone + sum(map(len, self._extents))

    def _keep_first(self, num_blocks: int) -> None:
        """Release all blocks but the first ones."""
        kept, released = _split(self._extents, num_blocks - self._num_gone)
        self._pool.release(released)
        self._set_extents(kept)


def _split(extents: Sequence[Extent], num_first: int) -> tuple[list[Extent], list[Extent]]:
    """The first so many blocks, and the others."""
    first: list[Extent] = []
    others: list[Extent] = []
    for extent in extents:
        cut = min(extent.start + num_first, extent.end)
        if extent.start < cut:
            first.append(Extent(extent.start, cut))
        if cut < extent.end:
            others.append(Extent(cut, extent.end))
        num_first -= cut - extent.start
    return first, others


def _num_blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight, over tokens [start, end)."""

    start: int
    end: int


class SequenceCache:
    """Blocks of each K/V group and, for models that have them, recurrent states; they change together.

    A step reserves, writes and commits; one that fails aborts, and all is as it was before. Several steps may be in
    flight:

        tokens [0, num_tokens)             committed: what `abort` goes back to
        tokens [num_tokens, end of step)   one part for each step in flight, committed from the oldest on; a step may
                                           run tokens of the one before it again

    Of a group with a window, `slide` gives the blocks behind it back once a step is committed. What is kept reaches
    back from the last whole block: from there the sequence may be gone on with by another.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        slots: SlotPool | None = None,
        windows: Sequence[int] = (),
        *,
        is_long: bool = False,
        num_tokens: int = 0,
    ) -> None:
        """`windows` are the groups', 0 for all tokens; none has one where there are none. Keys of `is_long` sequences
        are other than those of the same tokens in others (`ModelConfig.is_long`). `num_tokens` is how long it is
        expected to become, if that is known."""
        self.is_long = is_long
        self._windows = tuple(windows) or (0,) * len(pools)
        self.kv_groups = tuple(
            SequenceBlocks(pool, 0 if window else num_tokens)
            for pool, window in zip(pools, self._windows, strict=True)
        )
        self.state = None if slots is None else SequenceState(slots)
        self._steps: deque[_Step] = deque()  # in flight, the oldest first

    @property
    def blocks(self) -> SequenceBlocks:
        """The first K/V group's, which has all tokens."""
        return self.kv_groups[0]

    @property
    def windows(self) -> tuple[SequenceBlocks, ...]:
        """The other K/V groups', of which some have a window."""
        return self.kv_groups[1:]

    @property
    def num_tokens(self) -> int:
        return self.kv_groups[0].num_tokens

    @property
    def places(self) -> list[list[TokenRange]]:
        """Of its tokens in each K/V group, as far as they are not gone."""
        return [
            blocks.locate(min(blocks.num_gone * BLOCK_TOKENS, blocks.num_tokens), blocks.num_tokens)
            for blocks in self.kv_groups
        ]

    @property
    def keeps_prefix(self) -> bool:
        """Whether it may be cut back to a shorter one, and gone on with at any of its blocks."""
        return self.state is None and not any(self._windows)

    @property
    def num_in_flight(self) -> int:
        """Steps that are reserved and not committed."""
        return len(self._steps)

    def reserve(self, start: int, ends: Sequence[int]) -> StateStep | None:
        """Make room for a step over tokens [start, ends[-1]) and for the states after each of `ends`. All or nothing.

        Others may be in flight.
        """
        step = None if self.state is None else self.state.reserve(start, ends)
        try:
            for blocks in self.kv_groups:
                blocks.reserve(ends[-1])
        except BaseException:
            self._unreserve()
            if self.state is not None:
                self.state.withdraw()
            raise
        self._steps.append(_Step(start, ends[-1]))
        return step

    def make_room(self, end: int) -> None:
        """Have room for tokens up to `end`, beyond those of the steps in flight."""
        for blocks in self.kv_groups:
            blocks.reserve(end)

    def trim(self) -> None:
        """Give back room that no step in flight has."""
        end = self._steps[-1].end if self._steps else self.num_tokens
        if any(blocks.capacity_tokens - end >= BLOCK_TOKENS for blocks in self.kv_groups):
            self._unreserve()

    def extend(self, end: int) -> None:
        """The one step in flight has gone on, and ends there."""
        (step,) = self._steps
        self.make_room(end)
        self._steps[0] = _Step(step.start, end)

    def adopt(self, blocks: Sequence[Sequence[int]], slot: int | None) -> None:
        """Go on with the tokens in these full blocks, as many of each K/V group, and with the state after them. Of a
        group with a window, they are the last ones before the new end, as many as its window needs.

        All or nothing. Blocks are in use or idle, the slot is in use; the sequence ends with a whole block and has no
        step reserved.
        """
        num_blocks = len(blocks[0])
        end = self.num_tokens + num_blocks * BLOCK_TOKENS
        needed = [
            min(-(-(window - 1) // BLOCK_TOKENS), end // BLOCK_TOKENS) if window else num_blocks
            for window in self._windows
        ]
        if [len(group) for group in blocks] != needed:
            raise ValueError(
                f"cannot adopt blocks {blocks}: accepted are as many of each K/V group, {needed}"
            )
        if (slot is None) != (self.state is None or not num_blocks):
            accepted = (
                "no slot" if self.state is None or not num_blocks else "the slot with the state after them"
            )
            raise ValueError(f"cannot adopt {num_blocks} blocks with slot {slot}: accepted is {accepted}")
        if not num_blocks:
            return
        before = self.num_tokens
        adopted: list[SequenceBlocks] = []
        # Those with windows come last: what they held is gone then.
        groups = sorted(
            zip(self.kv_groups, self._windows, blocks, strict=True), key=lambda group: bool(group[1])
        )
        try:
            for own, window, others in groups:
                if window:
                    own.adopt_window(end, others)
                else:
                    own.adopt(others)
                    adopted.append(own)
            if self.state is not None and slot is not None:
                self.state.adopt(self.num_tokens, slot)
        except BaseException:
            for own in adopted:
                own.truncate(before)
            raise

    def commit(self, end: int) -> None:
        """The oldest step's tokens are written: the sequence is `end` tokens long, no fewer than before."""
        if self._steps and end != self._steps[0].end:
            raise ValueError(
                f"cannot commit up to token {end}: accepted is {self._steps[0].end}, where the oldest step in flight "
                "ends"
            )
        for blocks in self.kv_groups:
            blocks.commit(end)
        if self.state is not None:
            self.state.commit()
        if self._steps:
            self._steps.popleft()

    def slide(self, resumes_at: int | None = None) -> None:
        """Give back the blocks that lie behind the windows of whatever comes next: the steps in flight, and one that
        goes on from the last whole block or, where that is earlier, from `resumes_at`."""
        if not any(self._windows):
            return
        last = self.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        start = min(last, *(step.start for step in self._steps), last if resumes_at is None else resumes_at)
        for blocks, window in zip(self.kv_groups, self._windows, strict=True):
            if window:
                blocks.release_before(max(start - window + 1, 0))

    def withdraw(self) -> None:
        """Take back the newest step, which was not run. Those before it stay in flight."""
        if not self._steps:
            raise ValueError("cannot withdraw a step: none is reserved")
        self._steps.pop()
        self._unreserve()
        if self.state is not None:
            self.state.withdraw()

    def abort(self) -> None:
        """Leave everything as it was before the oldest step in flight."""
        self._steps.clear()
        self._unreserve()
        if self.state is not None:
            self.state.abort()

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens only, between steps. A recurrent state, or a window behind which blocks
        were given back, cannot go back to any but 0."""
        if self._steps:
            raise ValueError(
                f"cannot cut to {num_tokens} tokens: a step is reserved; commit or abort it first"
            )
        if num_tokens and self.state is not None:
            raise ValueError(
                f"cannot cut a sequence with recurrent state back to token {num_tokens}, only to 0"
            )
        for blocks in self.kv_groups:
            blocks.check_cut(num_tokens)
        for blocks in self.kv_groups:
            blocks.truncate(num_tokens)
        if self.state is not None:
            self.state.free()

    def free(self) -> None:
        """Release everything, steps in flight too. The sequence is then empty and may be used again."""
        self._steps.clear()
        self.cut(0)

    def _unreserve(self) -> None:
        """Keep room for the steps in flight only."""
        end = max(self.num_tokens, *(step.end for step in self._steps), 0)
        for blocks in self.kv_groups:
            blocks.unreserve(end)
