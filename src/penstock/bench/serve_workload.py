"""What is asked of a service: streams that decode when a long prompt arrives, and many requests at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.errors import ContextLengthError, SettingError
from penstock.measure.prompts import text_tokens
from penstock.models.text.tokenizer import Tokenizer
from penstock.plan.config import DEFAULT_CHUNK_SIZE
from penstock.plan.policy import ScheduleConfig, SchedulePolicy

# A stream runs when it has produced so many tokens; the long prompt arrives when all streams run.
SETTLE_TOKENS = 4


class Variant(StrEnum):
    """A way to share steps between the streams and the long prompt, as it is called in the results."""

    UNCHUNKED = "unchunked"
    PREFILL_FIRST = "prefill-first"
    INTERLEAVED = "interleaved"
    DECODE_PRIORITY = "decode-priority"
    MIXED = "mixed"

    def schedule(self, chunk: int, max_running: int) -> ScheduleConfig:
        if self is Variant.UNCHUNKED:
            return ScheduleConfig(SchedulePolicy.PREFILL_FIRST, chunk_size=0, max_running=max_running)
        return ScheduleConfig(SchedulePolicy(self.value), chunk_size=chunk, max_running=max_running)

    def label(self, chunk: int) -> str:
        return "unchunked" if self is Variant.UNCHUNKED else f"{self.value}, chunk {chunk}"


# Those that a bar compares; the others are run less, for a prompt of this length takes long.
COMPARED = (Variant.UNCHUNKED, Variant.MIXED)
_REPEATS = 3
_OTHER_REPEATS = 1


@dataclass(frozen=True)
class Workload:
    """Numbers of requests and of tokens. The defaults are those that the bars are for."""

    streams: int = 4
    stream_prompt: int = 32
    stream_tokens: int = 200
    long_prompt: int = 8000
    long_tokens: int = 8
    stall_chunk: int = 128
    requests: int = 16
    request_prompt: int = 512
    request_tokens: int = 64
    chunk: int = DEFAULT_CHUNK_SIZE

    def __post_init__(self) -> None:
        # Mixed and interleaved give a stream a token for every chunk of the long prompt.
        least = SETTLE_TOKENS + -(-self.long_prompt // self.stall_chunk) + 1
        if self.stream_tokens < least:
            raise SettingError(
                f"--stream-tokens {self.stream_tokens} is not accepted: with --long-prompt {self.long_prompt} and "
                f"--serve-chunk {self.stall_chunk} give at least {least}, so that the streams outlast the prompt"
            )
        if self.requests > 1 and self.request_tokens < 2:
            raise SettingError(
                f"--request-tokens {self.request_tokens} is not accepted: give at least 2, the first ends a prompt"
            )

    def require_context(self, context_length: int) -> None:
        for option, prompt, generated in (
            ("--stream-tokens", self.stream_prompt, self.stream_tokens),
            ("--long-prompt", self.long_prompt, self.long_tokens),
            ("--request-prompt", self.request_prompt, self.request_tokens),
        ):
            if prompt + generated > context_length:
                raise ContextLengthError(
                    f"{prompt} tokens and {generated} generated after them do not fit into the model's context "
                    f"of {context_length} tokens: give a smaller {option}"
                )

    @property
    def stall_total(self) -> int:
        """All tokens of a run with the long prompt, read or generated."""
        return self.streams * (self.stream_prompt + self.stream_tokens) + self.long_prompt + self.long_tokens

    @property
    def burst_total(self) -> int:
        return self.requests * (self.request_prompt + self.request_tokens)


def rounds_of(repeats: int | None, *, full: bool) -> dict[Variant, int]:
    """How many rounds each variant runs: as many as are asked for, or more where there is a bar."""
    usual = repeats or _REPEATS
    other = repeats or (_REPEATS if full else _OTHER_REPEATS)
    return {variant: usual if variant in COMPARED else other for variant in Variant}


@dataclass(frozen=True)
class Prompts:
    """Token ids; no two prompts of a kind are the same."""

    long: Sequence[int] = field(repr=False)
    streams: tuple[Sequence[int], ...] = field(repr=False)
    requests: tuple[Sequence[int], ...] = field(repr=False)


def make_prompts(tokenizer: Tokenizer, workload: Workload) -> Prompts:
    """Consecutive pieces of one text."""
    lengths = [workload.long_prompt]
    lengths += [workload.stream_prompt] * workload.streams
    lengths += [workload.request_prompt] * workload.requests
    text = text_tokens(tokenizer, sum(lengths))
    pieces, start = [], 0
    for length in lengths:
        pieces.append(text[start : start + length])
        start += length
    after = 1 + workload.streams
    return Prompts(pieces[0], tuple(pieces[1:after]), tuple(pieces[after:]))
