"""All that one sequence holds of a cache: blocks for its keys and values, slots for its recurrent states."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cache.blocks import BlockPool
from penstock.cache.sequence import SequenceBlocks
from penstock.cache.slots import SlotPool
from penstock.cache.state import SequenceState, StateSnapshot, StateStep


@dataclass(frozen=True)
class SequenceSnapshot:
    """A position of a sequence to come back to. Keys and values before it stay in their blocks; the state is held."""

    num_tokens: int
    state: StateSnapshot | None
    num_returns: int  # how often the sequence had gone back by then

    def release(self) -> None:
        if self.state is not None:
            self.state.release()


class SequenceCache:
    """Blocks and, for models that have them, recurrent states; they change together.

    A step reserves, writes and commits; one that fails aborts, and all is as it was before. Several steps may be in
    flight:

        tokens [0, num_tokens)             committed: what `abort` goes back to
        tokens [num_tokens, end of step)   one part for each step in flight, committed from the oldest on; a step may
                                           run tokens of the one before it again
    """

    def __init__(self, blocks: BlockPool, slots: SlotPool | None = None) -> None:
        self.blocks = SequenceBlocks(blocks)
        self.state = None if slots is None else SequenceState(slots)
        self._steps: deque[int] = deque()  # the ends of the steps in flight, the oldest first
        self._returns: list[int] = []  # the positions that the sequence went back to

    @property
    def num_tokens(self) -> int:
        return self.blocks.num_tokens

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
            self.blocks.reserve(ends[-1])
        except BaseException:
            if self.state is not None:
                self.state.withdraw()
            raise
        self._steps.append(ends[-1])
        return step

    def adopt(self, blocks: Sequence[int], slot: int | None) -> None:
        """Go on with the tokens in these full blocks, and with the state after them in this slot. All or nothing.

        Blocks are in use or idle, the slot is in use; the sequence ends with a whole block and has no step reserved.
        """
        if (slot is None) != (self.state is None or not blocks):
            needed = "no slot" if self.state is None or not blocks else "the slot with the state after them"
            raise ValueError(f"cannot adopt {len(blocks)} blocks with slot {slot}: accepted is {needed}")
        before = self.num_tokens
        self.blocks.adopt(blocks)
        if self.state is not None and slot is not None:
            try:
                self.state.adopt(self.num_tokens, slot)
            except BaseException:
                self.blocks.truncate(before)
                raise

    def commit(self, end: int) -> None:
        """The oldest step's tokens are written: the sequence is `end` tokens long, no fewer than before."""
        if self._steps and end != self._steps[0]:
            raise ValueError(
                f"cannot commit up to token {end}: accepted is {self._steps[0]}, where the oldest step in flight ends"
            )
        self.blocks.commit(end)
        if self.state is not None:
            self.state.commit()
        if self._steps:
            self._steps.popleft()

    def withdraw(self) -> None:
        """Take back the newest step, which was not run. Those before it stay in flight."""
        if not self._steps:
            raise ValueError("cannot withdraw a step: none is reserved")
        self._steps.pop()
        self.blocks.unreserve(max(self.num_tokens, *self._steps, 0))
        if self.state is not None:
            self.state.withdraw()

    def abort(self) -> None:
        """Leave everything as it was before the oldest step in flight."""
        self._steps.clear()
        self.blocks.unreserve(self.num_tokens)
        if self.state is not None:
            self.state.abort()

    def snapshot(self) -> SequenceSnapshot:
        """Where the sequence stands, to be released by the caller."""
        state = None if self.state is None else self.state.snapshot()
        return SequenceSnapshot(self.num_tokens, state, len(self._returns))

    def restore(self, snapshot: SequenceSnapshot) -> None:
        """Go back to a snapshot of this sequence, which has not been shorter since."""
        shortest = min((self.num_tokens, *self._returns[snapshot.num_returns :]))
        if snapshot.num_tokens > shortest:
            raise ValueError(
                f"cannot restore a snapshot at token {snapshot.num_tokens}: "
                f"the sequence went back to {shortest} since"
            )
        if (self.state is None) != (snapshot.state is None):
            raise ValueError("cannot restore a snapshot of another model's sequence")
        if self.state is not None and snapshot.state is not None:
            self.state.restore(snapshot.state)
        self.blocks.truncate(snapshot.num_tokens)
        self._returns.append(snapshot.num_tokens)

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens only, between steps. A recurrent state cannot go back to any but 0."""
        if self._steps:
            raise ValueError(
                f"cannot cut to {num_tokens} tokens: a step is reserved; commit or abort it first"
            )
        if num_tokens == 0:
            self.free()
        elif self.state is not None:
            raise ValueError(
                f"cannot cut a sequence with recurrent state back to token {num_tokens}, only to 0"
            )
        else:
            self.blocks.truncate(num_tokens)
            self._returns.append(num_tokens)

    def free(self) -> None:
        """Release everything. The sequence is then empty and may be used again."""
        self._returns.append(0)
        self._steps.clear()
        self.blocks.free()
        if self.state is not None:
            self.state.free()
