"""A step plan: which spans of which requests run in one forward pass."""

from dataclasses import dataclass
from enum import StrEnum

from penstock.plan.request import Span

RequestId = str


class SpanKind(StrEnum):
    """What a span is. A replay is tokens that were generated once, and lost from the cache since: they run as decodes
    do, several at once, so that they leave the bits that they left the first time."""

    CHUNK = "chunk"
    REPLAY = "replay"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """A span of one request. `samples` says that its last token is the request's last: the next one is sampled.
    `resumes_at` is where the request's next chunk begins, if that is before the span's end."""

    request_id: RequestId
    span: Span
    kind: SpanKind
    samples: bool
    resumes_at: int | None = None


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request that gives cache space up: it keeps its first `num_kept` tokens there, and waits to go on. One that
    waits already may have to give up more."""

    request_id: RequestId
    num_kept: int
    was_running: bool = True


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do in one step, never nothing: first the preemptions, which make room for the spans."""

    spans: tuple[PlannedSpan, ...]
    preemptions: tuple[Preemption, ...] = ()
    num_held_decodes: int = 0  # running requests that have a token to decode, and are not in this step

    @property
    def num_tokens(self) -> int:
        return sum(len(planned.span) for planned in self.spans)

    @property
    def samples(self) -> bool:
        """Whether a request's next token comes of it."""
        return any(planned.samples for planned in self.spans)

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens that are read, not generated: chunks and replays."""
        return sum(len(planned.span) for planned in self.spans if planned.kind is not SpanKind.DECODE)
