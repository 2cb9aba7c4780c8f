"""Cache space in pure Python: blocks and extents for keys and values, slots for recurrent states, and what of
them a sequence holds. The tensors are in `penstock.cache.tensors`."""

from penstock.cache.blocks import BLOCK_TOKENS, BlockPool, Extent
from penstock.cache.held import SequenceCache, SequenceSnapshot
from penstock.cache.sequence import SequenceBlocks, TokenRange
from penstock.cache.slots import EMPTY, SlotPool
from penstock.cache.state import SequenceState, StateSnapshot, StateStep, StateWrite

__all__ = [
    "BLOCK_TOKENS",
    "EMPTY",
    "BlockPool",
    "Extent",
    "SequenceBlocks",
    "SequenceCache",
    "SequenceSnapshot",
    "SequenceState",
    "SlotPool",
    "StateSnapshot",
    "StateStep",
    "StateWrite",
    "TokenRange",
]
