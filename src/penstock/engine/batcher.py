"""Many requests, one step at a time: schedule, build, run, sample, commit. No threads here."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from penstock.cache import BLOCK_TOKENS
from penstock.cache.space import CacheSpace
from penstock.engine.batch import SpanInput
from penstock.engine.events import Event, Failed
from penstock.engine.explain import ChunkRecord
from penstock.engine.job import Job
from penstock.engine.ledger import PoolLedger
from penstock.engine.results import FinishReason
from penstock.engine.reuse import Reuse
from penstock.engine.sampling import Choice
from penstock.engine.sharing import PrefixSharing
from penstock.engine.status import CacheStatus, Observer, ReuseStatus, ServiceStatus, StepRecord
from penstock.engine.step import Step, StepOutcome, StepRunner
from penstock.errors import MemoryExhaustedError, PenstockError, RequestFailedError, is_out_of_memory
from penstock.models.decoder import Decoder
from penstock.plan.admission import CacheLimits
from penstock.plan.batch_scheduler import BatchScheduler
from penstock.plan.grids import RowLaw
from penstock.plan.policy import ScheduleConfig
from penstock.plan.sizing import ChunkSizer, shape_of
from penstock.plan.step import RequestId, SpanKind, StepPlan

_log = logging.getLogger("penstock.engine")

# The last steps that a status shows.
STEPS_SHOWN = 240
# The last requests that ended whose chunks can still be explained.
ENDED_EXPLAINED = 64


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
        canon: RowLaw,
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
        that run behind the host."""
        self.space = space
        self.reuse = reuse
        self.notices: deque[Notice] = deque()
        limits = CacheLimits(space.blocks.num_blocks, BLOCK_TOKENS, keeps_prefix=space.slots is None)
        self._jobs: dict[RequestId, Job] = {}  # in order of arrival
        self._sharing = PrefixSharing(reuse, space.slots, self._skip)
        ledger = PoolLedger(space.blocks, self._jobs, self._sharing.leave, self._sharing.num_shared)
        self._scheduler = BatchScheduler(schedule, limits, sizer, ledger)
        self._sizer = sizer
        looks_ahead = model.can_record if looks_ahead is None else looks_ahead
        self._runner = StepRunner(model, canon, space, strict=strict, looks_ahead=looks_ahead)
        self._observers = tuple(observers)
        # Chunks of the last ones.
        self._ended: OrderedDict[RequestId, tuple[ChunkRecord, ...]] = OrderedDict()
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
            self._jobs[preemption.request_id].pause()
        inputs: list[SpanInput] = []
        for index, planned in enumerate(plan.spans):
            job, span = self._jobs[planned.request_id], planned.span
            is_chunk = planned.kind is SpanKind.CHUNK
            if job.start(now):
                self._sharing.start(job)
            kept = self._sharing.states_to_keep(job, span, len(plan.spans) - index) if is_chunk else []
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
        jobs = [self._jobs[planned.request_id] for planned in step.plan.spans if planned.samples]
        outcome = self._runner.run(step, jobs)
        scheduler = self._scheduler
        # Where nobody else is here, the next step is as this one.
        if not scheduler.num_waiting and len(jobs) == len(step.inputs) == scheduler.num_running:
            self._runner.launch_next(jobs, outcome)
        return outcome

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
        reading = (job for job in self._jobs.values() if self._scheduler.view(job.id).phase == "prompt")
        held = self._sharing.share(reading, in_pieces=len(self._jobs) > 1)
        return self._scheduler.schedule(held=held)

    def _skip(self, job: Job) -> None:
        """More of a prompt was there, and is the request's now."""
        self._scheduler.advance(job.id, job.cache.num_tokens)
        if event := job.skip(job.cache.num_tokens):
            self._tell(job, event)

    def _commit(self, step: Step, outcome: StepOutcome) -> None:
        now = time.perf_counter()
        seconds = now - step.started_s
        ended: dict[RequestId, FinishReason | Exception] = {}
        for planned in step.plan.spans:
            job, span = self._jobs[planned.request_id], planned.span
            is_chunk = planned.kind is SpanKind.CHUNK
            job.cache.commit(span.end)
            self._sharing.note(job, span.start, is_chunk=is_chunk)
            if job.wants_cancel:
                ended[job.id] = "cancelled"
                continue
            if is_chunk:
                job.chunks.append(step.explain(planned, job.num_prompt, seconds))
                if event := job.read(span.start, span.end, now):
                    self._tell(job, event)
            if planned.samples and (reason := self._take(job, outcome.choices[job.id], now)) is not None:
                ended[job.id] = reason
        self._scheduler.commit(step.plan, ended, seconds)
        for request_id, how in ended.items():
            self._end(self._jobs[request_id], how)
        record = step.record(self._num_steps, step.started_s - self._began_s, seconds)
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
        self._sharing.end(job)
        job.cache.free()

    def _tell(self, job: Job, event: Event) -> None:
        self.notices.append(Notice(partial(job.listener, event), job))

    def _observe(self, tell: Callable[[], None]) -> None:
        self.notices.append(Notice(tell))


def _as_failure(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    _log.error("a request failed, the others go on", exc_info=error)
    failure = RequestFailedError(f"the request could not be run on: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
