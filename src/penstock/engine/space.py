"""The cache that requests have in common: its tensors, and who owns what of them."""

from dataclasses import dataclass

from penstock.cache import BLOCK_TOKENS, BlockPool, SequenceCache, SlotPool
from penstock.cache.tensors import CacheTensors
from penstock.models.decoder import Decoder


@dataclass(frozen=True)
class CacheSpace:
    """The tensors of a cache, and the pools that say who owns which block and which slot of them."""

    tensors: CacheTensors
    blocks: BlockPool
    slots: SlotPool | None

    @classmethod
    def for_tokens(cls, model: Decoder, num_tokens: int, *, num_slots: int = 2) -> "CacheSpace":
        """Space for sequences of so many tokens together; a step needs a slot to read and one for each state that
        it keeps."""
        num_blocks = -(-num_tokens // BLOCK_TOKENS)
        spec = model.cache_spec
        return cls(
            CacheTensors.of(spec, num_blocks, num_slots, model.device),
            BlockPool(num_blocks),
            SlotPool(num_slots) if spec.recurrent else None,
        )

    def has_room(self, num_tokens: int, num_slots: int) -> bool:
        """Whether a sequence of so many tokens, and so many of its states, can be taken in."""
        has_slots = self.slots is None or self.slots.num_free >= num_slots
        return has_slots and self.blocks.num_available * BLOCK_TOKENS >= num_tokens

    def new_sequence(self) -> SequenceCache:
        return SequenceCache(self.blocks, self.slots)
