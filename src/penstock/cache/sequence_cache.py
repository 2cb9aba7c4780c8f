"""All that one sequence holds of a cache: blocks for its keys and values, slots for its recurrent states."""

from collections import deque
from collections.abc import Sequence

from penstock.cache.blocks import BlockPool
from penstock.cache.sequence import SequenceBlocks
from penstock.cache.states import SequenceState, SlotPool, StateStep


class SequenceCache:
    """Blocks of each K/V group and, for models that have them, recurrent states; they change together.

    A step reserves, writes and commits; one that fails aborts, and all is as it was before. Several steps may be in
    flight:

        tokens [0, num_tokens)             committed: what `abort` goes back to
        tokens [num_tokens, end of step)   one part for each step in flight, committed from the oldest on; a step may
                                           run tokens of the one before it again
    """

    def __init__(self, pools: Sequence[BlockPool], slots: SlotPool | None = None) -> None:
        self.kv_groups = tuple(map(SequenceBlocks, pools))
        self.state = None if slots is None else SequenceState(slots)
        self._steps: deque[int] = deque()  # the ends of the steps in flight, the oldest first

    @property
    def blocks(self) -> SequenceBlocks:
        """The blocks of a model with one K/V group. Where there may be several, use `kv_groups`."""
        (only,) = self.kv_groups
        return only

    @property
    def num_tokens(self) -> int:
        return self.kv_groups[0].num_tokens

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
        self._steps.append(ends[-1])
        return step

    def adopt(self, blocks: Sequence[Sequence[int]], slot: int | None) -> None:
        """Go on with the tokens in these full blocks, as many of each K/V group, and with the state after them.

        All or nothing. Blocks are in use or idle, the slot is in use; the sequence ends with a whole block and has no
        step reserved.
        """
        num_blocks = len(blocks[0])
        if [len(group) for group in blocks] != [num_blocks] * len(self.kv_groups):
            raise ValueError(f"cannot adopt blocks {blocks}: accepted are as many of each K/V group")
        if (slot is None) != (self.state is None or not num_blocks):
            needed = (
                "no slot" if self.state is None or not num_blocks else "the slot with the state after them"
            )
            raise ValueError(f"cannot adopt {num_blocks} blocks with slot {slot}: accepted is {needed}")
        before = self.num_tokens
        adopted: list[SequenceBlocks] = []
        try:
            for own, others in zip(self.kv_groups, blocks, strict=True):
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
        if self._steps and end != self._steps[0]:
            raise ValueError(
                f"cannot commit up to token {end}: accepted is {self._steps[0]}, where the oldest step in flight ends"
            )
        for blocks in self.kv_groups:
            blocks.commit(end)
        if self.state is not None:
            self.state.commit()
        if self._steps:
            self._steps.popleft()

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
        """Keep the first `num_tokens` tokens only, between steps. A recurrent state cannot go back to any but 0."""
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
        end = max(self.num_tokens, *self._steps, 0)
        for blocks in self.kv_groups:
            blocks.unreserve(end)
