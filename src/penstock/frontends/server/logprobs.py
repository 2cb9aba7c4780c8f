"""Log-probabilities in the two shapes of OpenAI's API."""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from penstock.engine.events import RankedToken, TokenGenerated
from penstock.models.text.pieces import TokenPieces

# What stands for a probability of 0, since JSON has no infinity.
LEAST = -9999.0


class LogprobWriter(Protocol):
    """Writes those of one choice, in order: all at once or a few at a time."""

    def write(self, events: Sequence[TokenGenerated]) -> dict[str, Any]: ...


class ChatLogprobs:
    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces

    def write(self, events: Sequence[TokenGenerated]) -> dict[str, Any]:
        return {"content": [self._entry(event) for event in events], "refusal": None}

    def _entry(self, event: TokenGenerated) -> dict[str, Any]:
        assert event.logprobs is not None
        top = [self._token(ranked) for ranked in event.logprobs.most_likely]
        return {**self._token(RankedToken(event.token, event.logprobs.logprob)), "top_logprobs": top}

    def _token(self, ranked: RankedToken) -> dict[str, Any]:
        piece = self._pieces.of(ranked.token, skip_special=False)
        return {"token": token_text(piece), "logprob": max(ranked.logprob, LEAST), "bytes": list(piece)}


class CompletionLogprobs:
    """`text_offset` counts the characters of the choice's text that come before a token."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0
        self._at_start = True

    def write(self, events: Sequence[TokenGenerated]) -> dict[str, Any]:
        offsets, tokens, chosen, top = [], [], [], []
        for event in events:
            assert event.logprobs is not None
            offsets.append(self._advance(event.token))
            tokens.append(self._name(event.token))
            chosen.append(max(event.logprobs.logprob, LEAST))
            # The chosen token is always among them. Of several that read alike, the likeliest counts.
            ranked: dict[str, float] = {}
            for other in (*event.logprobs.most_likely, RankedToken(event.token, event.logprobs.logprob)):
                ranked.setdefault(self._name(other.token), max(other.logprob, LEAST))
            top.append(ranked)
        return {"text_offset": offsets, "tokens": tokens, "token_logprobs": chosen, "top_logprobs": top}

    def _advance(self, token: int) -> int:
        offset, piece = self._offset, self._pieces.of(token)
        if self._at_start and piece:
            piece = piece.removeprefix(self._pieces.leading)
            self._at_start = False
        self._offset += len(self._decoder.decode(piece))
        return offset

    def _name(self, token: int) -> str:
        return token_text(self._pieces.of(token, skip_special=False))


def token_text(piece: bytes) -> str:
    """A token's text, or its bytes where they are a part of a character: `bytes:\\xe2\\x82`."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
