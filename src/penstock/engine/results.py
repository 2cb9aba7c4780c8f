"""What a generation gives back, and what is recorded of each chunk that ran, to tell why it was so long."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True)
class RankedToken:
    """A token that could have been chosen."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithm of the probability that the model gave the chosen token, before any temperature, penalty
    or constraint, and the most likely tokens, the likeliest first."""

    logprob: float
    most_likely: tuple[RankedToken, ...]


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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = asdict(self)
        plain["token_ids"] = list(self.token_ids)
        plain["usage"]["total_tokens"] = self.usage.total_tokens
        return plain
