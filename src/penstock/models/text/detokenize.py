"""Text from tokens as they come, one at a time."""

import codecs

from penstock.models.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turns tokens into text without ever emitting a part of a character.

    The pieces, with `finish()`'s, add up to `tokenizer.decode` of all tokens. Each token costs its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = tokenizer.pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True

    def push(self, token: int) -> str:
        """The characters that this token completes; often a word, sometimes none."""
        piece = self._pieces.of(token)
        if self._at_start and piece:
            piece = piece.removeprefix(self._pieces.leading)
            self._at_start = False
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left at the end: a replacement character where the last one never became whole."""
        return self._decoder.decode(b"", final=True)
