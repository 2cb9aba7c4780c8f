"""What goes into the engine and what comes out of it: a request, events until one that ends it, and reports."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from penstock.engine.prompt_rows import PooledRows, Pooling, PromptRows, PromptScores
from penstock.engine.sampler import SamplingParams, StopMatcher, TokenLogprobs
from penstock.errors import ContextLengthError, PenstockError, PromptError, SettingError
from penstock.models.text.calls import ThoughtMarks
from penstock.plan.checks import check_bool, check_int, check_type
from penstock.plan.model import ModelConfig
from penstock.plan.progress import Progress
from penstock.plan.sizing import SizeRule

# In words, for a line of text.
_WORDS: dict[SizeRule, str] = {
    "default": "the default",
    "tuned": "tuned on this machine",
    "memory": "by memory",
    "latency": "by the latency target",
    "smallest": "the smallest there is",
    "largest": "the largest there is",
}


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """The part [start, end) of a prompt that a step read, after `past` tokens, with decodes of others beside it.

    `rule` says what set its length. Times and bytes are of the whole step; what was not known, or not measured, is
    None.
    """

    start: int
    end: int
    past: int
    rule: SizeRule
    predicted_s: float | None
    measured_s: float
    predicted_bytes: int | None
    measured_bytes: int | None = None
    num_decodes: int = 0
    because: str = ""  # more about the rule, where there is more

    def __len__(self) -> int:
        return self.end - self.start


def usual_size(records: Sequence[ChunkRecord], otherwise: int) -> int:
    """The longest chunk that was cut by a rule, not by the prompt's end; `otherwise` if there was none."""
    return max((len(record) for record in _ruled(records)), default=otherwise)


def auto_reason(records: Sequence[ChunkRecord], otherwise: str) -> str:
    """Why automatic chunks were as long as they were."""
    ruled = _ruled(records)
    if not ruled:
        return otherwise
    words = ", ".join(dict.fromkeys(_WORDS.get(record.rule, record.rule) for record in ruled))
    smallest, largest = min(map(len, ruled)), max(map(len, ruled))
    sizes = "" if smallest == largest else f"{smallest} to {largest} tokens, "
    return f"auto: {sizes}{words}"


def _ruled(records: Sequence[ChunkRecord]) -> list[ChunkRecord]:
    return [record for record in records if record.rule in _WORDS]


FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt, that were in the cache and not read again

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Seconds, and tokens per second. Decoding is what follows the first token, which the prefill gives."""

    load_s: float
    prefill_s: float
    time_to_first_token_s: float | None  # None where there was none
    decode_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None  # None where there was no second token


@dataclass(frozen=True)
class PrefillReport:
    """The chunk size: what was asked for, what applied (the longest chunk, where sizes are automatic) and why.

    `same_bits` tells whether this machine was found to give the same bits for any other size too. On a model with
    recurrent state that holds among prompts cut on the grid of 64 tokens: it is true only where every chunk begins
    there (chunk size and overlap are multiples of 64, or the whole prompt is one chunk).
    """

    requested: str
    effective: int
    source: str
    reason: str
    overlap: int
    chunks: int
    same_bits: bool
    records: tuple[ChunkRecord, ...] = ()  # each chunk that ran, in order


@dataclass(frozen=True)
class MemoryReport:
    """Bytes. The peak is of the whole process, while this request ran: what was resident, or allocated on a GPU."""

    weights_bytes: int
    kv_cache_bytes: int
    peak_resident_bytes: int
    recurrent_bytes: int = 0  # states of a hybrid, the one being written among them


@dataclass(frozen=True)
class Generation:
    """A finished request. `logprobs` are of each token, where they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    prefill: PrefillReport
    memory: MemoryReport
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # the first token has none

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = asdict(self)
        plain["token_ids"] = list(self.token_ids)
        plain["usage"]["total_tokens"] = self.usage.total_tokens
        return plain


@dataclass(frozen=True)
class JsonFormat:
    """The answer is to be JSON: of a schema, or any object where there is none."""

    schema: dict[str, Any] | None = None


@dataclass(frozen=True)
class FreeText:
    """Where an answer is not held yet: up to a mark, and in thoughts before it."""

    mark: str
    thoughts: ThoughtMarks | None = None
    is_thinking: bool = False  # the prompt has opened thoughts
    is_first: bool = False  # the mark is one only where an answer begins; what begins otherwise is free


@dataclass(frozen=True)
class Grammar:
    """The answer is to be of a grammar: rules of Lark, of which `start` is the first, or of GBNF (`root ::= ...`).

    One that allows any text up to a mark may say so: until then it costs nothing, and nobody waits for it."""

    text: str
    free: FreeText | None = None

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Answers that match a regular expression, from end to end."""
        if not isinstance(pattern, str) or not pattern:
            raise SettingError("regex", pattern, "a regular expression")
        escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
        return cls("start: /" + escaped.replace("\n", r"\n") + "/")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """Answers that are one of these texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise SettingError("choice", ..., "a list of texts of at least one character")
        return cls("start: " + " | ".join(map(json.dumps, dict.fromkeys(texts))))


AnswerFormat = JsonFormat | Grammar


@dataclass(frozen=True)
class GenerationRequest:
    """Token ids, and how to go on from them."""

    token_ids: Sequence[int] = field(repr=False)
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    num_logprobs: int | None = None  # None: none; n: of the token that was chosen, and of the n most likely
    json_format: AnswerFormat | None = None
    ignore_eos: bool = False  # go on to max_tokens
    cache_salt: str = field(default="", repr=False)  # only requests with the same one share what was read
    owner: str = field(default="", repr=False)  # owners of requests that wait take turns
    shown_special: frozenset[int] = frozenset()  # special tokens that are a part of the answer's text
    includes_stop: bool = False  # the stop string, or the token that ends it, is the end of the answer's text
    # As `num_logprobs`, of the prompt's own tokens; it is then read, not reused.
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None  # one vector of the prompt, in place of an answer
    priority: int = 0  # of an owner's requests that wait, the lowest go first

    def rows(self) -> PromptRows | None:
        """What reads the prompt's own rows, where something is to be known of them."""
        if self.prompt_logprobs is not None:
            return PromptScores(self.token_ids, self.prompt_logprobs)
        return None if self.pooling is None else PooledRows(self.pooling)

    def check(self, model: ModelConfig) -> None:
        """Refuse what a model cannot run, before any work."""
        prompt, max_tokens = self.token_ids, self.max_tokens
        check_type("token_ids", prompt, Sequence, "a list of token ids")
        if not len(prompt):
            raise PromptError("the prompt is empty: give at least one token, there is nothing to sample from")
        if set(map(type, prompt)) != {int}:  # True is no token id
            raise PromptError("the prompt has token ids that are no whole numbers")
        check_int("max_tokens", max_tokens, 0)
        if len(prompt) + max_tokens > model.max_position:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, together "
                f"{len(prompt) + max_tokens}, but the model's context is {model.max_position} tokens: "
                f"shorten the prompt or ask for fewer tokens"
            )
        if min(prompt) < 0 or max(prompt) >= model.vocab_size:
            raise PromptError(
                f"the prompt has token ids outside the model's vocabulary, 0 to {model.vocab_size - 1}"
            )
        if self.num_logprobs is not None:
            check_int("num_logprobs", self.num_logprobs, 0)
        check_type("sampling", self.sampling, SamplingParams, "a SamplingParams")
        self.sampling.check_vocab(model.vocab_size)
        check_bool("ignore_eos", self.ignore_eos)
        check_type("json_format", self.json_format, AnswerFormat | None, "a JsonFormat or a Grammar")
        for name in ("min_tokens", "allowed_token_ids", "bad_sequences"):
            if self.json_format is not None and (value := getattr(self.sampling, name)):
                raise SettingError(name, value, because="what holds the answer may leave no other token")
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, 0)
        if self.pooling is not None and (
            self.pooling not in get_args(Pooling) or max_tokens or self.prompt_logprobs is not None
        ):
            raise SettingError("pooling", self.pooling, "mean or last, without an answer or prompt_logprobs")
        check_type("cache_salt", self.cache_salt, str, "a text")
        StopMatcher(self.stop)


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """A chunk of the prompt was read."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The next of the prompt's tokens, and how likely they were; the first one was nothing."""

    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class TokenGenerated:
    """A token, and the text that is known by now: often its own, sometimes none, sometimes some that was held back
    since it might have begun a stop string."""

    token: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request that was not refused. `text` is what was held back and is known now."""

    reason: FinishReason
    text: str
    usage: Usage
    queue_s: float  # from its arrival to its first step
    prefill_s: float  # from its first step to its first token, the steps of others in between included
    decode_s: float  # from its first token to its last
    stop: str | None = None  # the stop string that ended the answer
    vector: Sequence[float] | None = None  # of the prompt, where it was asked for


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that went wrong; no other request is touched."""

    error: PenstockError


Event = PromptProgress | PromptScored | TokenGenerated | Finished | Failed
# Called on the engine's thread, in order; it must return at once. Finished or Failed is the last, and comes once.
Listener = Callable[[Event], None]
