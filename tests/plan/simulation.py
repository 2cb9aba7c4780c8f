"""A service without a model: requests come, steps run, fail or run out of memory, and every promise is checked.

The simulation keeps a ledger of its own. What a plan says is checked against that, never against the scheduler.
"""

from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

import pytest

from penstock.errors import CacheFullError, QueueFullError
from penstock.plan import (
    BatchScheduler,
    CacheLimits,
    ChunkSizer,
    PlannedSpan,
    ScheduleConfig,
    SchedulePolicy,
    SpanKind,
    StepOrderError,
    StepPlan,
    StepTimeCoefficients,
)
from penstock.plan.admission import REPLAY_TOKENS
from penstock.plan.policy import half_of, share_unit
from penstock.plan.sizing import shape_of

# What a step costs, where a sizer learns it.
SPEED = StepTimeCoefficients(0.012, 8e-4, 9e-8, 4e-3, 1.5e-6)


@dataclass(frozen=True)
class Workload:
    """What comes in and what goes wrong. The numbers below 1 are probabilities at each step."""

    seed: int = 0
    most_prompt: int = 3000
    most_answer: int = 120
    burst: float = 0.03
    most_burst: int = 8
    cancel: float = 0.004
    abort: float = 0.02
    isolate: float = 0.002
    shrink: float = 0.0


@dataclass
class SimRequest:
    """The ledger's page of one request. Turns are committed steps; the last ones count from its admission, too."""

    id: str
    arrival: int
    num_prompt: int
    num_answer: int
    max_tokens: int
    turns_ahead: int  # that those before it may take, one after the other
    arrived_turn: int
    num_known: int = 0
    num_run: int = 0
    num_issued: int = 0  # what steps in flight run is counted
    is_running: bool = False
    has_started: bool = False
    last_token: int | None = None
    last_chunk: int = 0
    was_shrunk: bool = False  # since its last chunk
    num_overtakes: int = 0

    @property
    def kind(self) -> SpanKind:
        """Of its next span."""
        if self.num_issued < self.num_prompt:
            return SpanKind.CHUNK
        return SpanKind.DECODE if self.num_issued >= self.num_known - 1 else SpanKind.REPLAY

    @property
    def can_decode(self) -> bool:
        return self.kind is SpanKind.DECODE and self.num_issued < self.num_known

    @property
    def is_decoding(self) -> bool:
        """Whether all but its last token is in the cache."""
        return self.num_prompt <= self.num_run == self.num_known - 1

    @property
    def furthest_end(self) -> int:
        if self.kind is SpanKind.CHUNK:
            return self.num_prompt
        return min(self.num_known, self.num_issued + REPLAY_TOKENS)


@dataclass
class Observed:
    """The worst that was seen."""

    longest_decode_gap: int = 0
    longest_prompt_gap: int = 0
    deepest: int = 0  # steps in flight
    most_overtakes: int = 0
    most_of_start_bound: float = 0.0  # where nothing but a place was waited for
    most_of_crowded_bound: float = 0.0  # where the cache was full
    counts: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(
        default_factory=list
    )  # steps that decodes were in, or waited for, and chunks too

    @property
    def num_preemptions(self) -> int:
        return self.counts["preempted"]


class Simulation:
    """Runs one scheduler against one workload, with up to `depth` steps in flight. A broken promise is an
    AssertionError. What is promised of waits is that of one step at a time, `depth` times."""

    def __init__(
        self,
        config: ScheduleConfig,
        limits: CacheLimits,
        workload: Workload,
        sizer: ChunkSizer | None = None,
        depth: int = 1,
    ) -> None:
        self.config, self.limits, self.workload = config, limits, workload
        self.depth = depth
        self.longest_decode_gap = depth * config.longest_decode_gap
        self.longest_prompt_gap = depth * config.longest_prompt_gap
        self.flight: list[StepPlan] = []  # the oldest first
        self.digest = sha256()  # of every plan
        self.scheduler = BatchScheduler(config, limits, sizer, depth=depth)
        self.sizer = sizer
        self.observed = Observed()
        self.requests: dict[str, SimRequest] = {}
        self.random = Random(workload.seed)
        self.noise = Random(workload.seed)  # of its own, so that what happens does not depend on it
        self.num_free = limits.num_blocks
        self.turn = 0
        self.num_arrived = 0
        self.num_shrunk_left = 0
        self.shrunk_budget: int | None = None
        self.last_shrunk = -depth  # the last turn of a smaller budget
        self.is_ample = (
            True  # nothing was ever preempted, shrunk or without room: a place is all one waits for
        )

    def run(self, num_steps: int) -> Observed:
        while self.turn < num_steps:
            self._arrive()
            self._cancel()
            self._step()
        while self.requests:
            self._step()
        assert self.scheduler.schedule() is None
        assert self.scheduler.num_free_blocks == self.limits.num_blocks
        assert self.scheduler.request_ids == ()
        ended = self.observed.counts["finished"] + self.observed.counts["cancelled"]
        assert ended == self.observed.counts["arrived"]
        return self.observed

    # What happens.

    def _arrive(self) -> None:
        is_quiet = self.turn // 1000 % 2  # long enough for everything to end
        if self.random.random() >= self.workload.burst / (20 if is_quiet else 1):
            return
        is_long = self.random.random() < 0.5
        for _ in range(self.random.randint(1, self.workload.most_burst)):
            most_prompt = self.workload.most_prompt if is_long else 100
            num_prompt = self.random.randint(1, most_prompt)
            max_tokens = self.random.randint(1, self.workload.most_answer)
            self._add(num_prompt, max_tokens)

    def _add(self, num_prompt: int, max_tokens: int) -> None:
        name = f"r{self.num_arrived}"
        if self._blocks(num_prompt + max_tokens - 1) > self.limits.num_blocks:
            with pytest.raises(CacheFullError):
                self.scheduler.add(name, num_prompt, max_tokens)
            return
        if len(self.requests) >= self.config.max_running + self.config.max_waiting:
            with pytest.raises(QueueFullError):
                self.scheduler.add(name, num_prompt, max_tokens)
            self.observed.counts["refused"] += 1
            return
        self.scheduler.add(name, num_prompt, max_tokens)
        self.requests[name] = SimRequest(
            id=name,
            arrival=self.num_arrived,
            num_prompt=num_prompt,
            num_answer=self.random.randint(1, max_tokens),
            max_tokens=max_tokens,
            turns_ahead=sum(map(self.longest_stay, self.requests.values())),
            arrived_turn=self.turn,
            num_known=num_prompt,
        )
        self.num_arrived += 1
        self.observed.counts["arrived"] += 1

    def _cancel(self) -> None:
        if self.requests and self.random.random() < self.workload.cancel:
            request = self.random.choice(list(self.requests.values()))
            if request.num_run < request.num_issued:
                with pytest.raises(StepOrderError):
                    self.scheduler.remove(request.id)
                return
            self.scheduler.remove(request.id)
            self._end(request, "cancelled")

    def _step(self) -> None:
        """Plan as far ahead as may be, then end the oldest step, or have one fail: those after it fail with it."""
        while len(self.flight) < self.depth and (plan := self.scheduler.schedule()) is not None:
            self._take(plan)
            self.flight.append(plan)
        assert bool(self.flight) == bool(self.requests), "nothing to run, though requests are here"
        if not self.flight:
            self.turn += 1
            return
        self.observed.deepest = max(self.observed.deepest, len(self.flight))
        chance = self.random.random()
        if chance < self.workload.abort + self.workload.shrink:
            place = self.random.randrange(len(self.flight)) if len(self.flight) > 1 else 0
            plan = self.flight[place]
            self._undo_from(place)
            if chance < self.workload.abort:
                self.scheduler.abort(plan)
            else:
                assert self.scheduler.shrink(plan) == (plan.num_chunk_tokens > 1)
                if plan.num_chunk_tokens > 1:
                    self._shrink(plan.num_chunk_tokens)
        elif chance < self.workload.abort + self.workload.shrink + self.workload.isolate:
            plan = self.flight[0]
            self._undo_from(0)
            self.scheduler.abort(plan)
            self._isolate(plan)
        else:
            self._commit(self.flight.pop(0))
            self._pass_turn()
        assert self.scheduler.num_free_blocks == self.num_free, "a block is lost"
        if chance < 0.05:
            self.scheduler.check_integrity()

    def _isolate(self, failed: StepPlan) -> None:
        """Each request of a failed step runs alone; the one at fault goes."""
        culprit = self.random.choice(failed.spans).request_id
        for suspect in failed.spans:
            plan = self.scheduler.schedule(only=suspect.request_id)
            assert plan is not None, "it fitted in before"
            (planned,) = plan.spans
            assert planned.request_id == suspect.request_id
            # A later step may have been shrunk after this one was issued.
            is_shrunk = self.depth > 1 and self.shrunk_budget is not None
            assert planned.span.end >= suspect.span.end or self.sizer or is_shrunk, "alone it has no less"
            assert not plan.preemptions
            self._take(plan, is_alone=True)
            if suspect.request_id == culprit:
                self._undo(plan)
                self.scheduler.abort(plan)
                self.scheduler.remove(culprit)
                self._end(self.requests[culprit], "cancelled")
            else:
                self._commit(plan)
                if self.num_shrunk_left:
                    self._count_shrunk()

    # A plan, against the ledger.

    def _take(self, plan: StepPlan, *, is_alone: bool = False) -> None:
        was_running = {request.id for request in self.requests.values() if request.is_running}
        self._take_preemptions(plan)
        self._see_who_runs(is_alone=is_alone)
        self._check_newest_first(plan, was_running)
        for planned in plan.spans:
            self._check_span(planned)
            self.num_free -= self._new_blocks(planned)
        assert self.num_free >= 0, "more blocks than there are"
        assert self.scheduler.num_free_blocks == self.num_free
        self._check_budgets(plan)
        self._check_order(plan)
        kinds = {planned.kind is SpanKind.DECODE for planned in plan.spans}
        assert self.config.policy is SchedulePolicy.MIXED or len(kinds) == 1
        decodes = {r.id for r in self.requests.values() if r.is_running and r.can_decode}
        planned_ids = {planned.request_id for planned in plan.spans}
        assert plan.num_held_decodes == len(decodes - planned_ids)
        if self.config.policy is SchedulePolicy.MIXED and not is_alone:
            num_decoding = sum(r.is_running and r.kind is SpanKind.DECODE for r in self.requests.values())
            is_group = len(decodes & planned_ids) >= -(-num_decoding // max(self.depth - 1, 1))
            gave_way = self.depth > 2 and plan.preemptions  # one of its group did
            assert decodes <= planned_ids or is_group or gave_way, "a decode is left out"
        for planned in plan.spans:
            self.requests[planned.request_id].num_issued = planned.span.end
        self.digest.update(repr(plan).encode())

    def _take_preemptions(self, plan: StepPlan) -> None:
        assert not (plan.preemptions and self.flight), "preempted while steps are in flight"
        assert len({preemption.request_id for preemption in plan.preemptions}) == len(plan.preemptions)
        for preemption in plan.preemptions:
            request = self.requests[preemption.request_id]
            kept = preemption.num_kept
            assert request.id != next(iter(self.requests)), "the oldest was preempted"
            assert 0 <= kept <= request.num_run
            assert kept % self.limits.block_tokens == 0
            assert self.limits.keeps_prefix or kept == 0
            self.num_free += self._blocks(request.num_run) - self._blocks(kept)
            was_running = request.is_running
            request.num_run = request.num_issued = kept
            request.is_running = False
            self.observed.counts["preempted"] += 1
            self.observed.counts["gave more"] += not was_running
            self.is_ample = False

    def _see_who_runs(self, *, is_alone: bool) -> None:
        """Admissions are not told of: they are seen. One that comes to run before another counts as overtaking it."""
        passed: list[SimRequest] = []
        for request in self.requests.values():
            view = self.scheduler.view(request.id)
            assert (view.num_prompt, view.num_tokens) == (request.num_prompt, request.num_known)
            assert view.num_run == request.num_run
            expected = "decode" if request.is_decoding else "prompt"
            assert view.phase in ("waiting", expected)
            is_running = view.phase != "waiting"
            if is_running and not request.is_running:
                for earlier in passed:
                    earlier.num_overtakes += 1
                request.last_token, request.last_chunk, request.was_shrunk = None, self.turn, False
            elif not is_running:
                passed.append(request)
            request.is_running = is_running
        for request in passed:
            self.observed.most_overtakes = max(self.observed.most_overtakes, request.num_overtakes)
            assert request.num_overtakes <= self.config.max_overtakes, "overtaken too often"
        num_running = len(self.requests) - len(passed)
        assert num_running == self.scheduler.num_running <= self.config.max_running
        assert len(passed) == self.scheduler.num_waiting
        if passed and num_running < self.config.max_running and not is_alone:
            self.is_ample = False

    def _check_newest_first(self, plan: StepPlan, was_running: set[str]) -> None:
        if not plan.preemptions:
            return
        oldest = min(self.requests[preemption.request_id].arrival for preemption in plan.preemptions)
        for request in self.requests.values():
            if request.arrival > oldest:
                assert not (request.is_running and request.id in was_running), "a newer one goes on"
                assert request.num_run == 0, "a newer one keeps blocks"

    def _check_span(self, planned: PlannedSpan) -> None:
        request = self.requests[planned.request_id]
        span = planned.span
        assert request.is_running
        assert span.start == request.num_issued < request.num_known, "a token is left out or run twice"
        assert span.end <= request.furthest_end
        assert planned.kind is request.kind
        assert planned.samples == (span.end == request.num_known)
        below_grid = self.shrunk_budget is not None and self.shrunk_budget < self.config.grid
        on_grid = span.end % self.config.grid == 0 or span.end == request.furthest_end
        assert on_grid or below_grid, "a chunk ends off the grid"

    def _check_budgets(self, plan: StepPlan) -> None:
        chunks = [planned for planned in plan.spans if planned.kind is not SpanKind.DECODE]
        if self.config.chunk_size == 0:
            assert len(chunks) <= 1
            if self.shrunk_budget is None:
                assert all(
                    planned.span.end == self.requests[planned.request_id].furthest_end for planned in chunks
                )
        else:
            assert plan.num_chunk_tokens <= self.config.chunk_size, "more than the budget"
        if self.config.step_tokens is not None:
            assert plan.num_tokens <= self.config.step_tokens
        if self.shrunk_budget is not None:
            assert plan.num_chunk_tokens <= self.shrunk_budget
        unit = share_unit(self.config.grid)
        for planned in chunks if len(chunks) > 1 else ():
            is_whole = planned.span.end == self.requests[planned.request_id].furthest_end
            assert is_whole or len(planned.span) % unit == 0 or planned.span.start % unit

    def _check_order(self, plan: StepPlan) -> None:
        keys = [
            (planned.kind is not SpanKind.DECODE, self.requests[planned.request_id].arrival)
            for planned in plan.spans
        ]
        assert keys == sorted(set(keys))

    # The end of a step.

    def _undo(self, plan: StepPlan) -> None:
        self.num_free += sum(map(self._new_blocks, plan.spans))
        for planned in plan.spans:
            self.requests[planned.request_id].num_issued = planned.span.start

    def _undo_from(self, place: int) -> None:
        while len(self.flight) > place:
            self._undo(self.flight.pop())

    def _commit(self, plan: StepPlan) -> None:
        now = self.turn + 1
        finished = []
        for planned in plan.spans:
            request = self.requests[planned.request_id]
            request.num_run = planned.span.end
            if planned.kind is not SpanKind.DECODE:
                self._see_chunk(request, now)
                self.observed.counts[planned.kind] += 1
            if planned.samples:
                if request.last_token is not None:
                    self._see_gap(now - request.last_token)
                request.last_token = now
                if request.num_known + 1 == request.num_prompt + request.num_answer:
                    finished.append(request)
                else:
                    request.num_known += 1
        seconds = SPEED.seconds(shape_of(plan)) * max(self.noise.gauss(1, 0.05), 0.8)
        if plan.num_chunk_tokens and (plan.num_chunk_tokens < plan.num_tokens or plan.num_held_decodes):
            self.observed.waits_s.append(seconds)
        self.scheduler.commit(plan, [request.id for request in finished], seconds)
        for request in finished:
            self._end(request, "finished")

    def _see_chunk(self, request: SimRequest, now: int) -> None:
        if not request.was_shrunk:
            self.observed.longest_prompt_gap = max(self.observed.longest_prompt_gap, now - request.last_chunk)
        self._check_prompt_gap(request, now)
        request.last_chunk, request.was_shrunk = now, False
        if not request.has_started:
            request.has_started = True
            self._see_start(request, now)

    def _see_gap(self, gap: int) -> None:
        self.observed.longest_decode_gap = max(self.observed.longest_decode_gap, gap)

    def _check_prompt_gap(self, request: SimRequest, now: int) -> None:
        bound = self.longest_prompt_gap
        if request.was_shrunk:  # no less than one prompt is served in a step of chunks
            bound *= self.config.max_running
        assert now - request.last_chunk <= bound, "a prompt waits too long for its next chunk"

    def _see_start(self, request: SimRequest, now: int) -> None:
        """Its first chunk. Steps that are shrunk take longer than any bound says."""
        if self.workload.shrink:
            return
        waited = now - request.arrived_turn
        if self.is_ample:
            # Until it is admitted every place is taken, by requests that were ahead of it.
            bound = request.turns_ahead // self.config.max_running + self.longest_prompt_gap
            part = self.observed.most_of_start_bound = max(self.observed.most_of_start_bound, waited / bound)
        else:
            # At the worst one runs at a time: those ahead of it, those that overtake it, and work that was lost.
            longest = self._stay(self.workload.most_prompt, self.workload.most_answer)
            bound = request.turns_ahead + (self.config.max_overtakes + 1) * longest
            part = self.observed.most_of_crowded_bound = max(
                self.observed.most_of_crowded_bound, waited / bound
            )
        assert part <= 1, "a request waits too long for its start"

    def _pass_turn(self) -> None:
        """A step was committed: nobody who runs has waited for longer than was promised."""
        self.turn += 1
        if self.num_shrunk_left:
            self.last_shrunk = self.turn
        for request in self.requests.values():
            if not request.is_running:
                continue
            request.was_shrunk |= self.turn - self.last_shrunk < self.depth
            if not request.is_decoding:
                self._check_prompt_gap(request, self.turn)
            elif request.last_token is not None:
                gap = self.turn - request.last_token
                assert gap < self.longest_decode_gap or gap == 0, "a decode waits too long"
        if self.num_shrunk_left:
            self._count_shrunk()

    def _shrink(self, num_tokens: int) -> None:
        self.shrunk_budget = half_of(num_tokens, self.config.grid)
        self.num_shrunk_left = 64
        self.observed.counts["shrunk"] += 1
        self.is_ample = False

    def _count_shrunk(self) -> None:
        self.num_shrunk_left -= 1
        if self.num_shrunk_left == 0:
            self.shrunk_budget = None

    def _end(self, request: SimRequest, how: str) -> None:
        self.num_free += self._blocks(request.num_issued)
        del self.requests[request.id]
        self.observed.counts[how] += 1

    # Arithmetic.

    def longest_stay(self, request: SimRequest) -> int:
        """The most turns from a request's admission to its end, if it is not preempted."""
        return self._stay(request.num_prompt, request.num_answer)

    def _stay(self, num_prompt: int, num_answer: int) -> int:
        config = self.config
        num_chunks = 1
        budget = config.chunk_budget(config.max_running - 1 if config.policy is SchedulePolicy.MIXED else 0)
        if budget is not None:
            least = min(share_unit(config.grid), budget)
            if self.sizer is not None:
                least = min(least, max(self.sizer.rules.smallest, config.grid))
            num_chunks = -(-num_prompt // least)
        return num_chunks * self.longest_prompt_gap + num_answer * self.longest_decode_gap

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_tokens)

    def _new_blocks(self, planned: PlannedSpan) -> int:
        return self._blocks(planned.span.end) - self._blocks(planned.span.start)
