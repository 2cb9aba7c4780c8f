"""Cache space: blocks, extents and sequences in pure Python. The tensors are in `penstock.cache.kv`."""

from penstock.cache.blocks import BLOCK_TOKENS, BlockPool, Extent
from penstock.cache.sequence import SequenceBlocks, TokenRange

__all__ = ["BLOCK_TOKENS", "BlockPool", "Extent", "SequenceBlocks", "TokenRange"]
