"""Recurrent states: a pool of slots with reference counts, and which of them hold the states of one sequence."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import CacheFullError

# The state before the first token. It is no slot of any pool: reading it gives zeros, and it is never written.
EMPTY = -1


class SlotPool:
    """Slots [0, num_slots). A slot is free, or held by as many owners as it has references.

    The slot that was freed last is handed out first: it is the one most likely to be in a processor's cache,
    and slots that were never used take no memory as long as used ones are free.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a slot pool needs at least 1 slot, not {num_slots}")
        self._references = [0] * num_slots
        self._free = list(reversed(range(num_slots)))  # the next to be handed out is the last

    @property
    def num_slots(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def can_allocate(self, num_slots: int) -> bool:
        return num_slots <= self.num_free

    def allocate(self, num_slots: int) -> tuple[int, ...]:
        """Take `num_slots` slots with one reference each, or raise CacheFullError and change nothing."""
        if num_slots < 0:
            raise ValueError(f"cannot allocate {num_slots} slots")
        if not self.can_allocate(num_slots):
            raise CacheFullError(
                f"the recurrent cache has no room: {num_slots} slots wanted, {self.num_free} free "
                f"of {self.num_slots}; use a cache with more slots, fewer sequences or fewer snapshots"
            )
        slots = tuple(self._free.pop() for _ in range(num_slots))
        for slot in slots:
            self._references[slot] = 1
        return slots

    def retain(self, slot: int) -> None:
        """Add an owner to a slot that is in use."""
        self._check_in_use("retain", slot)
        self._references[slot] += 1

    def release(self, slot: int) -> None:
        """Take an owner from a slot; a slot without owners is free."""
        self._check_in_use("release", slot)
        self._references[slot] -= 1
        if not self._references[slot]:
            self._free.append(slot)

    def num_owners(self, slot: int) -> int:
        return self._references[slot]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free list is the unreferenced slots, each once."""
        assert min(self._references) >= 0, "a slot has fewer than 0 references"
        free = set(self._free)
        assert len(free) == len(self._free), f"the free list {self._free} has a slot more than once"
        unreferenced = {slot for slot, count in enumerate(self._references) if not count}
        assert free <= unreferenced, f"slots {sorted(free - unreferenced)} are in the free list but not free"
        assert unreferenced <= free, (
            f"slots {sorted(unreferenced - free)} leaked: no owner, not in the free list"
        )

    def _check_in_use(self, action: str, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(
                f"cannot {action} slot {slot}: it lies outside the pool's {self.num_slots} slots"
            )
        if not self._references[slot]:
            raise ValueError(f"cannot {action} slot {slot}: it is free")


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


class SequenceState:
    """The recurrent states of one sequence at some of its positions; the last is where it stands.

        slots at `positions`     committed: the oldest step in flight reads one of them, and nobody writes them again
        slots of steps in flight reserved: a step writes its own, and the step after it reads one of these; `commit`
                                 makes the oldest step's slots the states at `positions`, `abort` gives all back
        position 0               the state is EMPTY: always known, and no slot is held for it

    Several steps may be in flight, committed in the order in which they were reserved: with one state a step, so
    many slots and one more. A slot has one reference for each sequence, and for each other owner, that holds it.
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
        return next(reversed(self._slots.values()), EMPTY)

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
        if start and start not in known:
            accepted = ", ".join(map(str, (0, *known)))
            raise ValueError(
                f"cannot begin a step at token {start}: its state is not kept; accepted are {accepted}"
            )
        if not ends or any(left >= right for left, right in pairwise((start, *ends))):
            raise ValueError(
                f"cannot keep states at {list(ends)}: accepted is at least one position, ascending, above {start}"
            )
        slots = self._pool.allocate(len(ends))
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

    def adopt(self, num_tokens: int, slot: int) -> None:
        """Stand after `num_tokens` tokens with the state in this slot, which is in use, and with that state only."""
        if self._steps:
            raise ValueError("cannot adopt a state: a step is reserved; commit or abort it first")
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

    def free(self) -> None:
        """Release everything, steps in flight too. The sequence is then empty and may be used again."""
        self.abort()
        self._replace({})

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
