"""What can be seen of a running service: its requests, its last steps, its cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, overload

from penstock.kernels.interface import KernelsReport
from penstock.plan.batch_scheduler import RequestPhase
from penstock.plan.sizing import repeated, shape_of_spans
from penstock.plan.step import RequestId, SpanKind, StepShape

Outcome = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """One request that has not ended. Times are seconds since its arrival."""

    id: RequestId
    phase: RequestPhase
    num_prompt_tokens: int
    num_prompt_done: int
    num_generated: int
    max_tokens: int
    age_s: float
    prompt_eta_s: float | None  # None where there is nothing to tell it from, or nothing left to read
    num_preemptions: int
    num_prompt_cached: int = 0  # of those done, that were in the cache and not read again


@dataclass(frozen=True, slots=True)
class SpanRecord:
    request_id: RequestId
    kind: SpanKind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LaterSpans(Sequence[SpanRecord]):
    """Decodes, each so many tokens further than in the step that they are repeated from: made when they are asked
    for."""

    first: Sequence[SpanRecord]
    shape_of_first: StepShape
    num_later: int

    @property
    def shape(self) -> StepShape:
        return repeated(self.shape_of_first, self.num_later)

    def __len__(self) -> int:
        return len(self.first)

    @overload
    def __getitem__(self, index: int) -> SpanRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[SpanRecord]: ...

    def __getitem__(self, index: int | slice) -> SpanRecord | Sequence[SpanRecord]:
        found = self.first[index]
        return self._later(found) if isinstance(found, SpanRecord) else tuple(map(self._later, found))

    def _later(self, span: SpanRecord) -> SpanRecord:
        return SpanRecord(span.request_id, span.kind, span.start + self.num_later, span.end + self.num_later)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that was committed, or runs. `start_s` counts from the service's start."""

    index: int
    start_s: float
    seconds: float
    spans: Sequence[SpanRecord]
    num_held_decodes: int  # running requests with a token to decode that this step left out
    preempted: tuple[RequestId, ...] = ()
    issued: int | None = None  # its number among those that several stages ran

    @property
    def is_repeated(self) -> bool:
        """Whether it has the decodes of the step before, each a token further, and nothing else."""
        return isinstance(self.spans, LaterSpans)

    @property
    def shape(self) -> StepShape:
        if isinstance(self.spans, LaterSpans):
            return self.spans.shape
        return shape_of_spans((span.kind, span.start, span.end) for span in self.spans)

    @property
    def num_chunk_tokens(self) -> int:
        if self.is_repeated:
            return 0
        return sum(span.end - span.start for span in self.spans if span.kind is not SpanKind.DECODE)

    @property
    def num_decodes(self) -> int:
        return (
            len(self.spans) if self.is_repeated else sum(span.kind is SpanKind.DECODE for span in self.spans)
        )

    @property
    def stalls_decodes(self) -> bool:
        """Whether a running decode had to wait for a chunk: in this step, or for its turn after it."""
        return self.num_chunk_tokens > 0 and self.num_decodes + self.num_held_decodes > 0


@dataclass(frozen=True, slots=True)
class CacheStatus:
    blocks_used: int
    blocks_total: int
    block_tokens: int
    slots_used: int  # 0 of 0 where the model has no recurrent state
    slots_total: int
    blocks_idle: int = 0  # that no request holds, kept for those that begin alike; not counted as used
    slots_idle: int = 0


@dataclass(frozen=True, slots=True)
class ReuseStatus:
    """What was found of prompts, since the service began, and what was given up. Tokens are of prompts."""

    is_on: bool = False
    memory_tokens: int = 0  # found in memory
    disk_tokens: int = 0  # found on disk
    missed_tokens: int = 0  # not found, and read
    num_hits: int = 0  # requests of which some was found
    num_misses: int = 0
    num_evicted_blocks: int = 0
    num_evicted_states: int = 0
    disk_bytes: int | None = None  # None where there is no folder
    disk_limit_bytes: int | None = None
    num_disk_written: int = 0  # files
    num_disk_evicted: int = 0
    num_disk_damaged: int = 0
    num_disk_dropped: int = 0  # that were not written, since the disk was too slow or failed


@dataclass(frozen=True, slots=True)
class StageStatus:
    """One stage of a model that has several. Seconds are since the model was loaded."""

    stage: int
    first_layer: int
    last_layer: int
    where: str  # its address, or its process
    trouble: str | None = None  # why it is not there; None: it is
    num_steps: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0  # for what the stage before it hands on
    link_s: float = 0.0  # to hand on what it computed
    num_restarts: int = 0

    @property
    def is_up(self) -> bool:
        return self.trouble is None


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    requests: tuple[RequestStatus, ...]  # in order of arrival
    steps: tuple[StepRecord, ...]  # the last ones, oldest first
    cache: CacheStatus
    num_running: int
    num_waiting: int
    uptime_s: float
    reuse: ReuseStatus = ReuseStatus()
    in_flight: tuple[StepRecord, ...] = ()  # steps that run now, with the seconds so far, oldest first
    stages: tuple[StageStatus, ...] = ()  # none where one process has the whole model
    kernels: KernelsReport | None = None  # None where nobody tells


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """A request that ended. `first_token_s` counts from its arrival and is None where there was no token."""

    id: RequestId
    outcome: Outcome
    num_prompt_tokens: int
    num_generated: int
    first_token_s: float | None
    seconds: float


class Observer(Protocol):
    """Told what happens, on the engine's thread: it must return at once. An error in it ends no request."""

    def on_step(self, record: StepRecord) -> None: ...

    def on_token(self, request_id: RequestId, gap_s: float, *, is_first: bool) -> None:
        """`gap_s` is the time since the request's token before, for the first one since its arrival."""

    def on_shrink(self) -> None:
        """Memory ran out in a step: chunks are halved for a while."""

    def on_end(self, summary: RequestSummary) -> None: ...
