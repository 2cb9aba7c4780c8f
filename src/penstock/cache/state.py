"""One sequence's recurrent states: which slots hold them, and after how many tokens each was."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

from penstock.cache.slots import EMPTY, SlotPool


@dataclass(frozen=True, slots=True)
class StateWrite:
    """The state after tokens [0, end) is to be written into this slot."""

    end: int
    slot: int


@dataclass(frozen=True, slots=True)
class StateStep:
    """What a step does with slots: it begins with the state in `read` and fills each of `writes`, in order."""

    read: int  # EMPTY if the step begins at token 0
    writes: tuple[StateWrite, ...]


class StateSnapshot:
    """A state that stays as it is until `release`, whatever becomes of its sequence. It is a reference, no copy."""

    def __init__(self, pool: SlotPool, num_tokens: int, slot: int) -> None:
        if slot != EMPTY:
            pool.retain(slot)
        self.num_tokens = num_tokens
        self._pool = pool
        self._slot = slot
        self._released = False

    @property
    def slot(self) -> int:
        """EMPTY if the snapshot is of a sequence without tokens."""
        self._check_live()
        return self._slot

    def is_of(self, pool: SlotPool) -> bool:
        return self._pool is pool

    def release(self) -> None:
        """Give the state up. Once only: a second owner may hold it by then."""
        self._check_live()
        self._released = True
        if self._slot != EMPTY:
            self._pool.release(self._slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _check_live(self) -> None:
        if self._released:
            raise ValueError(f"the snapshot at token {self.num_tokens} was released; take a new one")


class SequenceState:
    """The recurrent states of one sequence at some of its positions; the last is where it stands.

        slots at `positions`     committed: the oldest step in flight reads one of them, and nobody writes them again
        slots of steps in flight reserved: a step writes its own, and the step after it reads one of these; `commit`
                                 makes the oldest step's slots the states at `positions`, `abort` gives all back
        position 0               the state is EMPTY: always known, and no slot is held for it

    Several steps may be in flight, committed in the order in which they were reserved: with one state a step, so
    many slots and one more. A slot has one reference for each sequence and each snapshot that holds it.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._slots: dict[int, int] = {}  # position -> slot, positions ascending, all above 0
        self._steps: deque[StateStep] = deque()  # in flight, the oldest first

    @property
    def num_tokens(self) -> int:
        return next(reversed(self._slots), 0)

    @property
    def slot(self) -> int:
        """The state where the sequence stands: EMPTY before the first token."""
        return self._slot_at(self.num_tokens)

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions above 0 whose states are kept, ascending. The last is `num_tokens`."""
        return tuple(self._slots)

    @property
    def slots(self) -> dict[int, int]:
        """The slot of each of `positions`."""
        return dict(self._slots)

    def reserve(self, start: int, ends: Sequence[int]) -> StateStep:
        """Take slots for a step that runs tokens [start, ends[-1]) and keeps the state at each of `ends`.

        All or nothing: raises CacheFullError and changes nothing if there are not enough. The step begins where the
        step before it ends, in flight or committed, or, if it runs some tokens again, at another position whose state
        that one keeps, or at 0.
        """
        known = self._known
        _check_known("begin a step at", start, known)
        if not ends or any(left >= right for left, right in pairwise((start, *ends))):
            raise ValueError(
                f"cannot keep states at {list(ends)}: accepted is at least one position, ascending, above {start}"
            )
        slots = self._pool.allocate_many(len(ends))
        writes = tuple(StateWrite(end, slot) for end, slot in zip(ends, slots, strict=True))
        self._steps.append(StateStep(known[start] if start else EMPTY, writes))
        return self._steps[-1]

    def commit(self) -> None:
        """The states that the oldest step wrote are the sequence's, and those it had before are released."""
        if not self._steps:
            raise ValueError("cannot commit: no step is reserved")
        self._replace({write.end: write.slot for write in self._steps.popleft().writes})

    def withdraw(self) -> None:
        """Give the slots of the newest step back, which was not run. Those before it stay in flight."""
        if not self._steps:
            raise ValueError("cannot withdraw a step: none is reserved")
        self._release(write.slot for write in self._steps.pop().writes)

    def abort(self) -> None:
        """Give the slots of all steps in flight back, if there are any: all is as it was before the oldest."""
        while self._steps:
            self.withdraw()

    def snapshot(self) -> StateSnapshot:
        """The committed state where the sequence stands, to be released by the caller."""
        return StateSnapshot(self._pool, self.num_tokens, self.slot)

    def restore(self, snapshot: StateSnapshot) -> None:
        """Stand where the snapshot was taken, from this sequence or another, with that state only."""
        self._check_no_step("restore a snapshot")
        if not snapshot.is_of(self._pool):
            raise ValueError("cannot restore a snapshot of another pool: its slots are not this pool's")
        restored = {} if snapshot.slot == EMPTY else {snapshot.num_tokens: snapshot.slot}
        # Before the release: it may be the sequence's own slot.
        for slot in restored.values():
            self._pool.retain(slot)
        self._replace(restored)

    def adopt(self, num_tokens: int, slot: int) -> None:
        """Stand after `num_tokens` tokens with the state in this slot, which is in use, and with that state only."""
        self._check_no_step("adopt a state")
        if num_tokens <= self.num_tokens:
            raise ValueError(
                f"cannot adopt the state after {num_tokens} tokens: accepted is more than {self.num_tokens}"
            )
        self._pool.retain(slot)
        self._replace({num_tokens: slot})

    def keep_last(self) -> None:
        """Release every state but the one where the sequence stands, and the one that the oldest step reads."""
        needed = {self.slot, *(step.read for step in self._steps)}
        for position in [position for position, slot in self._slots.items() if slot not in needed]:
            self._pool.release(self._slots.pop(position))

    def rewind(self, num_tokens: int) -> None:
        """Go back to a position that is kept, or to 0, and release the states after it."""
        self._check_no_step("rewind")
        _check_known("rewind to", num_tokens, self._slots)
        self._release(slot for position, slot in self._slots.items() if position > num_tokens)
        self._slots = {position: slot for position, slot in self._slots.items() if position <= num_tokens}

    def free(self) -> None:
        """Release everything, steps in flight too. The sequence is then empty and may be used again."""
        self.abort()
        self.rewind(0)

    def _slot_at(self, position: int) -> int:
        return self._slots[position] if position else EMPTY

    def _replace(self, slots: dict[int, int]) -> None:
        """Hold these slots, whose references are the sequence's already, in place of those held now."""
        replaced, self._slots = self._slots, slots
        self._release(replaced.values())

    def _release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._pool.release(slot)

    @property
    def _known(self) -> dict[int, int]:
        """The states from which the next step may begin: of the newest step in flight, else the committed ones."""
        return {write.end: write.slot for write in self._steps[-1].writes} if self._steps else self._slots

    def _check_no_step(self, action: str) -> None:
        if self._steps:
            raise ValueError(f"cannot {action}: a step is reserved; commit or abort it first")


def _check_known(action: str, position: int, known: Collection[int]) -> None:
    if position and position not in known:
        accepted = ", ".join(map(str, (0, *known)))
        raise ValueError(f"cannot {action} token {position}: its state is not kept; accepted are {accepted}")
