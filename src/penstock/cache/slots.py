"""The slot pool: places for recurrent states, handed out one by one, with reference counts."""

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

    def allocate(self) -> int:
        """Take a slot with one reference, or raise CacheFullError and change nothing."""
        (slot,) = self.allocate_many(1)
        return slot

    def allocate_many(self, num_slots: int) -> tuple[int, ...]:
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
        negative = [slot for slot, count in enumerate(self._references) if count < 0]
        if negative:
            raise AssertionError(f"slots {negative} have fewer than 0 references")
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError(f"the free list {self._free} has a slot more than once")
        unreferenced = {slot for slot, count in enumerate(self._references) if not count}
        if free - unreferenced:
            raise AssertionError(f"slots {sorted(free - unreferenced)} are in the free list but not free")
        if unreferenced - free:
            raise AssertionError(
                f"slots {sorted(unreferenced - free)} leaked: no owner, and not in the free list"
            )

    def _check_in_use(self, action: str, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(
                f"cannot {action} slot {slot}: it lies outside the pool's {self.num_slots} slots"
            )
        if not self._references[slot]:
            raise ValueError(f"cannot {action} slot {slot}: it is free")
