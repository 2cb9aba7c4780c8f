"""Text to token ids and back: whole, as a stream, and the bytes of each token."""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import tokenizers

from penstock.errors import ModelError, PromptError
from penstock.models.reading import trusting
from penstock.models.text.chat import ChatTemplate

MAX_TOKENS = 1 << 20  # of a vocabulary, and pairs that are merged: the largest have a quarter of it


class TokenPieces:
    """The bytes of every token of a vocabulary, as its decoder in `tokenizers` defines them."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.special = frozenset(
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
        if skip_special and token in self.special:
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


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens with a role. `names` are those that a chat template may call by name, such as bos_token."""

    eos_ids: tuple[int, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """A tokenizer from any file. The text of token ids is the text of their bytes, wherever these are cut."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        chat_template: str | None,
        *,
        ignored: str | None = None,  # what of the files is not obeyed, and why
    ) -> None:
        # A file may carry the truncation and padding that its model was trained with.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = special
        self.ignored = ignored
        self._chat = None if chat_template is None else ChatTemplate(chat_template, special.names)
        self.pieces = TokenPieces(backend)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._special.eos_ids

    @property
    def chat_template(self) -> str | None:
        return None if self._chat is None else self._chat.source

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Special tokens written out in the text become those tokens, as in transformers."""
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:  # half of a surrogate pair
                raise PromptError("the text is not valid Unicode") from error
        with trusting("the model's tokenizer fails"):
            # Of a list of texts, since only that lets other threads run meanwhile.
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        text = b"".join(self.pieces.of(token, skip_special=skip_special) for token in ids)
        return text.removeprefix(self.pieces.leading).decode(errors="replace")

    @property
    def chat(self) -> ChatTemplate:
        if self._chat is None:
            raise ModelError("this model has no chat template; give it a raw prompt instead")
        return self._chat

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        return self.chat.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def split_special(self, text: str) -> list[str | int]:
        """The text, with the special tokens in it as ids."""
        ids = self._special_ids
        names = sorted((name for name in ids if name and name in text), key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
        return [ids.get(part, part) for part in parts if part]

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return {self.pieces.of(token, skip_special=False).decode(): token for token in self.pieces.special}

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)


class StreamDecoder:
    """Turns tokens into text without ever emitting a part of a character.

    The pieces, with `finish()`'s, add up to `tokenizer.decode` of all tokens. Each token costs its bytes. Special
    tokens have no text, but for those that are `shown`."""

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int] = frozenset()) -> None:
        self._pieces = tokenizer.pieces
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True

    def push(self, token: int) -> str:
        """The characters that this token completes; often a word, sometimes none."""
        piece = self._pieces.of(token, skip_special=token not in self._shown)
        if self._at_start and piece:
            piece = piece.removeprefix(self._pieces.leading)
            self._at_start = False
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left at the end: a replacement character where the last one never became whole."""
        return self._decoder.decode(b"", final=True)
