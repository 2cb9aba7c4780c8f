"""Names for what a sequence has in its full blocks: a block's key stands for its tokens and all before them."""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from penstock.plan.grids import BLOCK_TOKENS

BlockKey = bytes
KEY_BYTES = 32

_TOKEN = "I"  # four bytes
assert array(_TOKEN).itemsize == 4


def root_key(fingerprint: bytes, salt: str = "", *, is_long: bool = False) -> BlockKey:
    """What a chain of keys begins with: of a model, of those who share with each other, and of long sequences where
    their keys are others."""
    kind = b"penstock long prefix 1\0" if is_long else b"penstock prefix 1\0"
    return sha256(kind + sha256(fingerprint).digest() + salt.encode()).digest()


class KeyChain:
    """The keys of a sequence's full blocks, one after the other.

    Each is a hash of the key before it and of the block's tokens. It is a cryptographic one: two prompts that differ
    never have a key in common, so nobody gets to see what another asked.
    """

    def __init__(self, root: BlockKey) -> None:
        self._last = root
        self.keys: list[BlockKey] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the keys of the blocks that these tokens fill: all that the sequence has by now, from its first on."""
        for start in range(len(self.keys) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = array(_TOKEN, tokens[start : start + BLOCK_TOKENS])
            if sys.byteorder == "big":
                block.byteswap()
            self._last = sha256(self._last + block.tobytes()).digest()
            self.keys.append(self._last)
