"""Answers that are of a grammar: which tokens may come next, by llguidance."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.engine.events import AnswerFormat, FreeText, Grammar
from penstock.engine.grammar import grammar_text
from penstock.errors import ModelError, SettingError
from penstock.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Grammars that are kept compiled: the choices of a request have one, and many requests the same.
NUM_KEPT = 16
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


class ConstraintFactory:
    """Makes constraints for one model. `vocab_size` is the number of its logits; the vocabulary is built when the
    first constraint is made. The last grammars are kept as they were compiled. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if 0 <= token < vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._starts: OrderedDict[str, Future[_Start]] = OrderedDict()  # by text, the last used last
        self._lock = threading.Lock()

    def new(self, wanted: AnswerFormat) -> "Constraint":
        """A constraint at the start of its answer; an error for a grammar that is not accepted, but for one that
        nobody waits for."""
        if isinstance(wanted, Grammar) and wanted.free is not None:
            compiled = self.compile_later(wanted)

            def begin(tokens: Sequence[int]) -> TokenConstraint | None:
                if compiled.exception() is not None:
                    return None
                constraint = self._begin(compiled.result())
                return constraint if constraint.follow(tokens) else None

            return LateConstraint(begin, self._spelled, wanted.free, self._tokenizer)
        return self._begin(self._compiled(wanted, lambda work: work()).result())

    def compile_later(self, wanted: Grammar) -> "Future[_Start]":
        """The grammar, which is compiled on a thread of its own; or the error that there was."""
        return self._compiled(wanted, lambda work: self._thread.submit(work))

    def prepare(self) -> None:
        """Do what the first constraint would have to wait for."""
        self._build()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="penstock-grammars")

    def _compiled(self, wanted: AnswerFormat, do: Callable[[Callable[[], None]], object]) -> "Future[_Start]":
        text, setting = grammar_text(wanted), "grammar" if isinstance(wanted, Grammar) else "json_format"
        made: Future[_Start] = Future()
        with self._lock:
            found = self._starts.setdefault(text, made)
            self._starts.move_to_end(text)
            while len(self._starts) > NUM_KEPT:
                self._starts.popitem(last=False)

        def work() -> None:
            try:
                made.set_result(self._compile(text, setting))
            except Exception as error:
                made.set_exception(error)

        if found is made:
            do(work)
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
        return _Start(matcher, _allowed_bits(matcher, setting), setting)

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
            self._bits = _allowed_bits(self._matcher, self._setting)
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
        self._mark = _Mark(free.mark, tokenizer)
        self._closing = self._opening = None
        if free.thoughts is not None:
            self._closing = _Mark(free.thoughts.closing, tokenizer)
            self._opening = None if free.is_thinking else _Mark(free.thoughts.opening, tokenizer)
        self._is_thinking = free.is_thinking
        self._held: TokenConstraint | None = None
        self._has_mark = False
        self._is_first = free.is_first
        self._is_over = False  # no mark can follow

    @property
    def is_holding(self) -> bool:
        """Whether the next token has to be one of those that the grammar allows."""
        return self._held is not None

    @property
    def is_finished(self) -> bool:
        return self._held is not None and self._held.is_finished

    def mask(self, logits: Tensor) -> Tensor:
        return logits if self._held is None else self._held.mask(logits)

    def accept(self, token: int) -> None:
        if self._held is not None:
            self._held.accept(token)
        if self._has_mark or self._is_over:
            return
        piece = self._pieces.of(token)
        if self._opening is not None:  # as the first that is said, or not at all
            self._is_thinking = self._opening.push(token, piece)
            if self._is_thinking or (piece.strip() and not self._opening.begun):
                self._opening = None
        if self._is_thinking:
            assert self._closing is not None
            self._is_thinking = not self._closing.push(token, piece)
            self._held = None
            return
        self._has_mark = self._mark.push(token, piece)
        if not self._mark.begun:
            self._held = None
            self._is_over = self._is_first and bool(piece.strip())
        elif self._held is None:
            self._held = self._begin(self._tokens(token))

    def _tokens(self, token: int) -> list[int]:
        """What has come of the mark. Characters that are not whole yet are waited for."""
        if self._mark.is_token:
            return [token]
        return self._spelled(self._mark.begun.decode(errors="ignore"))


class _Mark:
    """Looks for a mark, which is a special token or a text, in an answer as it comes."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        first = tokenizer.split_special(text)[0]
        self._token = first if isinstance(first, int) else None
        self._bytes = first.encode() if isinstance(first, str) else b""
        self.begun = b""  # what may be its beginning; once it has come, it and what follows

    @property
    def is_token(self) -> bool:
        return self._token is not None

    def push(self, token: int, piece: bytes) -> bool:
        """Whether it has come."""
        if self._token is not None:
            self.begun = b"!" * (token == self._token)
            return token == self._token
        text = self.begun + piece
        place = text.find(self._bytes)
        lengths = range(min(len(text), len(self._bytes) - 1), 0, -1)
        kept = next((length for length in lengths if text.endswith(self._bytes[:length])), 0)
        self.begun = text[len(text) - kept :] if place < 0 else text[place:]
        return place >= 0


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


def _allowed_bits(matcher: "LLMatcher", setting: str) -> bytes:
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        raise _failure(matcher, setting)
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
    message = re.split(r"\n\s+1 \| |\n<", message)[0]
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
