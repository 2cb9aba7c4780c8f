"""The cache that requests have in common: its tensors, and who owns what of them."""

from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.cache.blocks import BlockPool
from penstock.cache.sequence import SequenceCache
from penstock.cache.states import SlotPool
from penstock.cache.tensors import CacheSpec, CacheTensors
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
    def for_tokens(cls, model: CachingModel, num_tokens: int, *, num_slots: int = 2) -> "CacheSpace":
        """Space for sequences of so many tokens together. A step needs a slot to read and one for each state that it
        keeps; each further step in flight needs as many as it keeps."""
        spec = model.cache_spec
        num_blocks = [-(-num_tokens // BLOCK_TOKENS)] * len(spec.kv_groups)
        return cls(
            CacheTensors.of(spec, num_blocks, num_slots, model.device),
            tuple(map(BlockPool, num_blocks)),
            SlotPool(num_slots) if model.has_state else None,
        )

    @property
    def blocks(self) -> BlockPool:
        """The blocks of a model with one K/V group. Where there may be several, use `pools`."""
        (only,) = self.pools
        return only

    def has_room(self, num_tokens: int, num_slots: int) -> bool:
        """Whether a sequence of so many tokens, and so many of its states, can be taken in."""
        has_slots = self.slots is None or self.slots.num_free >= num_slots
        return has_slots and all(pool.num_available * BLOCK_TOKENS >= num_tokens for pool in self.pools)

    def new_sequence(self) -> SequenceCache:
        return SequenceCache(self.pools, self.slots)
