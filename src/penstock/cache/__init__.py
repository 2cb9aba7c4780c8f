"""Cache space in pure Python: blocks and extents for keys and values, slots for recurrent states, what of them a
sequence holds, and an index of what could be held again. The tensors are in `penstock.cache.tensors`."""

from penstock.cache.blocks import BlockPool, Extent
from penstock.cache.keys import BlockKey, KeyChain, root_key
from penstock.cache.prefix import PrefixHit, PrefixIndex
from penstock.cache.sequence import SequenceBlocks, SequenceCache, TokenRange
from penstock.cache.states import EMPTY, SequenceState, SlotPool, StateStep, StateWrite
from penstock.plan.grids import BLOCK_TOKENS

__all__ = [
    "BLOCK_TOKENS",
    "EMPTY",
    "BlockKey",
    "BlockPool",
    "Extent",
    "KeyChain",
    "PrefixHit",
    "PrefixIndex",
    "SequenceBlocks",
    "SequenceCache",
    "SequenceState",
    "SlotPool",
    "StateStep",
    "StateWrite",
    "TokenRange",
    "root_key",
]
