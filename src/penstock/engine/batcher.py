"""Many requests, one step at a time: schedule, build, run, sample, commit. No threads here."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from penstock.cache import BLOCK_TOKENS
from penstock.engine.ahead import Ahead, launch_ahead, next_decode
from penstock.engine.batch import Canon, SpanInput, build_batch
from penstock.engine.device import release_memory, wait_for
from penstock.engine.events import Event, Failed
from penstock.engine.explain import ChunkRecord
from penstock.engine.job import Job
from penstock.engine.ledger import PoolLedger
from penstock.engine.results import FinishReason
from penstock.engine.reuse import Prefix, Reuse
from penstock.engine.run import is_out_of_memory
from penstock.engine.sampling import Choice, sample_rows
from penstock.engine.space import CacheSpace
from penstock.engine.status import (
    CacheStatus,
    Observer,
    ReuseStatus,
    ServiceStatus,
    SpanRecord,
    StepRecord,
)
from penstock.errors import MemoryExhaustedError, PenstockError, RequestFailedError
from penstock.models.decoder import Decoder
from penstock.plan.admission import CacheLimits
from penstock.plan.batch_scheduler import BatchScheduler
from penstock.plan.policy import ScheduleConfig
from penstock.plan.request import Span
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
        reuse: Reuse | None = None,
        looks_ahead: bool | None = None,
    ) -> None:
        """Where it looks ahead, decodes are launched before the step before them is settled: by default on devices
        that run behind the host. A model with recurrent state has no slot to write to by then."""
        self.model = model
        self.space = space
        self.reuse = reuse
        self.notices: deque[Notice] = deque()
        limits = CacheLimits(space.blocks.num_blocks, BLOCK_TOKENS, keeps_prefix=space.slots is None)
        self._jobs: dict[RequestId, Job] = {}  # in order of arrival
        ledger = PoolLedger(space.blocks, self._jobs, self._leave, self._num_shared)
        self._scheduler = BatchScheduler(schedule, limits, sizer, ledger)
        self._sizer = sizer
        self._canon = canon
        self._strict = strict
        self._observers = tuple(observers)
        self._ended: OrderedDict[RequestId, tuple[ChunkRecord, ...]] = (
            OrderedDict()
        )  # chunks of the last ones
        self._steps: deque[StepRecord] = deque(maxlen=STEPS_SHOWN)
        self._num_steps = 0
        self._in_flight: frozenset[RequestId] = frozenset()
        # Requests of a step that failed: each runs alone, so that only the one at fault ends.
        self._suspects: deque[RequestId] = deque()
        wanted = model.can_record if looks_ahead is None else looks_ahead
        self._looks_ahead = wanted and space.slots is None
        self._ahead: Ahead | None = None
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
            self._jobs[preemption.request_id].pause()
        inputs: list[SpanInput] = []
        for index, planned in enumerate(plan.spans):
            job, span = self._jobs[planned.request_id], planned.span
            is_chunk = planned.kind is SpanKind.CHUNK
            if job.start(now) and self.reuse is not None:
                self.reuse.count(job.num_cached)
            kept = self._states_to_keep(job, span, len(plan.spans) - index) if is_chunk else []
            state = job.cache.reserve(span.start, [*kept, span.end])
            tokens = job.tokens[span.start : span.end]
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
            logits = self._run_ahead(step)
            if logits is None:
                logits = self._forward(step.inputs)
            if logits is None:
                wait_for(self.model.device)  # else a step that reads would seem to take no time
                return StepOutcome()
            jobs = [self._jobs[planned.request_id] for planned in step.plan.spans if planned.samples]
            choices = sample_rows(logits, jobs)
        except Exception as error:
            if is_out_of_memory(error):
                release_memory(self.model.device, error)
            elif isinstance(error, torch.AcceleratorError):
                raise  # the device does nothing more, for anybody
            return StepOutcome(error=error)
        if self._looks_ahead:
            self._ahead = self._launch_next(step, jobs, choices)
        return StepOutcome({job.id: choice for job, choice in zip(jobs, choices, strict=True)})

    def _forward(self, inputs: Sequence[SpanInput]) -> Tensor | None:
        batch = build_batch(inputs, canon=self._canon, strict=self._strict)
        return self.model.forward(batch, self.space.tensors)

    def _run_ahead(self, step: Step) -> Tensor | None:
        """The logits of a step that was launched before it was planned."""
        ahead, self._ahead = self._ahead, None
        return ahead.logits if ahead is not None and ahead.is_of(step.inputs) else None

    def _launch_next(
        self, step: Step, jobs: Sequence[Job], choices: Sequence[Choice | Exception]
    ) -> Ahead | None:
        """Launch the step that follows one of decodes, if it is plain that they go on and nobody else waits."""
        scheduler = self._scheduler
        if scheduler.num_waiting or not len(jobs) == len(step.inputs) == scheduler.num_running:
            return None
        inputs: list[SpanInput] = []
        for item, job, choice in zip(step.inputs, jobs, choices, strict=True):
            if item.is_prompt or isinstance(choice, Exception) or not job.goes_on(choice.token):
                return None
            if (following := next_decode(item, choice.token)) is None:
                return None
            inputs.append(following)
        return launch_ahead(inputs, self._forward)

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
        slots_idle = self.reuse.index.num_idle_snapshots if self.reuse else 0
        return ServiceStatus(
            requests=tuple(job.status(self._scheduler.view(job.id), now) for job in self._jobs.values()),
            steps=tuple(self._steps),
            cache=CacheStatus(
                blocks_used=blocks.num_blocks - blocks.num_available,
                blocks_total=blocks.num_blocks,
                block_tokens=BLOCK_TOKENS,
                slots_used=slots.num_slots - slots.num_free - slots_idle if slots else 0,
                slots_total=slots.num_slots if slots else 0,
                blocks_idle=blocks.num_idle,
                slots_idle=slots_idle,
            ),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            uptime_s=now - self._began_s,
            reuse=self.reuse.status() if self.reuse else ReuseStatus(),
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
        held = {block for job in self._jobs.values() for block in job.cache.blocks.block_ids}
        in_use = blocks.num_blocks - blocks.num_available
        assert len(held) == in_use, f"{len(held)} blocks are held, but {in_use} are in use"
        assert blocks.num_available == self._scheduler.num_free_blocks, (
            "the scheduler counts other free blocks"
        )
        num_snapshots = 0
        if self.reuse is not None:
            self.reuse.index.check_integrity()
            num_snapshots = self.reuse.index.num_snapshots
        if slots is not None:
            slots.check_integrity()
            states = {
                slot
                for job in self._jobs.values()
                if job.cache.state
                for slot in job.cache.state.slots.values()
            }
            in_use = slots.num_slots - slots.num_free
            assert len(states) <= in_use <= len(states) + num_snapshots, (
                f"{len(states)} states are held and {num_snapshots} kept, but {in_use} are in use"
            )

    def _schedule(self) -> StepPlan | None:
        while self._suspects:
            suspect = self._suspects.popleft()
            if suspect in self._jobs and (plan := self._scheduler.schedule(only=suspect)) is not None:
                return plan
        self._scheduler.admit()
        return self._scheduler.schedule(held=self._share())

    def _share(self) -> set[RequestId]:
        """Give running prompts what is there of them by now. Those that wait for more of it sit the next step out:
        what is being copied from disk, and what a request before them is about to read."""
        if self.reuse is None:
            return set()
        held: set[RequestId] = set()
        reading: list[Job] = []
        for job in self._jobs.values():
            if job.prefix is None or self._scheduler.view(job.id).phase != "prompt":
                continue
            self._adopt(job)
            num_blocks = job.cache.num_tokens // BLOCK_TOKENS
            if job.prefix.needs_search or num_blocks < job.prefix.num_searched_from:
                self.reuse.search(job.prefix, num_blocks)
            if job.prefix.stored is not None:
                others = len(self._jobs) > 1
                self._gain(job, self.reuse.load(job.prefix, job.cache, in_pieces=others))
            is_loading = job.prefix.stored is not None
            if is_loading or any(self._follows(job, job.prefix, leader) for leader in reading):
                held.add(job.id)
            reading.append(job)
        return held

    def _follows(self, job: Job, prefix: Prefix, leader: Job) -> bool:
        """Whether a request that is read before this one has yet to read some of what they have in common."""
        assert leader.prefix is not None
        common = prefix.num_common(leader.prefix) * BLOCK_TOKENS
        if not job.cache.num_tokens <= leader.cache.num_tokens < common:
            return False
        if self.space.slots is not None and job.cache.num_tokens % BLOCK_TOKENS:
            return False  # it could not go on from there
        leader.prefix.keep_states.add(common)
        return True

    def _adopt(self, job: Job) -> None:
        if self.reuse is not None and job.prefix is not None:
            self._gain(job, self.reuse.adopt(job.prefix, job.cache))

    def _gain(self, job: Job, num_tokens: int) -> None:
        """So many tokens of a prompt were there, and are the request's now."""
        if num_tokens:
            self._scheduler.advance(job.id, job.cache.num_tokens)
            if event := job.skip(job.cache.num_tokens):
                self._tell(job, event)

    def _states_to_keep(self, job: Job, span: Span, num_spans: int) -> list[int]:
        """Where the state is to be kept within a chunk; the step needs a slot for the end of every span."""
        if self.reuse is None or job.prefix is None or self.space.slots is None:
            return []
        num_free = self.space.slots.num_free - num_spans
        return self.reuse.states_to_keep(job.prefix, span.start, span.end, num_free)

    def _num_shared(self, job: Job) -> int:
        """Blocks that a request which waits would share with others that hold them."""
        return 0 if self.reuse is None or job.prefix is None else self.reuse.num_in_use(job.prefix)

    def _leave(self, job: Job, num_kept: int) -> None:
        """A request is about to give up all blocks but the first `num_kept`."""
        if self.reuse is not None and job.prefix is not None:
            self.reuse.leave(job.prefix, job.cache, num_kept)

    def _commit(self, step: Step, outcome: StepOutcome) -> None:
        now = time.perf_counter()
        seconds = now - step.started_s
        ended: dict[RequestId, FinishReason | Exception] = {}
        for planned in step.plan.spans:
            job, span = self._jobs[planned.request_id], planned.span
            job.cache.commit(span.end)
            if self.reuse is not None and job.prefix is not None:
                is_chunk = planned.kind is SpanKind.CHUNK
                self.reuse.note(job.prefix, job.cache, job.tokens, span.start, is_chunk=is_chunk)
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
        if self.reuse is not None and job.prefix is not None:
            self.reuse.end(job.prefix, job.cache)
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
