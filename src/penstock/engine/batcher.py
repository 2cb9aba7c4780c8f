"""Many requests, one step at a time: schedule, build, run, sample, commit. No threads here."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.cache import BLOCK_TOKENS
from penstock.engine.batch import Canon, SpanInput, build_batch
from penstock.engine.events import Event, Failed
from penstock.engine.explain import ChunkRecord
from penstock.engine.job import Choice, Job
from penstock.engine.run import CacheSpace, FinishReason, is_out_of_memory
from penstock.engine.status import CacheStatus, Observer, ServiceStatus, SpanRecord, StepRecord
from penstock.errors import MemoryExhaustedError, PenstockError, RequestFailedError
from penstock.models.decoder import Decoder
from penstock.plan.admission import CacheLimits
from penstock.plan.batch_scheduler import BatchScheduler
from penstock.plan.policy import ScheduleConfig
from penstock.plan.size_rules import SizeDecision
from penstock.plan.sizing import ChunkSizer, shape_of
from penstock.plan.step import PlannedSpan, RequestId, SpanKind, StepPlan

_log = logging.getLogger("penstock.engine")

# The last steps that a status shows.
STEPS_SHOWN = 240
# The last requests that ended whose chunks can still be explained.
ENDED_EXPLAINED = 64


@dataclass(frozen=True)
class Step:
    """A step that was planned, and for which the cache has room set aside; why it reads as much as it does, and what
    is expected of it."""

    plan: StepPlan
    inputs: tuple[SpanInput, ...]
    started_s: float
    decision: SizeDecision | None = None
    predicted_s: float | None = None
    predicted_bytes: int | None = None


@dataclass(frozen=True)
class StepOutcome:
    """What a step gave: a choice, or an error of its own, for each request that samples; or the step's error."""

    choices: dict[RequestId, Choice | Exception] = field(default_factory=dict)
    error: Exception | None = None


@dataclass(frozen=True)
class Notice:
    """Something to be told once the step is over. An error in it is the job's, where there is one."""

    tell: Callable[[], None]
    job: Job | None = None


class Batcher:
    """The requests of one model, over one cache.

    A step is `begin`, `run`, `settle`: the first and the last change what is known, quickly; `run` takes the time and
    changes nothing but the cache's tensors. What is to be told of it gathers in `notices`.
    """

    def __init__(
        self,
        model: Decoder,
        canon: Canon,
        space: CacheSpace,
        schedule: ScheduleConfig,
        *,
        strict: bool = False,
        observers: Sequence[Observer] = (),
        sizer: ChunkSizer | None = None,
    ) -> None:
        self.model = model
        self.space = space
        self.notices: deque[Notice] = deque()
        limits = CacheLimits(space.blocks.num_blocks, BLOCK_TOKENS, keeps_prefix=space.slots is None)
        self._scheduler = BatchScheduler(schedule, limits, sizer)
        self._sizer = sizer
        self._canon = canon
        self._strict = strict
        self._observers = tuple(observers)
        self._jobs: dict[RequestId, Job] = {}  # in order of arrival
        self._ended: OrderedDict[RequestId, tuple[ChunkRecord, ...]] = (
            OrderedDict()
        )  # chunks of the last ones
        self._steps: deque[StepRecord] = deque(maxlen=STEPS_SHOWN)
        self._num_steps = 0
        self._in_flight: frozenset[RequestId] = frozenset()
        # Requests of a step that failed: each runs alone, so that only the one at fault ends.
        self._suspects: deque[RequestId] = deque()
        self._began_s = time.perf_counter()

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def add(self, job: Job) -> None:
        """Put a request into the queue, or raise QueueFullError or CacheFullError."""
        self._scheduler.add(job.id, job.num_prompt, job.request.max_tokens)
        self._jobs[job.id] = job

    def cancel(self, request_id: RequestId) -> None:
        """End a request: now, or with the step that it is in. Nothing happens if it has ended."""
        job = self._jobs.get(request_id)
        if job is None:
            return
        job.wants_cancel = True
        if request_id not in self._in_flight:
            self._scheduler.remove(request_id)
            self._end(job, "cancelled")

    def cancel_all(self) -> None:
        for request_id in tuple(self._jobs):
            self.cancel(request_id)

    def fail_all(self, error: PenstockError) -> None:
        """End every request, because nothing more can be run. What a broken cache does then is nobody's concern."""
        for job in tuple(self._jobs.values()):
            with suppress(Exception):
                self._end(job, error)

    def begin(self) -> Step | None:
        """Plan a step and set room aside for it."""
        plan = self._schedule()
        if plan is None:
            return None
        now = time.perf_counter()
        for preemption in plan.preemptions:
            job = self._jobs[preemption.request_id]
            job.cache.cut(preemption.num_kept)
            job.pause()
        inputs: list[SpanInput] = []
        for planned in plan.spans:
            job, span = self._jobs[planned.request_id], planned.span
            job.start(now)
            state = job.cache.reserve(span.start, [span.end])
            tokens = job.tokens[span.start : span.end]
            is_chunk = planned.kind is SpanKind.CHUNK
            inputs.append(SpanInput(span, tokens, job.cache.blocks, is_chunk, planned.samples, state))
        self._in_flight = frozenset(planned.request_id for planned in plan.spans)
        step = Step(plan, tuple(inputs), now, self._scheduler.decision)
        if self._sizer is None:
            return step
        shape = shape_of(plan)
        return replace(
            step,
            predicted_s=self._sizer.predict_s(shape),
            predicted_bytes=self._sizer.predict_bytes(shape),
        )

    def run(self, step: Step) -> StepOutcome:
        """The forward pass, and a token for each request that samples."""
        try:
            batch = build_batch(step.inputs, canon=self._canon, device=self.model.device, strict=self._strict)
            logits = self.model.forward(batch, self.space.tensors)
        except Exception as error:
            return StepOutcome(error=error)
        choices: dict[RequestId, Choice | Exception] = {}
        sampling = [planned.request_id for planned in step.plan.spans if planned.samples]
        for row, request_id in enumerate(sampling):
            assert logits is not None
            try:
                choices[request_id] = self._jobs[request_id].choose(logits[row])
            except Exception as error:
                choices[request_id] = error
        return StepOutcome(choices)

    def settle(self, step: Step, outcome: StepOutcome) -> None:
        """Commit the step, or undo it if it failed."""
        self._in_flight = frozenset()
        if outcome.error is None:
            self._commit(step, outcome)
        else:
            self._recover(step.plan, outcome.error)

    def status(self) -> ServiceStatus:
        now = time.perf_counter()
        blocks, slots = self.space.blocks, self.space.slots
        return ServiceStatus(
            requests=tuple(job.status(self._scheduler.view(job.id), now) for job in self._jobs.values()),
            steps=tuple(self._steps),
            cache=CacheStatus(
                blocks_used=blocks.num_blocks - blocks.num_free,
                blocks_total=blocks.num_blocks,
                block_tokens=BLOCK_TOKENS,
                slots_used=slots.num_slots - slots.num_free if slots else 0,
                slots_total=slots.num_slots if slots else 0,
            ),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            uptime_s=now - self._began_s,
        )

    def explain(self, request_id: RequestId) -> tuple[ChunkRecord, ...] | None:
        """The chunks of a request that runs, or was among the last to end; None of any other."""
        if (job := self._jobs.get(request_id)) is not None:
            return tuple(job.chunks)
        return self._ended.get(request_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the pools hold just what the requests do, between steps."""
        blocks, slots = self.space.blocks, self.space.slots
        blocks.check_integrity()
        self._scheduler.check_integrity()
        held = sum(job.cache.blocks.num_blocks for job in self._jobs.values())
        assert held == blocks.num_blocks - blocks.num_free, f"{held} blocks are held, but others are in use"
        assert blocks.num_free == self._scheduler.num_free_blocks, "the scheduler counts other free blocks"
        if slots is not None:
            slots.check_integrity()
            states = sum(len(job.cache.state.positions) for job in self._jobs.values() if job.cache.state)
            assert states == slots.num_slots - slots.num_free, f"{states} states are held, but others in use"

    def _schedule(self) -> StepPlan | None:
        while self._suspects:
            suspect = self._suspects.popleft()
            if suspect in self._jobs and (plan := self._scheduler.schedule(only=suspect)) is not None:
                return plan
        return self._scheduler.schedule()

    def _commit(self, step: Step, outcome: StepOutcome) -> None:
        now = time.perf_counter()
        seconds = now - step.started_s
        ended: dict[RequestId, FinishReason | Exception] = {}
        for planned in step.plan.spans:
            job, span = self._jobs[planned.request_id], planned.span
            job.cache.commit(span.end)
            if job.wants_cancel:
                ended[job.id] = "cancelled"
                continue
            if planned.kind is SpanKind.CHUNK:
                job.chunks.append(_explained(step, planned, seconds, job.num_prompt))
                if event := job.read(span.start, span.end, now):
                    self._tell(job, event)
            if planned.samples and (reason := self._take(job, outcome.choices[job.id], now)) is not None:
                ended[job.id] = reason
        self._scheduler.commit(step.plan, ended, seconds)
        for request_id, how in ended.items():
            self._end(self._jobs[request_id], how)
        record = StepRecord(
            index=self._num_steps,
            start_s=step.started_s - self._began_s,
            seconds=seconds,
            spans=tuple(
                SpanRecord(planned.request_id, planned.kind, planned.span.start, planned.span.end)
                for planned in step.plan.spans
            ),
            num_held_decodes=step.plan.num_held_decodes,
            preempted=tuple(
                preemption.request_id for preemption in step.plan.preemptions if preemption.was_running
            ),
        )
        self._num_steps += 1
        self._steps.append(record)
        for observer in self._observers:
            self._observe(partial(observer.on_step, record))

    def _take(self, job: Job, choice: Choice | Exception, now: float) -> FinishReason | Exception | None:
        """The end of the request that its choice brings, if it does."""
        if isinstance(choice, Exception):
            return choice
        gap_s, is_first = job.gap_s(now), job.num_generated == 0
        try:
            event, reason = job.take(choice, now)
        except Exception as error:
            return error
        for observer in self._observers:
            self._observe(partial(observer.on_token, job.id, gap_s, is_first=is_first))
        self._tell(job, event)
        return reason

    def _recover(self, plan: StepPlan, error: Exception) -> None:
        """Every request stands where it stood. Out of memory makes chunks smaller, as long as they can be; anything
        else is looked for one request at a time, and so is a request that one token is too much for."""
        planned = [span.request_id for span in plan.spans]
        for request_id in planned:
            self._jobs[request_id].cache.abort()
        if not is_out_of_memory(error):
            self._scheduler.abort(plan)
            if len(planned) > 1:
                self._suspects.extend(planned)
            else:
                self._drop(planned[0], error)
        elif self._scheduler.shrink(plan):
            for observer in self._observers:
                self._observe(observer.on_shrink)
        elif len(planned) > 1:
            self._suspects.extend(planned)
        else:
            done = plan.spans[0].span.start
            message = (
                f"there is no memory left to run one token after {done}: try again later, or ask for less"
            )
            self._drop(planned[0], MemoryExhaustedError(message))
        for request_id in planned:
            if (job := self._jobs.get(request_id)) and job.wants_cancel:
                self.cancel(request_id)

    def _drop(self, request_id: RequestId, error: Exception) -> None:
        self._scheduler.remove(request_id)
        self._end(self._jobs[request_id], error)

    def _end(self, job: Job, how: FinishReason | Exception) -> None:
        """Tell how a request ended that the scheduler knows no more, and free all that it holds."""
        now = time.perf_counter()
        del self._jobs[job.id]
        self._ended[job.id] = tuple(job.chunks)
        if len(self._ended) > ENDED_EXPLAINED:
            self._ended.popitem(last=False)
        if isinstance(how, Exception):
            self._tell(job, Failed(_as_failure(how)))
        else:
            self._tell(job, job.end(how, now))
        summary = job.summary("error" if isinstance(how, Exception) else how, now)
        for observer in self._observers:
            self._observe(partial(observer.on_end, summary))
        job.cache.free()

    def _tell(self, job: Job, event: Event) -> None:
        self.notices.append(Notice(partial(job.listener, event), job))

    def _observe(self, tell: Callable[[], None]) -> None:
        self.notices.append(Notice(tell))


def _explained(step: Step, planned: PlannedSpan, seconds: float, num_prompt: int) -> ChunkRecord:
    span, decision = planned.span, step.decision
    assert decision is not None  # of a step that reads
    is_end = span.end == num_prompt and len(span) < decision.size
    return ChunkRecord(
        start=span.start,
        end=span.end,
        past=span.start,
        rule="end" if is_end else decision.rule,
        predicted_s=step.predicted_s,
        measured_s=seconds,
        predicted_bytes=step.predicted_bytes,
        num_decodes=sum(other.kind is SpanKind.DECODE for other in step.plan.spans),
        because=decision.because,
    )


def _as_failure(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    _log.error("a request failed, the others go on", exc_info=error)
    failure = RequestFailedError(f"the request could not be run on: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
