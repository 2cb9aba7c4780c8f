"""Requests, many or one, a step at a time: schedule, reserve, launch, sample, commit. No threads here."""

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from penstock.cache import BLOCK_TOKENS, BlockPool, SequenceCache
from penstock.cache.space import CacheSpace
from penstock.engine.events import ChunkRecord, Event, Failed, FinishReason, GenerationRequest
from penstock.engine.job import Job
from penstock.engine.reuse import Reuse, share
from penstock.engine.sampling import Choice, Sampling
from penstock.engine.status import CacheStatus, Observer, ReuseStatus, ServiceStatus, StepRecord
from penstock.engine.step import LateOnes, Launched, Ready, SpanInput, Step, StepOutcome, StepRunner
from penstock.errors import (
    CacheFullError,
    MemoryExhaustedError,
    PenstockError,
    RequestFailedError,
    StageFailedError,
    StageLostError,
    is_out_of_memory,
)
from penstock.kernels.device import device_kind
from penstock.kernels.threads import StepThreads
from penstock.models.decoder import Decoder
from penstock.plan.admission import CacheLimits
from penstock.plan.batch_scheduler import BatchScheduler
from penstock.plan.grids import RowLaw
from penstock.plan.policy import ScheduleConfig
from penstock.plan.sizing import ChunkSizer, shape_of
from penstock.plan.step import PlannedSpan, Preemption, RequestId, SpanKind, StepPlan

if TYPE_CHECKING:  # loads torch.distributed
    from penstock.engine.stages.pipeline import Pipeline


@dataclass(frozen=True)
class PoolLedger:
    """The blocks of each K/V group, as the scheduler asks about them. Idle ones count as free: they are evicted on
    demand."""

    pools: Sequence[BlockPool]
    jobs: Mapping[RequestId, Job]

    def num_free(self, kept: Mapping[RequestId, int]) -> int:
        return self._num_free(0, kept)

    def num_writable(self, kept: Mapping[RequestId, int]) -> int:
        return min(self._num_free(group, kept) for group in range(len(self.pools)))

    def _num_free(self, group: int, kept: Mapping[RequestId, int]) -> int:
        pool = self.pools[group]
        if not kept:
            return pool.num_available
        # Where there are other groups, nothing is kept, or all.
        released = Counter(
            block
            for request_id, num_blocks in kept.items()
            for block in self.jobs[request_id].cache.kv_groups[group].block_ids[num_blocks:]
        )
        return pool.num_available + sum(pool.num_owners(block) == count for block, count in released.items())

    def num_shared(self, request_id: RequestId) -> int:
        job = self.jobs[request_id]
        return 0 if job.prefix is None or job.cache.blocks.num_blocks else job.prefix.num_in_use()


_log = logging.getLogger("penstock.engine")

# The last steps that a status shows.
STEPS_SHOWN = 240
# The last requests that ended whose chunks can still be explained.
ENDED_EXPLAINED = 64
# A request in whose steps a stage was lost so often, with nothing new of it in between, is run alone, and given up.
SUSPICIOUS_LOSSES, MOST_LOSSES = 2, 5


def steps_in_flight(model: Decoder, stages: "Pipeline | None" = None) -> int:
    """As many as the stages can have, or the device."""
    return device_kind(model.device).steps_in_flight if stages is None else stages.depth


class Notice(NamedTuple):
    """Something to be told once the step is over. An error in it is the job's, where there is one."""

    tell: Callable[[], None]
    job: Job | None = None


@dataclass
class _InFlight:
    """A step that was begun, and its forward pass once that is launched; of one that awaits tokens, what is ready."""

    step: Step
    launched: Launched | None = None
    ready: Ready | None = None
    num_arrived: int = 0  # requests, when it was planned

    @property
    def has_failed(self) -> bool:
        return self.launched is not None and self.launched.error is not None


class Batcher:
    """The requests of one model, over one cache. What is to be told of a step gathers in `notices`.

    Up to `depth` steps are in flight, where the device runs behind the host: the next chunks of prompts are launched
    while it computes. A step that samples ends that, since the next one wants its tokens: that one is planned and
    made ready as if each request went on, and launched when the tokens are there. Where the depth is more than the
    device's own, other requests go on.
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
        plans_ahead: bool | None = None,
        depth: int | None = None,
        lock: AbstractContextManager[object] | None = None,
        raises: bool = False,
        keeps_logits: bool = False,
        stages: "Pipeline | None" = None,
    ) -> None:
        """Where it looks ahead, decodes are launched before the step before them is settled; where it plans ahead, a
        step is made ready before the tokens of the one before it are known. By default, both and the depth are the
        device's. `lock` guards what is known of requests: it is taken for the short parts of a step.

        With `raises`, what a step of one request raises is raised on, and the request stands where it stood; else the
        request ends with it. `stages` run the layers before the model's."""
        self.space = space
        self.reuse = reuse
        self.notices: deque[Notice] = deque()
        self.num_shrinks = 0  # how often memory ran out, and chunks were halved
        self._stages = stages
        self._config = model.config
        self._depth = steps_in_flight(model, stages) if depth is None else depth
        self._waits_for_tokens = self._depth <= steps_in_flight(model)
        limits = CacheLimits(space.blocks.num_blocks, BLOCK_TOKENS, keeps_prefix=space.keeps_prefix)
        self._jobs: dict[RequestId, Job] = {}  # in order of arrival
        self._scheduler = BatchScheduler(
            schedule,
            limits,
            sizer,
            PoolLedger(space.pools, self._jobs),
            depth=1 if self._waits_for_tokens else self._depth,
            num_groups=None if stages is None else stages.num_stages,
        )
        self._sizer = sizer
        looks_ahead = model.can_record and self._waits_for_tokens if looks_ahead is None else looks_ahead
        # Whether a step is planned while the one before it samples.
        self._plans_ahead = looks_ahead and self._depth > 1 if plans_ahead is None else plans_ahead
        self._plans_ahead &= self._waits_for_tokens and not raises and stages is None
        self._runner = StepRunner(
            model,
            canon,
            space,
            strict=strict,
            looks_ahead=looks_ahead,
            overlaps=self._plans_ahead,
            keeps_logits=keeps_logits,
            stages=stages,
        )
        self._observers = tuple(observers)
        # Where stages run, the layers are another thread's: this one has nothing large to do.
        is_host = device_kind(model.device).is_host
        self._threads = StepThreads(is_host=is_host, torch_multiplies=False) if stages else model.threads
        self._lock = nullcontext() if lock is None else lock
        self._raises = raises
        # Whether a step of decodes goes on with what was launched ahead, and is committed once it ends.
        self._repeats = looks_ahead and self._waits_for_tokens and not raises and space.slots is None
        self._rooms: dict[int, list[Job]] = {}  # of a step that goes on: by where in a block it began
        self._flight: deque[_InFlight] = deque()  # the oldest first
        self._settled_s = 0.0  # when the last step was
        # Chunks of the last ones.
        self._ended: OrderedDict[RequestId, tuple[ChunkRecord, ...]] = OrderedDict()
        self._steps: deque[StepRecord] = deque(maxlen=STEPS_SHOWN)
        self._num_steps = 0
        self._num_arrived = 0
        self.num_begun = 0  # steps, those that failed among them
        # Requests of a step that failed: each runs alone, so that only the one at fault ends.
        self._suspects: deque[RequestId] = deque()
        self._began_s = time.perf_counter()

    def step(self) -> StepRecord | None:
        """Launch as many steps as may be in flight, then settle the oldest. None where nothing was committed: nothing
        can be run now, or the step failed and was undone.

        Where a stage is lost, requests keep their tokens, and the next call brings it back. It raises StageError if
        that cannot be done now, and may be called again."""
        if self._stages is not None and self._stages.lost is not None:
            self._restore(self._stages)
            return None
        with self._threads:
            try:
                return self._run_oldest()
            except StageLostError as error:
                _log.warning("%s: requests wait until it is back", error)
                return None
            except BaseException:
                with self._lock:
                    self._abort_all(self._scheduler.abort)
                raise

    def _restore(self, stages: "Pipeline") -> None:
        """A stage is gone, and with it what it had of every request. One that it was lost in too often ends."""
        with self._lock:
            in_flight = {span.request_id for begun in self._flight for span in begun.step.plan.spans}
            self.restart()
            for job in [self._jobs[request_id] for request_id in in_flight & self._jobs.keys()]:
                job.lose_stage()
                if job.num_losses >= MOST_LOSSES:
                    lost = stages.lost_error()
                    reason = f"{MOST_LOSSES} times at the same place of a request: {lost.reason}"
                    self._end_with(job, StageFailedError(lost.stage, lost.address, reason))
        stages.restore()
        _log.warning("all stages are there again")

    def _run_oldest(self) -> StepRecord | None:
        while self._has_room_in_flight():
            with self._lock:
                step = self.begin()
            if step is None:
                break
            self._flight[-1].launched = self._runner.launch(step)
        if not self._flight:
            return None
        oldest = self._flight[0]
        assert oldest.launched is not None
        outcome = self._finish(oldest.step, oldest.launched, plans_ahead=self._plans_ahead)
        if len(self._flight) > 1 and self._flight[1].launched is None:
            self._launch_ahead(self._flight[1], outcome)
        with self._lock:
            return self.settle(oldest.step, outcome)

    def begin(self, expected: Collection[RequestId] = ()) -> Step | None:
        """Plan a step, take what it preempts, and reserve room for it; as if these requests, which the newest step in
        flight samples for, had their tokens."""
        plan = self._schedule(expected)
        if plan is None:
            return None
        now = time.perf_counter()
        for preemption in plan.preemptions:
            self._preempt(preemption)
        inputs: list[SpanInput] = []
        try:
            for planned in plan.spans:
                job = self._jobs[planned.request_id]
                if job.start(now) and self.reuse is not None:
                    self.reuse.count(job.num_cached)
                inputs.append(self._reserve(job, planned, num_spans_left=len(plan.spans) - len(inputs)))
        except BaseException:
            self._withdraw(plan, plan.spans[: len(inputs)])
            raise
        if self._repeats:
            self._make_room_after(plan)
        awaited = frozenset(expected).intersection(planned.request_id for planned in plan.spans)
        step = Step(plan, tuple(inputs), now, self._scheduler.decision, awaited=awaited)
        if self._sizer is not None and plan.num_chunk_tokens:
            shape = shape_of(plan)
            step = replace(
                step,
                predicted_s=self._sizer.predict_s(shape),
                predicted_bytes=self._sizer.predict_bytes(shape),
            )
        self.num_begun += 1
        self._flight.append(_InFlight(step, num_arrived=self._num_arrived))
        return step

    def run(self, step: Step) -> StepOutcome:
        """Launch a step and finish it. It changes nothing but the cache's tensors, so it may be run again."""
        return self._finish(step, self._runner.launch(step))

    def settle(self, step: Step, outcome: StepOutcome) -> StepRecord | None:
        """Commit the oldest step in flight, or let it go on with the next token of each; or undo it, and those after
        it, if it failed."""
        if outcome.error is None:
            return self._commit(step, outcome)
        if step.num_before:  # it went on: what failed is begun anew, by itself
            self._commit_before(step)
        else:
            self._recover(step.plan, outcome.error)
        return None

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched and not settled."""
        return len(self._flight)

    @property
    def logits(self) -> Tensor | None:
        """[rows, vocab] of the last step that sampled, where they are kept."""
        return self._runner.logits

    def new_sequence(self, request: GenerationRequest) -> SequenceCache:
        """An empty cache for a request."""
        num_tokens = len(request.token_ids) + request.max_tokens
        return self.space.new_sequence(
            is_long=self._config.is_long(num_tokens), num_tokens=len(request.token_ids)
        )

    def add(self, job: Job) -> None:
        """Put a request into the queue, or raise QueueFullError or CacheFullError."""
        request = job.request
        # A prompt without an answer is read to its end like others, and what follows it is left away.
        num_answer = max(request.max_tokens, 1)
        self._scheduler.add(
            job.id, job.num_prompt, num_answer, request.owner, request.priority, num_leaving=self._num_leaving
        )
        self._jobs[job.id] = job
        self._num_arrived += 1

    @property
    def _num_leaving(self) -> int:
        """Requests that have been told their end, and that a step in flight has still."""
        return sum(job.ending is not None for job in self._jobs.values())

    def admit(self) -> Collection[RequestId]:
        """Let requests run that have room, and give those that read what is known of their prompts by now. Returns
        those that are to sit the next step out."""
        self._scheduler.admit()
        # What is cancelled ends when its steps in flight do: no other is begun for it.
        cancelled = [job.id for job in self._jobs.values() if job.wants_cancel] if self._flight else []
        if self.reuse is None:
            return cancelled
        reading = {
            job.prefix: job
            for job in self._jobs.values()
            if job.prefix is not None and self._scheduler.reads(job.id)
        }
        shared = share(reading, in_pieces=len(self._jobs) > 1)
        for job in [reading[prefix] for prefix in shared.gained]:
            self._scheduler.advance(job.id, job.cache.num_tokens)
            if event := job.skip(job.cache.num_tokens):
                self._tell(job, event)
        return {reading[prefix].id for prefix in shared.waiting}.union(cancelled)

    def cancel(self, request_id: RequestId) -> None:
        """End a request: now, or with the steps that it is in. Nothing happens if it has ended."""
        job = self._jobs.get(request_id)
        if job is None:
            return
        job.wants_cancel = True
        if not job.cache.num_in_flight:
            self._scheduler.remove(request_id)
            self._end(job, "cancelled")

    def abandon(self) -> None:
        """Undo all steps in flight."""
        self._abort_all(self._scheduler.abort)

    def restart(self) -> None:
        """All that the caches hold is lost, with a stage: every request keeps its tokens, and reads them again."""
        self.abandon()
        for job in self._jobs.values():
            job.pause()
            if job.prefix is not None:
                job.prefix.begin_again()
            job.cache.cut(0)
        if self.reuse is not None:
            self.reuse.index.clear()
        self._scheduler.restart()

    def cancel_all(self) -> None:
        for request_id in tuple(self._jobs):
            self.cancel(request_id)

    def fail_all(self, error: PenstockError) -> None:
        """End every request, because nothing more can be run. What a broken cache does then is nobody's concern."""
        for job in tuple(self._jobs.values()):
            with suppress(Exception):
                job.cache.abort()
                self._end(job, error)

    def status(self) -> ServiceStatus:
        now = time.perf_counter()
        blocks, slots = self.space.blocks, self.space.slots
        slots_idle = self.reuse.index.num_idle_snapshots if self.reuse else 0
        return ServiceStatus(
            requests=tuple(
                job.status(self._scheduler.view(job.id), now)
                for job in self._jobs.values()
                if job.ending is None
            ),
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
            num_running=self._scheduler.num_running - self._num_leaving,
            num_waiting=self._scheduler.num_waiting,
            uptime_s=now - self._began_s,
            reuse=self.reuse.status() if self.reuse else ReuseStatus(),
            in_flight=tuple(
                begun.step.record(index, begun.step.started_s - self._began_s, now - begun.step.started_s)
                for index, begun in enumerate(self._flight, self._num_steps)
            ),
        )

    def explain(self, request_id: RequestId) -> tuple[ChunkRecord, ...] | None:
        """The chunks of a request that runs, or was among the last to end; None of any other."""
        if (job := self._jobs.get(request_id)) is not None:
            return tuple(job.chunks)
        return self._ended.get(request_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the pools hold just what the requests do, between steps."""
        blocks, slots = self.space.blocks, self.space.slots
        self._scheduler.check_integrity()
        for group, pool in enumerate(self.space.pools):
            pool.check_integrity()
            held = {block for job in self._jobs.values() for block in job.cache.kv_groups[group].block_ids}
            in_use = pool.num_blocks - pool.num_available
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
            num_reserved = sum(
                len(item.state.writes) for begun in self._flight for item in begun.step.inputs if item.state
            )
            least = len(states) + num_reserved
            assert least <= in_use <= least + num_snapshots, (
                f"{least} states are held and {num_snapshots} kept, but {in_use} are in use"
            )

    def _finish(self, step: Step, launched: Launched, *, plans_ahead: bool = False) -> StepOutcome:
        """Wait for a step's forward pass; a token for each request that samples. What follows is made ready
        meanwhile."""
        jobs = [self._jobs[planned.request_id] for planned in step.plan.spans if planned.samples]
        meanwhile = self._follow if plans_ahead else self._expect_like_it
        outcome = self._runner.finish(step, launched, jobs, partial(meanwhile, step, jobs))
        if self._raises and jobs and isinstance(choice := outcome.choices.get(jobs[0].id), Exception):
            return StepOutcome(error=choice)
        if self._comes_again(step, jobs):
            tokens = [choice.token for choice in outcome.choices.values() if isinstance(choice, Choice)]
            if len(tokens) == len(jobs):
                self._runner.launch_next(jobs, tokens)
        return outcome

    @property
    def _is_closed(self) -> bool:
        """Nobody waits, or could come in."""
        scheduler = self._scheduler
        return not scheduler.num_waiting or scheduler.num_running == scheduler.config.max_running

    def _comes_again(self, step: Step, jobs: Sequence[Job]) -> bool:
        """Whether the step after this one, in which these sample, is of the same requests: all that run."""
        return self._is_closed and len(jobs) == len(step.inputs) == self._scheduler.num_running

    def _expect_like_it(self, step: Step, jobs: Sequence[Job], sampling: Sampling) -> None:
        self._runner.expect_after(step)

    def _follow(self, step: Step, jobs: Sequence[Job], sampling: Sampling) -> None:
        """While the oldest step is computed, in which these sample: launch what follows, or make it ready where the
        host has to choose tokens. It is the same decodes once more; or a step that is planned now, as if each of
        these went on but those that plainly do not. Who ends unforeseen runs once more, in vain."""
        goes_on = [job for job in jobs if not (job.has_last_token or job.wants_cancel or job.ending)]
        slots = self.space.slots
        is_like_it = (
            slots is None
            and self._comes_again(step, jobs)
            and all(job.may_go_on for job in jobs)
            and self._runner.expect_after(step)
        )
        if is_like_it:
            self._runner.launch_next(jobs, sampling.tokens())
        elif slots is None or slots.num_free >= self._scheduler.num_running:
            self._plan_next(goes_on)
            if len(self._flight) > 1 and (tokens := sampling.tokens()) is not None:
                self._launch_late(goes_on, LateOnes([job.id for job in jobs], tokens))

    def _plan_next(self, goes_on: Sequence[Job]) -> None:
        with self._lock:
            if self._flight[0].step.num_before:
                self._catch_up(self._flight[0])
            try:
                ahead = self.begin([job.id for job in goes_on])
            except CacheFullError:  # the step itself meets it
                return
        if ahead is None:
            return
        try:
            ready = self._runner.prepare(ahead)
        except Exception as error:  # as above, if it is more than a moment's
            _log.debug("a step could not be made ready", exc_info=error)
            ready = None
        if ready is None:
            self._withdraw_newest()
        else:
            self._flight[-1].ready = ready

    def _launch_late(self, goes_on: Sequence[Job], tokens: LateOnes) -> None:
        """The step that is ready, before the host has its tokens; but not sooner than the device wants it, since who
        comes by then is to be in it."""
        oldest = self._flight[0].launched
        if oldest is not None and oldest.nearly is not None:
            oldest.nearly()
            if not self._is_current(self._flight[1]):
                self._withdraw_newest()
                self._plan_next(goes_on)
        if len(self._flight) > 1:
            self._launch_newest(tokens)

    def _is_current(self, ahead: _InFlight) -> bool:
        """Whether nobody came since it was planned who could be in it."""
        return self._is_closed or self._num_arrived == ahead.num_arrived

    def _launch_ahead(self, ahead: _InFlight, outcome: StepOutcome) -> None:
        """The step that is ready has its tokens; or it is planned anew, with what is known by now."""
        tokens = {
            name: choice.token for name, choice in outcome.choices.items() if isinstance(choice, Choice)
        }
        if outcome.error is None and tokens.keys() >= ahead.step.awaited and self._is_current(ahead):
            self._launch_newest(tokens)
        else:
            self._withdraw_newest()

    def _launch_newest(self, tokens: Mapping[RequestId, int] | LateOnes) -> None:
        ahead = self._flight[-1]
        assert ahead.ready is not None
        launched = self._runner.launch_ready(ahead.step, ahead.ready, tokens)
        if launched.error is None:
            ahead.launched = launched
        else:  # there is less memory beside another step: if it is more than that, the step itself meets it
            _log.debug("a step could not be launched ahead", exc_info=launched.error)
            self._withdraw_newest()

    def _withdraw_newest(self) -> None:
        """Take a step back that was not launched."""
        with self._lock:
            plan = self._flight.pop().step.plan
            self._withdraw(plan, plan.spans)

    def _withdraw(self, plan: StepPlan, reserved: Sequence[PlannedSpan]) -> None:
        """Take a plan back, of which these spans have room."""
        for planned in reserved:
            self._jobs[planned.request_id].cache.withdraw()
        self._scheduler.abort(plan)

    def _has_room_in_flight(self) -> bool:
        if not self._flight:
            return True
        last, slots = self._flight[-1], self.space.slots
        has_slots = slots is None or slots.num_free >= self._scheduler.num_running
        has_to_wait = last.has_failed or (self._waits_for_tokens and last.step.plan.samples)
        return len(self._flight) < self._depth and has_slots and not has_to_wait

    def _schedule(self, expected: Collection[RequestId] = ()) -> StepPlan | None:
        while self._suspects:
            if self._flight:
                return None
            suspect = self._suspects.popleft()
            if suspect in self._jobs and (plan := self._scheduler.schedule(only=suspect)) is not None:
                return plan
        held = self.admit()
        if self._stages is not None:
            for job in [job for job in self._jobs.values() if job.num_losses >= SUSPICIOUS_LOSSES]:
                if self._flight:
                    return None
                if (plan := self._scheduler.schedule(only=job.id)) is not None:
                    return plan
        return self._scheduler.schedule(held=held, expected=expected)

    def _preempt(self, preemption: Preemption) -> None:
        job = self._jobs[preemption.request_id]
        job.pause()
        if job.prefix is not None:
            job.prefix.leave(preemption.num_kept // BLOCK_TOKENS)
        job.cache.cut(preemption.num_kept)

    def _reserve(self, job: Job, planned: PlannedSpan, num_spans_left: int) -> SpanInput:
        """Room for a span, and for the states that are kept of it: at its end, where its request's next chunk begins,
        and where others may go on that begin alike."""
        span, is_chunk = planned.span, planned.kind is SpanKind.CHUNK
        ends = [span.end]
        if is_chunk and self.space.slots is not None:
            if planned.resumes_at is not None:
                ends.append(planned.resumes_at)
            if job.prefix is not None:
                num_free = self.space.slots.num_free - num_spans_left
                ends += job.prefix.states_to_keep(span.start, span.end, num_free)
            ends = sorted(set(ends))
        state = job.cache.reserve(span.start, ends)
        tokens = job.tokens[span.start : span.end] or (0,)  # it is awaited
        cache = job.cache
        rows = job.rows if is_chunk else None
        return SpanInput(span, tokens, cache.kv_groups, is_chunk, planned.samples, state, rows, cache.is_long)

    def _make_room_after(self, plan: StepPlan) -> None:
        """Where a block begins behind a step's decodes: what all of its spans leave of the cache."""
        for planned in plan.spans:
            end = planned.span.end
            if planned.kind is not SpanKind.CHUNK and planned.samples and end % BLOCK_TOKENS == 0:
                with suppress(CacheFullError):  # the step after it, which may go on from it, will see
                    self._jobs[planned.request_id].cache.make_room(end + 1)

    def _commit(self, step: Step, outcome: StepOutcome) -> StepRecord:
        now = time.perf_counter()
        # A step that was launched while the one before it ran has the device to itself from that one's end on.
        seconds = now - max(step.started_s, self._settled_s)
        self._settled_s = now
        ended: dict[RequestId, FinishReason | Exception] = {}
        # Of decodes, and each goes on, as far as is plain; a replay is a step of its own.
        may_go_on = step.num_before or not step.plan.num_chunk_tokens
        if self._repeats and self._runner.is_ahead and may_go_on:
            self._take_all(outcome.choices, now, ended)
            if (self._plans_ahead or not ended) and self._has_room_to_go_on(step):
                record = self._go_on(step, now, seconds)
                if ended:
                    self._catch_up(self._flight[0])
                for request_id, how in ended.items():
                    self._end(self._jobs[request_id], how)
                return record
            self._book(step)
        else:
            self._book(step)
            self._tell_all(step, outcome, now, seconds, ended)
        self._flight.popleft()
        # The next step has a span of some already: they are told, and run it in vain.
        over = [name for name in ended if not self._jobs[name].cache.num_in_flight]
        self._scheduler.commit(step.plan, over, seconds, step.num_before)
        for request_id, how in ended.items():
            self._end(self._jobs[request_id], how)
        return self._record(step, seconds, outcome.issued)

    def _book(self, step: Step, num_more: int | None = None) -> None:
        """The tokens of a step are in the caches, those of so many passes after its first, too."""
        num_more = step.num_before if num_more is None else num_more
        for planned in step.plan.spans:
            job = self._jobs[planned.request_id]
            if num_more:
                job.cache.extend(planned.span.end + num_more)
            job.cache.commit(planned.span.end + num_more)
            job.cache.trim()
            self._note(job, planned)

    def _note(self, job: Job, planned: PlannedSpan) -> None:
        """A span was committed, of which others may want the blocks, and nobody those behind its windows."""
        # What ran in vain has a token that is not the request's.
        if job.prefix is not None and job.cache.num_tokens <= len(job.tokens):
            is_chunk = planned.kind is SpanKind.CHUNK
            job.prefix.note(job.tokens, planned.span.start, is_chunk=is_chunk)
        job.cache.slide(planned.resumes_at)

    def _commit_before(self, step: Step) -> None:
        """End a step that went on before the pass that it is at."""
        num_more = step.num_before - 1
        self._book(step, num_more)
        self._flight.popleft()
        self._scheduler.commit(step.plan, num_before=num_more)

    def _catch_up(self, begun: _InFlight) -> None:
        """Commit what a step has gone on from: the pass that it is at is a step of its own from now on."""
        before = begun.step.plan
        plan = self._scheduler.split(before, begun.step.num_before)
        inputs: list[SpanInput] = []
        for old, new in zip(before.spans, plan.spans, strict=True):
            job = self._jobs[new.request_id]
            job.cache.extend(new.span.start)
            job.cache.commit(new.span.start)
            inputs.append(self._reserve(job, new, num_spans_left=1))  # there is room: it is written to
            self._note(job, old)
        begun.step = Step(plan, tuple(inputs), begun.step.started_s)

    def _go_on(self, step: Step, now: float, seconds: float) -> StepRecord:
        """The step's decodes go on with what was launched ahead, and their books are done later, all at once: nothing
        is planned, reserved or built for a token that is like the one before it."""
        self._scheduler.repeat(step.plan, step.num_before, seconds)
        if self.reuse is not None and self.reuse.store is not None:
            for planned in step.plan.spans:
                if (prefix := self._jobs[planned.request_id].prefix) is not None:
                    prefix.offer()
        record = self._record(step, seconds)
        self._flight[0] = _InFlight(step.again(record, now), self._runner.go_on())
        self.num_begun += 1
        return record

    def _has_room_to_go_on(self, step: Step) -> bool:
        """Whether each sequence has room for the token after that which was launched ahead: made here, where a block
        begins."""
        if not step.num_before:
            self._rooms.clear()
            for planned in step.plan.spans:
                job = self._jobs[planned.request_id]
                self._rooms.setdefault(planned.span.end % BLOCK_TOKENS, []).append(job)
        num_more = step.num_before + 1
        jobs = self._rooms.get(-num_more % BLOCK_TOKENS, ())
        # Else windows that are kept for others would be given up, for blocks that lie behind these jobs' windows.
        if any(pool.num_free < len(jobs) for pool in self.space.windows):
            return False
        try:
            for job in jobs:
                job.cache.make_room(len(job.tokens) + 1)
        except CacheFullError:
            return False
        return True

    def _tell_all(
        self,
        step: Step,
        outcome: StepOutcome,
        now: float,
        seconds: float,
        ended: dict[RequestId, FinishReason | Exception],
    ) -> None:
        """What a step gave each of its requests; which of them ended."""
        taken: dict[RequestId, Choice | Exception] = {}
        for planned in step.plan.spans:
            job, span = self._jobs[planned.request_id], planned.span
            is_chunk = planned.kind is SpanKind.CHUNK
            if job.wants_cancel or job.ending is not None:
                ended[job.id] = job.ending or "cancelled"
                continue
            if is_chunk:
                chunk = step.explain(planned, job.num_prompt, seconds)
                if event := job.read(chunk, planned.resumes_at, now):
                    self._tell(job, event)
                if job.rows is not None and (event := job.take_rows(outcome.rows[job.id], span.end)):
                    self._tell(job, event)
            if planned.samples:
                taken[job.id] = outcome.choices[job.id]
        self._take_all(taken, now, ended)

    def _record(self, step: Step, seconds: float, issued: int | None = None) -> StepRecord:
        record = step.record(self._num_steps, step.started_s - self._began_s, seconds, issued)
        self._num_steps += 1
        self._steps.append(record)
        for observer in self._observers:
            self._observe(partial(observer.on_step, record))
        return record

    def _take_all(
        self,
        choices: Mapping[RequestId, Choice | Exception],
        now: float,
        ended: dict[RequestId, FinishReason | Exception],
    ) -> None:
        """Each request's choice is its token; which of them end by it, or were cancelled meanwhile."""
        gaps: list[tuple[RequestId, float, bool]] = []
        for request_id, choice in choices.items():
            job = self._jobs[request_id]
            if job.wants_cancel:
                ended[request_id] = "cancelled"
                continue
            if isinstance(choice, Exception):
                ended[request_id] = choice
                continue
            gap_s, is_first = job.gap_s(now), job.num_generated == 0
            try:
                event, reason = job.take(choice, now)
            except Exception as error:
                ended[request_id] = error
                continue
            if event is not None:
                gaps.append((request_id, gap_s, is_first))
                self._tell(job, event)
            if reason is not None:
                ended[request_id] = reason
        for observer in self._observers if gaps else ():
            self._observe(partial(_tell_gaps, observer, gaps))

    def _recover(self, plan: StepPlan, error: Exception) -> None:
        """Undo the step that failed. Out of memory makes chunks smaller, as long as they can be; anything else is
        looked for one request at a time, and so is a request that one token is too much for."""
        planned = [span.request_id for span in plan.spans]
        if is_out_of_memory(error):
            if self._abort_all(self._scheduler.shrink):
                self.num_shrinks += 1
                for observer in self._observers:
                    self._observe(observer.on_shrink)
                return
            start = plan.spans[0].span.start
            exhausted = MemoryExhaustedError(
                f"there is no memory left to run one token after {start}: free some, try again later, or ask for less"
            )
            exhausted.__cause__ = error
            error = exhausted
        else:
            self._abort_all(self._scheduler.abort)
        if len(planned) > 1:
            self._suspects.extend(planned)
        elif planned[0] in self._jobs:
            self._end_with(self._jobs[planned[0]], error)

    def _end_with(self, job: Job, error: Exception) -> None:
        """End a request that is in no step, or raise its error on."""
        if self._raises:
            raise error
        self._scheduler.remove(job.id)
        self._end(job, error)

    def _abort_all(self, undo: Callable[[StepPlan], bool | None]) -> bool | None:
        """Undo all steps in flight: every request stands where it stood before the oldest. What was cancelled
        meanwhile ends."""
        if self._flight and (oldest := self._flight[0].step).num_before:
            self._commit_before(oldest)
        plans = [begun.step.plan for begun in self._flight]
        for begun in reversed(self._flight):  # the oldest may be running, and is waited for
            if begun.launched is not None:
                begun.launched.drop()
        self._flight.clear()
        for request_id in dict.fromkeys(span.request_id for plan in plans for span in plan.spans):
            self._jobs[request_id].cache.abort()
        answer = undo(plans[0]) if plans else None
        for job in tuple(self._jobs.values()):
            if job.wants_cancel or job.ending is not None:
                self.cancel(job.id)
        return answer

    def _end(self, job: Job, how: FinishReason | Exception) -> None:
        """Tell how a request ended, once. Unless a step in flight has it still, the scheduler knows it no more: free
        all that it holds."""
        if job.ending is None:
            job.ending = how
            self._tell_end(job, how)
        if job.cache.num_in_flight:
            return
        del self._jobs[job.id]
        if job.prefix is not None:
            job.prefix.end()
        job.cache.free()

    def _tell_end(self, job: Job, how: FinishReason | Exception) -> None:
        now = time.perf_counter()
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

    def _tell(self, job: Job, event: Event) -> None:
        self.notices.append(Notice(partial(job.listener, event), job))

    def _observe(self, tell: Callable[[], None]) -> None:
        self.notices.append(Notice(tell))


def _tell_gaps(observer: Observer, gaps: Sequence[tuple[RequestId, float, bool]]) -> None:
    for request_id, gap_s, is_first in gaps:
        observer.on_token(request_id, gap_s, is_first=is_first)


def _as_failure(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    _log.error("a request failed, the others go on", exc_info=error)
    failure = RequestFailedError(f"the request could not be run on: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
