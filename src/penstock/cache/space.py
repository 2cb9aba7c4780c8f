"""The cache that requests have in common: its tensors, and who owns what of them."""

from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.cache.blocks import BlockPool
from penstock.cache.sequence import SequenceCache
from penstock.cache.states import SlotPool
from penstock.cache.tensors import CacheSpec, CacheTensors
from penstock.plan.admission import WindowRoom
from penstock.plan.grids import BLOCK_TOKENS


class CachingModel(Protocol):
    @property
    def cache_spec(self) -> CacheSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def has_state(self) -> bool:
        """Whether sequences have recurrent states: in these layers, or in those of another stage."""
        ...


@dataclass(frozen=True)
class CacheSpace:
    """The tensors of a cache, and the pools that say who owns which block of each K/V group, and which slot."""

    tensors: CacheTensors
    pools: tuple[BlockPool, ...]  # one for each K/V group
    slots: SlotPool | None

    @classmethod
    def for_tokens(
        cls, model: CachingModel, num_tokens: int, *, num_slots: int = 2, windows: WindowRoom | None = None
    ) -> "CacheSpace":
        """Space for sequences of so many tokens together. A step needs a slot to read and one for each state that it
        keeps; each further step in flight needs as many as it keeps. Layers with a window have the room of
        `windows`, or as much as others."""
        spec = model.cache_spec
        num_blocks = spec.num_blocks(-(-num_tokens // BLOCK_TOKENS), windows or WindowRoom())
        return cls(
            CacheTensors.of(spec, num_blocks, num_slots, model.device),
            tuple(map(BlockPool, num_blocks)),
            SlotPool(num_slots) if model.has_state else None,
        )

    @property
    def blocks(self) -> BlockPool:
        """Those of the first K/V group, which has all tokens of a sequence."""
        return self.pools[0]

    @property
    def windows(self) -> tuple[BlockPool, ...]:
        """Those of the K/V groups with a window."""
        groups = zip(self.tensors.kv_groups, self.pools, strict=True)
        return tuple(pool for group, pool in groups if group.spec.window)

    @property
    def keeps_prefix(self) -> bool:
        """Whether a sequence may be cut back to a shorter one, and gone on with at any of its blocks."""
        return self.slots is None and not self.windows

    def has_room(self, num_tokens: int, num_slots: int) -> bool:
        """Whether a sequence of so many tokens, and so many of its states, can be taken in."""
        has_slots = self.slots is None or self.slots.num_free >= num_slots
        # Pools of windows suffice for whoever runs.
        groups = zip(self.tensors.kv_groups, self.pools, strict=True)
        whole = (pool for group, pool in groups if not group.spec.window)
        return has_slots and all(pool.num_available * BLOCK_TOKENS >= num_tokens for pool in whole)

    def new_sequence(self, *, is_long: bool = False, num_tokens: int = 0) -> SequenceCache:
        """Of so many tokens in the end, if that is known."""
        windows = [group.spec.window for group in self.tensors.kv_groups]
        return SequenceCache(self.pools, self.slots, windows, is_long=is_long, num_tokens=num_tokens)
