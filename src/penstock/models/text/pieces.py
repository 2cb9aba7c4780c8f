"""What each token contributes to the text, in bytes.

A character may be spread over several tokens, so text is put together from bytes, and only then decoded.
"""

import json
from functools import lru_cache
from typing import Any

import tokenizers

from penstock.errors import ModelError


class TokenPieces:
    """The bytes of every token of a vocabulary, as its decoder in `tokenizers` defines them."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )
        self._cache: dict[int, bytes] = {}
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        # Text that one token at the very start loses: a space that the tokenizer itself put there.
        self.leading = b""
        steps = _decoder_steps(backend)
        for step in steps:
            self._add_step(step, steps)

    def of(self, token: int, *, skip_special: bool = True) -> bytes:
        """The token's bytes; none for an unknown one, and none for a special one that is skipped."""
        if skip_special and token in self._special:
            return b""
        piece = self._cache.get(token)
        if piece is None:
            piece = self._cache[token] = self._decode(token)
        return piece

    def _decode(self, token: int) -> bytes:
        text = self._backend.id_to_token(token) if 0 <= token < 1 << 32 else None
        if text is None:
            return b""
        if self._byte_level:
            alphabet = _byte_alphabet()
            if all(character in alphabet for character in text):
                return bytes(alphabet[character] for character in text)
            return text.encode()
        for old, new in self._replacements:
            text = text.replace(old, new)
        if self._byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                pass
        return text.encode()

    def _add_step(self, step: dict[str, Any], steps: list[dict[str, Any]]) -> None:
        match step:
            case {"type": "ByteLevel"} if len(steps) == 1:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                self.leading = b" " * start
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
                self._replacements.append((mark, " "))
                self.leading = b"" if scheme == "never" else b" "
            case _:
                raise ModelError(
                    f"the tokenizer's decoder {json.dumps(step)} is not supported; supported are ByteLevel, "
                    "ByteFallback, Fuse, Metaspace, Replace of a string and Strip of one leading space"
                )


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        raise ModelError("the tokenizer has no decoder, so its tokens cannot be turned back into text")
    # A decoder's pickled state is its JSON; the whole tokenizer's would be the vocabulary's megabytes.
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
