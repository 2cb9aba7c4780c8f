"""Which spans of which requests run next, where many requests share one model and one cache."""

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from penstock.errors import CacheFullError, PenstockError, QueueFullError
from penstock.plan.admission import CacheLimits, TrackedRequest, choose_admissions
from penstock.plan.checks import check_int
from penstock.plan.ledger import BlockLedger, PlainLedger
from penstock.plan.policy import ScheduleConfig
from penstock.plan.request import Span
from penstock.plan.shares import Want, share_chunks
from penstock.plan.sizing import ChunkSizer, SizeDecision
from penstock.plan.step import PlannedSpan, Preemption, RequestId, SpanKind, StepPlan
from penstock.plan.step_budget import StepBudget
from penstock.plan.turns import Turns

RequestPhase = Literal["waiting", "prompt", "decode"]

_by_arrival = attrgetter("arrival")
_by_turn = attrgetter("turn", "arrival")


class StepOrderError(PenstockError, RuntimeError):
    """A step asked for, committed or aborted out of turn, or a request changed while its step runs."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """Where a request stands. Its first `num_tokens` tokens are known, the first `num_run` of them are in the cache.
    It is in its prompt, too, while it reads again what it had generated before it was preempted."""

    phase: RequestPhase
    num_prompt: int
    num_tokens: int
    num_run: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class _Choice:
    """A request that is to run up to `end` in this step."""

    request: TrackedRequest
    end: int


class BatchScheduler:
    """Plans steps for many requests, one step at a time.

    A step is a transaction: a plan counts for nothing until `commit`, and `abort` leaves every request where it
    stood. Until one of them is called, asking for another plan is an error. A plan has its decodes first, then its
    chunks and replays, both in order of arrival.

    A request is admitted when the cache has room for what is known of it; it may run out of room later, as answers
    grow. Then the newest request gives way, and goes on when there is room again. The oldest never does.

    A sizer, where there is one, learns from every step that was committed with its seconds. With `auto_chunk` it says
    how many prompt tokens a step has. Its target between tokens bounds the steps that a decode is in, or waits for:
    where there is none, nobody would gain by a shorter step.

    A ledger, where there is one, knows of blocks that requests share; preemptions are told to it as they are decided.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        limits: CacheLimits,
        sizer: ChunkSizer | None = None,
        ledger: BlockLedger | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self._budget = StepBudget(config, sizer)
        self._requests: dict[RequestId, TrackedRequest] = {}  # all three in order of arrival
        self._running: list[TrackedRequest] = []
        self._waiting: list[TrackedRequest] = []
        self._ledger: BlockLedger = ledger or PlainLedger(limits.num_blocks)
        self._num_arrived = 0
        self._num_commits = 0
        self._issued: StepPlan | None = None
        self._is_out_of_turn = False  # the issued step is one request's alone
        self._turns = Turns(config)

    @property
    def decision(self) -> SizeDecision | None:
        """Why the last step that was planned has as many prompt tokens; None if it has none."""
        return self._budget.decision

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, nor is to write in the issued step."""
        return self._ledger.num_free

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """In order of arrival."""
        return tuple(self._requests)

    def view(self, request_id: RequestId) -> RequestView:
        request = self._requests[request_id]
        phase: RequestPhase = "waiting"
        if request.is_running:
            phase = "decode" if request.kind is SpanKind.DECODE else "prompt"
        return RequestView(
            phase, request.num_prompt, request.num_tokens, request.num_run, request.num_preemptions
        )

    def add(self, request_id: RequestId, num_prompt: int, max_tokens: int) -> None:
        """Put a request at the end of the line."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is here already: give each request an id of its own")
        check_int("num_prompt", num_prompt, 1)
        check_int("max_tokens", max_tokens, 1)
        request = TrackedRequest(request_id, self._num_arrived, num_prompt, max_tokens, self.limits)
        num_needed = self.limits.blocks_for(request.most_run)
        if num_needed > self.limits.num_blocks:
            raise CacheFullError(
                f"{num_prompt} prompt tokens and {max_tokens} of answer need {num_needed} blocks of "
                f"{self.limits.block_tokens} tokens, the K/V cache has {self.limits.num_blocks}: "
                "use fewer tokens or a larger cache"
            )
        # Those that wait for no more than the next step have a place among the running.
        most = self.config.max_running + self.config.max_waiting
        if len(self._requests) >= most:
            raise QueueFullError(
                f"{self.num_running} requests run and {self.num_waiting} wait, and {most} may be here: "
                "try again later"
            )
        self._num_arrived += 1
        self._requests[request_id] = request
        self._budget.arrive(request_id)
        self._waiting.append(request)

    def remove(self, request_id: RequestId) -> None:
        """Forget a request, and take its blocks back at once."""
        request = self._requests[request_id]
        if self._issued is not None and any(span.request_id == request_id for span in self._issued.spans):
            raise StepOrderError(
                f"request {request_id!r} is in the issued step: commit or abort that before removing it"
            )
        self._forget(request)

    def advance(self, request_id: RequestId, num_run: int) -> None:
        """More of a request's prompt is in the cache, between steps, without having been read: its first `num_run`
        tokens. The ledger knows the blocks already."""
        request = self._requests[request_id]
        if self._issued is not None:
            raise StepOrderError("a step is issued: commit or abort it before a request advances")
        if not request.num_run <= num_run < request.num_prompt:
            raise ValueError(
                f"request {request_id!r} cannot stand at token {num_run}: accepted is {request.num_run} to "
                f"{request.num_prompt - 1}, before its prompt's last token"
            )
        request.stand_at(num_run, request.num_tokens)

    def admit(self) -> None:
        """Let requests run that wait and have room; `schedule` does that too, unless it is told who is held."""
        self._admit(self.config.max_running)

    def schedule(
        self, only: RequestId | None = None, held: Collection[RequestId] | None = None
    ) -> StepPlan | None:
        """The next step, or None where there is nothing to run. Prompts of `held` requests wait for the step after;
        where it is given, requests were admitted before.

        With `only`, it has a span of that one request, as far as free blocks reach: nothing is admitted or preempted,
        and None says that the request waits, or has no block to go on. Such a step counts as nobody's turn.
        """
        if self._issued is not None:
            raise StepOrderError("a step is issued: commit or abort it before asking for the next one")
        if only is not None:
            choices = self._place_alone(self._requests[only])
            return self._issue(choices, {}, is_out_of_turn=True) if choices else None
        given: dict[RequestId, Preemption] = {}
        if held is None:
            self._admit(self.config.max_running)
        while self._running:
            if not (chosen := self._choose(held or ())):
                return None  # all that could run are held
            if choices := self._place(chosen, given):
                return self._issue(choices, given)
            # All that were chosen gave way, each being the newest. Others run now, or the first in line.
            if not self._running:
                self._admit(1)
        return None

    def commit(
        self, plan: StepPlan, finished: Collection[RequestId] = (), seconds: float | None = None
    ) -> None:
        """The step ran, in so many seconds: its tokens are in the cache, and where it samples one more token is
        known. Those that are finished by it are forgotten."""
        self._check_issued(plan, "committed")
        for request_id in set(finished).difference(planned.request_id for planned in plan.spans):
            raise StepOrderError(f"request {request_id!r} cannot finish in a step that has no span of it")
        for planned in plan.spans:
            request = self._requests[planned.request_id]
            if (
                planned.samples
                and planned.request_id not in finished
                and planned.span.end >= request.most_run
            ):
                raise StepOrderError(
                    f"request {request.id!r} has its {request.max_tokens} tokens with this step: "
                    "name it as finished"
                )
        self._issued = None
        self._num_commits += 1
        self._budget.count(plan, seconds)
        if not self._is_out_of_turn:
            self._turns.count(
                has_decodes=plan.num_chunk_tokens < plan.num_tokens,
                has_chunks=plan.num_chunk_tokens > 0,
                decodes_wait=plan.num_held_decodes > 0,
                prompts_wait=any(request.kind is not SpanKind.DECODE for request in self._running),
            )
        for planned in plan.spans:
            request = self._requests[planned.request_id]
            request.stand_at(planned.span.end, request.num_tokens + planned.samples)
            if planned.kind is not SpanKind.DECODE:
                request.turn = 2 * self._num_commits + 1
        for request_id in set(finished):
            self._forget(self._requests[request_id])

    def abort(self, plan: StepPlan) -> None:
        """The step did not run: every request stands where it stood. Preemptions stand, what they freed is gone."""
        self._check_issued(plan, "aborted")
        self._issued = None
        for planned in plan.spans:
            self._ledger.hold(planned.request_id, self._requests[planned.request_id].num_held)

    def shrink(self, plan: StepPlan) -> bool:
        """Abort the step since memory ran out in it: the next 64 committed steps read at most half as many tokens,
        on the grid where that is above it. False if there is nothing to halve."""
        self.abort(plan)
        return self._budget.shrink(plan.num_chunk_tokens)

    def check_integrity(self) -> None:
        """AssertionError unless requests, lists and blocks agree."""
        requests = list(self._requests.values())
        assert requests == sorted(requests, key=_by_arrival)
        assert self._running == [request for request in requests if request.is_running]
        assert self._waiting == [request for request in requests if not request.is_running]
        assert len(self._running) <= self.config.max_running
        for request in requests:
            assert 0 <= request.num_run < request.num_tokens <= request.most_run
            assert request.num_held == self.limits.blocks_for(request.num_run)
            assert request.num_overtakes <= self.config.max_overtakes
            assert self.limits.keeps_prefix or request.is_running or request.num_run == 0
        held = {request.id: request.num_held for request in requests}
        for planned in self._issued.spans if self._issued else ():
            request = self._requests[planned.request_id]
            assert request.is_running
            assert request.num_run == planned.span.start
            held[request.id] = self.limits.blocks_for(planned.span.end)
        assert held == {request.id: self._ledger.num_held(request.id) for request in requests}
        assert self.limits.num_blocks - sum(held.values()) <= self._ledger.num_free <= self.limits.num_blocks
        assert self._ledger.num_free >= 0

    def _admit(self, max_running: int) -> None:
        """Let requests run that wait and have room."""
        num_room = self._ledger.num_free - sum(request.num_wanted for request in self._running)
        if self._waiting and not self._running:
            # It can run alone: what it lacks is held by others that wait, later than it, and they give way.
            first = self._waiting[0]
            num_room -= first.num_wanted
            self._start(first)
        num_places = max_running - len(self._running)
        if self._waiting and num_places > 0:
            for request in choose_admissions(
                self._waiting, num_places, num_room, self.config.max_overtakes, self._ledger.num_shared
            ):
                self._start(request)

    def _start(self, request: TrackedRequest) -> None:
        self._waiting.remove(request)
        insort(self._running, request, key=_by_arrival)
        request.is_running = True
        # Before those that the step just committed served, after those that wait for longer.
        request.turn = 2 * self._num_commits

    def _choose(self, held_back: Collection[RequestId] = ()) -> list[_Choice]:
        """The spans that the policy and the budgets want in the next step, whether there is room for them or not."""
        decodes = [request for request in self._running if request.kind is SpanKind.DECODE]
        prompts = [
            request
            for request in self._running
            if request.kind is not SpanKind.DECODE and request.id not in held_back
        ]
        held: list[TrackedRequest] = []
        if decodes and prompts:
            prompts = prompts if self._turns.takes_chunks() else []
            if not self._turns.takes_decodes():
                decodes, held = [], decodes
        choices = [_Choice(request, request.num_tokens) for request in decodes]
        return choices + self._choose_chunks(prompts, decodes, held)

    def _choose_chunks(
        self,
        prompts: Sequence[TrackedRequest],
        decodes: Sequence[TrackedRequest] = (),
        held: Sequence[TrackedRequest] = (),
    ) -> list[_Choice]:
        by_turn = sorted(prompts, key=_by_turn)
        if self._budget.is_shrunk and self.config.chunk_size == 0:
            by_turn = by_turn[:1]
        budget = self._budget.settle(by_turn, decodes, held)
        ends = share_chunks(
            [Want(request.num_run, request.furthest_end) for request in by_turn],
            budget.num_tokens,
            min_share=budget.min_share,
            grid=self.config.grid,
        )
        return [
            _Choice(request, end) for request, end in zip(by_turn, ends, strict=True) if end > request.num_run
        ]

    def _place(self, choices: Sequence[_Choice], given: dict[RequestId, Preemption]) -> list[_Choice]:
        """Take the blocks that the spans write, in order of arrival; those that have to give way drop out."""
        placed = []
        for choice in sorted(choices, key=lambda choice: choice.request.arrival):
            request = choice.request
            if not request.is_running:  # it gave way to one before it
                continue
            num_new = self._num_new_blocks(request, choice.end)
            while request.is_running and self._ledger.num_free < num_new:
                self._preempt_newest(request, num_new - self._ledger.num_free, given)
            if request.is_running:
                self._ledger.hold(request.id, request.num_held + num_new)
                placed.append(choice)
        return placed

    def _place_alone(self, request: TrackedRequest) -> list[_Choice]:
        if not request.is_running:
            return []
        if request.kind is SpanKind.DECODE:
            choice = _Choice(request, request.num_tokens)
        else:
            (choice,) = self._choose_chunks([request])
        reach = (request.num_held + self._ledger.num_free) * self.limits.block_tokens
        if reach < choice.end:
            choice = _Choice(request, reach // self.config.grid * self.config.grid)
        if choice.end <= request.num_run:
            return []
        self._ledger.hold(request.id, self.limits.blocks_for(choice.end))
        return [choice]

    def _preempt_newest(
        self, needy: TrackedRequest, num_lacking: int, given: dict[RequestId, Preemption]
    ) -> None:
        """Send the newest request back to the line, and take the blocks that are lacking from its end, or all it has.

        It is no older than `needy`, which runs, so it is never one that has its place in the step. If it is `needy`
        itself, nobody needs what it has: it keeps its whole blocks, where a prefix can be kept.
        """
        newest = next(held for held in reversed(self._requests.values()) if held.is_running or held.num_held)
        if newest.num_held:
            num_blocks = 0
            if self.limits.keeps_prefix:
                num_blocks = newest.num_held - num_lacking if newest is not needy else newest.num_held
                num_blocks = max(min(num_blocks, newest.num_run // self.limits.block_tokens), 0)
            num_kept = num_blocks * self.limits.block_tokens
            had_run = newest.id in given and given[newest.id].was_running
            newest.num_preemptions += newest.is_running and not had_run
            given[newest.id] = Preemption(newest.id, num_kept, newest.is_running or had_run)
            self._ledger.hold(newest.id, num_blocks)
            newest.stand_at(num_kept, newest.num_tokens)
        if newest.is_running:
            newest.is_running = False
            self._running.remove(newest)
            insort(self._waiting, newest, key=_by_arrival)

    def _issue(
        self, choices: Sequence[_Choice], given: dict[RequestId, Preemption], *, is_out_of_turn: bool = False
    ) -> StepPlan:
        decodes: list[PlannedSpan] = []
        chunks: list[PlannedSpan] = []
        for choice in choices:
            request = choice.request
            span = Span(request.num_run, choice.end)
            planned = PlannedSpan(request.id, span, request.kind, samples=choice.end == request.num_tokens)
            (decodes if request.kind is SpanKind.DECODE else chunks).append(planned)
        num_could_decode = sum(request.kind is SpanKind.DECODE for request in self._running)
        self._issued = StepPlan(
            spans=(*decodes, *chunks),
            preemptions=tuple(given.values()),
            num_held_decodes=num_could_decode - len(decodes),
        )
        self._is_out_of_turn = is_out_of_turn
        return self._issued

    def _forget(self, request: TrackedRequest) -> None:
        (self._running if request.is_running else self._waiting).remove(request)
        del self._requests[request.id]
        self._budget.forget(request.id)
        self._ledger.forget(request.id)

    def _num_new_blocks(self, request: TrackedRequest, end: int) -> int:
        return self.limits.blocks_for(end) - request.num_held

    def _check_issued(self, plan: StepPlan, verb: str) -> None:
        if plan is not self._issued:
            issued = "no step is issued" if self._issued is None else "another step is issued"
            raise StepOrderError(f"a step cannot be {verb} that is not the issued one: {issued}")
