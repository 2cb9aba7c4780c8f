"""Text to token ids and back, at once or as tokens come."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers

from penstock.errors import ModelError, PromptError
from penstock.models.reading import trusting
from penstock.models.text.chat import ChatTemplate
from penstock.models.text.pieces import TokenPieces


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens with a role. `names` are those that a chat template may call by name, such as bos_token."""

    eos_ids: tuple[int, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """A tokenizer from any file. The text of token ids is the text of their bytes, wherever these are cut."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special: SpecialTokens, chat_template: str | None
    ) -> None:
        # A file may carry the truncation and padding that its model was trained with.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = special
        self._chat = None if chat_template is None else ChatTemplate(chat_template, special.names)
        self.pieces = TokenPieces(backend)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._special.eos_ids

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

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        if self._chat is None:
            raise ModelError("this model has no chat template; give it a raw prompt instead")
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)


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
