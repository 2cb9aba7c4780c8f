"""Answers that are of a grammar: which tokens may come next, by llguidance."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.engine.events import AnswerFormat, FreeText, Grammar
from penstock.engine.grammar import grammar_text
from penstock.errors import ModelError, SettingError
from penstock.models.text.calls import overlap
from penstock.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Grammars that are kept compiled: the choices of a request have one, and many requests the same.
NUM_KEPT = 16
# Those that may wait for the thread that compiles beside other work. Beyond them, who asks compiles.
NUM_QUEUED = 4
_TOO_COMPLEX = re.compile(
    r"\(limit|schema too large|DNF too large|too many (states|expressions)|fuel exhausted|Current row has|^panic:"
)
_MAX_REASON = 300


@dataclass(frozen=True)
class _Start:
    """A grammar that was compiled: the matcher at the start of an answer, which is only ever copied, and what it
    allows there, a bit for each token, the lowest first."""

    matcher: "LLMatcher"
    bits: bytes
    setting: str  # what an error calls it


class _Compiled:
    """A grammar that whoever asks first compiles; others wait for it. What is wrong with it is told to each."""

    def __init__(self, compile_: Callable[[], _Start]) -> None:
        self._compile = compile_
        self._made: _Start | SettingError | None = None
        self._lock = threading.Lock()

    @property
    def is_made(self) -> bool:
        return self._made is not None

    def get(self) -> _Start:
        with self._lock:
            if self._made is None:
                try:
                    self._made = self._compile()
                except SettingError as error:
                    self._made = error.with_traceback(None)
        if isinstance(self._made, SettingError):
            raise copy(self._made)  # one that is raised grows by where it was raised
        return self._made


class ConstraintFactory:
    """Makes constraints for one model. `vocab_size` is the number of its logits; the vocabulary is built when the
    first constraint is made. The last grammars are kept as they were compiled. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if 0 <= token < vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._starts: OrderedDict[str, _Compiled] = OrderedDict()  # by text, the last used last
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-grammars")
        self._places = threading.Semaphore(NUM_QUEUED)

    def new(self, wanted: AnswerFormat) -> "Constraint":
        """A constraint at the start of its answer; an error for a grammar that is not accepted, but for one that
        is free at first: that is compiled when it is needed."""
        compiled = self._compiled(wanted)
        if not isinstance(wanted, Grammar) or wanted.free is None:
            return self._begin(compiled.get())

        def begin(tokens: Sequence[int]) -> TokenConstraint | None:
            with suppress(SettingError):
                constraint = self._begin(compiled.get())
                return constraint if constraint.follow(tokens) else None
            return None

        return LateConstraint(begin, self._spelled, wanted.free, self._tokenizer)

    def compile_later(self, wanted: Grammar) -> "Future[object] | None":
        """Compile a grammar beside the caller's work, on a thread. None where that is done: it was known, or enough
        others wait for the thread. An error for one that is not accepted, then or by the future."""
        compiled = self._compiled(wanted)
        if compiled.is_made or not self._places.acquire(blocking=False):
            compiled.get()
            return None
        future: Future[object] = self._thread.submit(compiled.get)
        future.add_done_callback(lambda _: self._places.release())
        return future

    def prepare(self) -> None:
        """Do what the first constraint would have to wait for."""
        self._build()

    def _compiled(self, wanted: AnswerFormat) -> _Compiled:
        text, setting = grammar_text(wanted), "grammar" if isinstance(wanted, Grammar) else "json_format"
        with self._lock:
            found = self._starts.setdefault(text, _Compiled(lambda: self._compile(text, setting)))
            self._starts.move_to_end(text)
            while len(self._starts) > NUM_KEPT:
                self._starts.popitem(last=False)
        return found

    def _begin(self, start: _Start) -> "TokenConstraint":
        with self._lock:  # a matcher is not to be copied on two threads at once
            return TokenConstraint(start, self._vocab_size, self._eos_ids)

    def _spelled(self, text: str) -> list[int]:
        """Tokens whose bytes are a text's, one way or the other."""
        return self._build().greedy_tokenize(text)

    def _compile(self, grammar: str, setting: str) -> _Start:
        vocabulary = self._build()
        from llguidance import LLMatcher

        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=_limits())
        if matcher.is_error():
            raise SettingError(setting, ..., because=_reason(matcher.get_error()))
        # Some grammars fail only here.
        return _Start(matcher, _allowed_bits(matcher, setting, self._eos_ids), setting)

    def _build(self) -> "LLTokenizer":
        with self._lock:
            if self._vocabulary is None:
                try:
                    from llguidance import LLTokenizer
                except ImportError as error:
                    raise SettingError(
                        "json_format",
                        ...,
                        because="it needs llguidance, which is not installed: pip install llguidance",
                    ) from error
                words = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
                self._vocabulary = LLTokenizer(
                    words,  # type: ignore[arg-type]  # anything with the attributes of a TokenizerWrapper
                    n_vocab=len(words.tokens),
                    eos_token=list(words.special_token_ids),
                    slices=LLTokenizer.json_slices(),
                )
            return self._vocabulary


class TokenConstraint:
    """One answer's constraint: `mask` the logits, choose a token, `accept` it."""

    is_holding = True

    def __init__(self, start: _Start, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._matcher = start.matcher.deep_copy()
        self._setting = start.setting
        self._bits: bytes | None = start.bits  # what is allowed next; None: not computed yet
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._has_ended = False

    @property
    def is_finished(self) -> bool:
        """The answer is complete, and nothing may follow but the end."""
        return self._has_ended or self._matcher.is_stopped()

    def mask(self, logits: Tensor) -> Tensor:
        """A copy of logits [vocab] in which tokens that are not allowed are at -inf."""
        if logits.shape != (self._vocab_size,):
            raise SettingError(
                f"logits of shape {tuple(logits.shape)} do not fit a vocabulary of {self._vocab_size} tokens"
            )
        bits = np.frombuffer(self._allowed(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little"))
        return logits.masked_fill((allowed == 0).to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Go on after the token that was chosen. One that is not allowed is an error and changes nothing."""
        bits = self._allowed()
        if not 0 <= token < self._vocab_size or not bits[token >> 3] >> (token & 7) & 1:
            raise SettingError(
                f"token {token} is not allowed here: the answer would not be of the format asked for"
            )
        self._bits = None
        if token in self._eos_ids:
            self._has_ended = True
        elif not self._matcher.consume_token(token):
            raise _failure(self._matcher, self._setting)

    def follow(self, tokens: Sequence[int]) -> bool:
        """Go on after tokens that have come already; whether they are allowed."""
        self._bits = None
        return self._matcher.try_consume_tokens(list(tokens)) == len(tokens)

    def _allowed(self) -> bytes:
        if self._has_ended:
            raise SettingError("the answer has ended: no token may follow")
        if self._bits is None:
            self._bits = _allowed_bits(self._matcher, self._setting, self._eos_ids)
        return self._bits


class LateConstraint:
    """A constraint that holds from a mark on, and before where one may have begun. Until then there is nothing to
    compute, and its grammar may still be compiled; one that cannot be is not held to.

    `begin` makes a constraint after some tokens, `spelled` makes tokens of a text."""

    def __init__(
        self,
        begin: Callable[[Sequence[int]], TokenConstraint | None],
        spelled: Callable[[str], list[int]],
        free: FreeText,
        tokenizer: Tokenizer,
    ) -> None:
        self._begin = begin
        self._spelled = spelled
        self._pieces = tokenizer.pieces
        self._new_mark = partial(_Mark, free.mark, tokenizer, is_first=free.is_first)
        self._mark = self._new_mark()
        self._has_mark = False
        self._closing = self._opening = None
        if free.thoughts is not None:
            self._closing = _Mark(free.thoughts.closing, tokenizer)
            self._opening = (
                None if free.is_thinking else _Mark(free.thoughts.opening, tokenizer, is_first=True)
            )
        self._is_thinking = free.is_thinking
        self._held: TokenConstraint | None = None
        self._begun: list[int] | None = None  # tokens after which it holds, from the next mask on

    @property
    def is_holding(self) -> bool:
        """Whether the next token has to be one of those that the grammar allows."""
        return self._held is not None or self._begun is not None

    @property
    def is_finished(self) -> bool:
        return self._held is not None and self._held.is_finished

    def mask(self, logits: Tensor) -> Tensor:
        """As TokenConstraint's. It may have to wait for its grammar."""
        self._hold()
        return logits if self._held is None else self._held.mask(logits)

    def accept(self, token: int) -> None:
        self._hold()
        if self._held is not None:
            self._held.accept(token)
        if self._has_mark:
            return
        rest: bytes | None = self._pieces.of(token)
        assert rest is not None
        if self._opening is not None:
            thought = self._opening.push(token, rest)
            if thought is not None:
                rest, self._is_thinking, self._mark = thought, True, self._new_mark()
            if thought is not None or self._opening.is_over:
                self._opening = None
        if self._is_thinking:
            assert self._closing is not None
            self._held = None
            rest = self._closing.push(token, rest)
            if rest is None:
                return
            self._is_thinking = False
        has_come = self._mark.push(token, rest) is not None
        if not self._mark.begun:
            self._held = None
        elif self._held is None:
            self._begun = self._tokens(token)
        self._has_mark = has_come and self.is_holding

    def _hold(self) -> None:
        if self._begun is not None:
            self._held, self._begun = self._begin(self._begun), None

    def _tokens(self, token: int) -> list[int] | None:
        """What has come of the mark. A character that is not whole yet is waited for."""
        if self._mark.is_token:
            return [token]
        try:
            return self._spelled(self._mark.begun.decode())
        except UnicodeDecodeError:
            return None


class _Mark:
    """Looks for a mark, which is a special token or a text, in an answer as it comes; or only where that begins."""

    def __init__(self, text: str, tokenizer: Tokenizer, *, is_first: bool = False) -> None:
        first = tokenizer.split_special(text)[0]
        self._token = first if isinstance(first, int) else None
        self._bytes = first.encode() if isinstance(first, str) else b""
        self._is_first = is_first
        self.is_over = False  # it cannot come any more
        self.begun = b""  # what may be its beginning; once it has come, it and what follows

    @property
    def is_token(self) -> bool:
        return self._token is not None

    def push(self, token: int, piece: bytes) -> bytes | None:
        """What follows it in this piece, once it has come."""
        if self.is_over:
            return None
        text = self.begun + piece
        if self._is_first:
            text = text.lstrip()
        if self._token is not None:
            self.begun = b"!" * (token == self._token)
            self.is_over = self._is_first and bool(text) and not self.begun
            return b"" if self.begun else None
        place = text.find(self._bytes)
        if place < 0:
            place = len(text) - overlap(text, self._bytes)
        self.is_over = self._is_first and place > 0
        self.begun = b"" if self.is_over else text[place:]
        return self.begun.removeprefix(self._bytes) if self.begun.startswith(self._bytes) else None


Constraint = TokenConstraint | LateConstraint


class _Vocabulary:
    """A vocabulary as llguidance reads it. A token without bytes is never allowed; a special one only where a grammar
    names it, which a byte that is in no text says."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        # Ids that the model has and the tokenizer has not have no bytes.
        pieces = tokenizer.pieces
        self.tokens = [b"" if token in eos_ids else pieces.of(token) for token in range(vocab_size)]
        for token in pieces.special:
            if token < vocab_size and token not in eos_ids:
                self.tokens[token] = b"\xff" + pieces.of(token, skip_special=False)
        if not eos_ids:
            # There must be an end: one beyond the logits, which nobody can choose.
            eos_ids = frozenset([vocab_size])
            self.tokens.append(b"")
        self.special_token_ids: Sequence[int] = sorted(eos_ids)
        self.eos_token_id = self.special_token_ids[0]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("text is not turned into tokens where none is forced")


def _allowed_bits(matcher: "LLMatcher", setting: str, eos_ids: frozenset[int]) -> bytes:
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        raise _failure(matcher, setting)
    ends = [token for token in eos_ids if bits[token >> 3] >> (token & 7) & 1]
    if ends and not matcher.is_accepting():  # it allows an end in any text that a special token is to follow
        kept = bytearray(bits)
        for token in ends:
            kept[token >> 3] ^= 1 << (token & 7)
        bits = bytes(kept)
    if not any(bits):
        raise ModelError("the model has no token with which an answer of the format asked for could go on")
    return bits


def _failure(matcher: "LLMatcher", setting: str) -> SettingError:
    return SettingError(setting, ..., because=f"it cannot be followed: {_reason(matcher.get_error())}")


def _limits() -> "LLParserLimits":
    """Bounds for grammars of strangers: about 0.1 s to begin, 0.02 s and 65 MB on the way."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=20_000, max_lexer_states=100_000, verbose_errors=False)


def _reason(message: str) -> str:
    """The library's message in one line, without places in a grammar that the user never saw."""
    message = re.split(r"\n\s+\d+ \| |\n<", message)[0]
    message = re.sub(r"^at \d+\(\d+\): ", "", message)
    message = re.sub(r"^failed to (compile JSON schema|parse \"%json\"): ", "", message)
    if message.startswith("NoExtension"):
        return "there is no answer that fits it"
    if _TOO_COMPLEX.search(message):
        return "it is too complex: give a simpler one"
    # Patterns are quoted in full before the error in them.
    message = re.sub(
        r"^regex parse error:.*\nerror: ", "a pattern cannot be used: ", message, flags=re.DOTALL
    )
    message = re.sub(r"^Unimplemented keys: ", "keywords that are not supported: ", message)
    message = re.sub(r"^oneOf .*", "oneOf of schemas that may overlap is not supported: use anyOf", message)
    line = " ".join(message.split())
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "..."
