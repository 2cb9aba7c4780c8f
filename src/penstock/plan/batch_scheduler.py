"""Which spans of which requests run next, where many requests share one model and one cache.

There is no prefill phase and no decode phase: of each request `num_tokens` tokens are known, `num_run` are in the
cache, and steps let the second catch up with the first. A chunk, a decode and a replay are spans of that gap.

Several steps may be in flight: a plan is *issued* by `schedule`, and ends with `commit` or `abort`, the oldest first.
A prompt is planned on from where its issued spans end; a request that samples in a step waits for that step's commit,
or is planned on as if it had its token already: whoever expects that takes the plan back where it comes otherwise.
"""

from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from penstock.errors import CacheFullError, PenstockError, QueueFullError
from penstock.plan.admission import (
    BlockLedger,
    CacheLimits,
    PlainLedger,
    TrackedRequest,
    choose_admissions,
    fair_line,
)
from penstock.plan.checks import check_int
from penstock.plan.policy import ScheduleConfig, Turns, share_unit
from penstock.plan.sizing import ChunkSizer, SizeDecision, StepBudget
from penstock.plan.step import PlannedSpan, Preemption, RequestId, Span, SpanKind, StepPlan

RequestPhase = Literal["waiting", "prompt", "decode"]

# That a decode may have room for beside its own.
_TOKENS_AFTER = 2
_by_arrival = attrgetter("arrival")
_by_turn = attrgetter("turn", "arrival")


class StepOrderError(PenstockError, RuntimeError):
    """A step asked for, committed or aborted out of turn, or a request changed while its step is in flight."""


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


@dataclass(frozen=True, slots=True)
class _Before:
    """Where a request stood before a step was issued."""

    request: TrackedRequest
    num_issued: int
    num_again: int
    turn: int

    def restore(self) -> None:
        self.request.num_again, self.request.turn = self.num_again, self.turn
        self.request.stand_at(self.request.num_run, self.num_issued, self.request.num_tokens)


@dataclass(frozen=True, slots=True)
class _Issued:
    """A step in flight, and what an abort goes back to."""

    plan: StepPlan
    turns: Turns
    before: tuple[_Before, ...]


class BatchScheduler:
    """Plans steps for many requests.

    A step is a transaction: a plan counts for nothing until `commit`, and `abort` leaves every request where it
    stood. A plan has its decodes first, then its chunks and replays, both in order of arrival.

    A request is admitted when the cache has room for what is known of it; owners take turns. It may run out of room
    later, as answers grow. Then the newest request is preempted, and goes on when there is room again. The oldest
    never is. The plan names those that are preempted and what they keep: whoever runs it takes their blocks before it
    takes new ones.
    No request that is in flight is preempted: where room is lacking, nothing is planned until all steps have ended.

    A sizer, where there is one, learns from every step that was committed with its seconds. With `auto_chunk` it says
    how many prompt tokens a step has. Its target between tokens bounds the steps that a decode is in, or waits for:
    where there is none, nobody would gain by a shorter step, unless `keeps_itl` says so.

    A ledger, where there is one, knows of blocks that requests share. It is only asked.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        limits: CacheLimits,
        sizer: ChunkSizer | None = None,
        ledger: BlockLedger | None = None,
        depth: int = 1,
        num_groups: int | None = None,
    ) -> None:
        """`depth` is how many steps are in flight though some of them sample: decodes are then dealt to groups, one
        fewer unless their number is given, so that others run while one waits for its tokens."""
        self.config = config
        self.limits = limits
        self._depth = check_int("depth", depth, 1)
        self._num_groups = max(depth - 1, 1) if num_groups is None else num_groups
        self._budget = StepBudget(config, sizer)
        self._requests: dict[RequestId, TrackedRequest] = {}  # all three in order of arrival
        self._running: list[TrackedRequest] = []
        self._waiting: list[TrackedRequest] = []
        self._ledger: BlockLedger = ledger or PlainLedger(limits.num_blocks, self._requests)
        self._num_arrived = 0
        self._num_issued = 0
        self._num_committed = 0
        self._num_repeated = 0  # passes of the oldest step in flight that are not committed yet
        self._flight: deque[_Issued] = deque()
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
        """Blocks that no request holds, nor is to write in an issued step."""
        return self._ledger.num_free({})

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """In order of arrival."""
        return tuple(self._requests)

    def reads(self, request_id: RequestId) -> bool:
        """Whether it runs, and is in its prompt, or reads again what it had generated."""
        request = self._requests[request_id]
        return request.is_running and not request.num_prompt <= request.num_run == request.num_known - 1

    def view(self, request_id: RequestId) -> RequestView:
        request = self._requests[request_id]
        phase: RequestPhase = "waiting"
        if request.is_running:
            phase = "prompt" if self.reads(request_id) else "decode"
        return RequestView(
            phase, request.num_prompt, request.num_known, request.num_run, request.num_preemptions
        )

    def add(
        self,
        request_id: RequestId,
        num_prompt: int,
        max_tokens: int,
        owner: str = "",
        priority: int = 0,
        num_leaving: int = 0,
    ) -> None:
        """Put a request at the end of its owner's line, behind those of its priority. Owners take turns; none may
        take all that is left of the queue. So many of those that run end with the step in flight: they take no place
        of it."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is here already: give each request an id of its own")
        check_int("num_prompt", num_prompt, 1)
        check_int("max_tokens", max_tokens, 1)
        request = TrackedRequest(
            request_id, self._num_arrived, num_prompt, max_tokens, self.limits, owner, priority
        )
        num_needed = self.limits.blocks_for(request.most_run)
        if num_needed > self.limits.num_blocks:
            raise CacheFullError(
                f"{num_prompt} prompt tokens and {max_tokens} of answer need {num_needed} blocks of "
                f"{self.limits.block_tokens} tokens, the K/V cache has {self.limits.num_blocks}: "
                "use fewer tokens or a larger cache"
            )
        # Those that wait for no more than the next step have a place among the running.
        most = self.config.max_running + self.config.max_waiting + num_leaving
        if len(self._requests) >= most:
            raise QueueFullError(
                f"{self.num_running} requests run and {self.num_waiting} wait, and {most} may be here: "
                "try again later"
            )
        if owner and (num_left := most - len(self._requests)) <= self.config.max_waiting:
            num_own = sum(other.owner == owner for other in self._waiting)
            if num_own >= num_left:
                raise QueueFullError(
                    f"{num_own} requests of this key wait, and what is left of the queue is for others: try again "
                    "later"
                )
        self._num_arrived += 1
        self._requests[request_id] = request
        self._budget.arrive(request_id)
        self._waiting.append(request)

    def remove(self, request_id: RequestId) -> None:
        """Forget a request, and take its blocks back at once."""
        request = self._requests[request_id]
        if self._is_in_flight(request_id):
            raise StepOrderError(
                f"request {request_id!r} is in an issued step: commit or abort that before removing it"
            )
        self._forget(request)

    def advance(self, request_id: RequestId, num_run: int) -> None:
        """More of a request's prompt is in the cache without having been read: its first `num_run` tokens. The ledger
        knows the blocks already."""
        request = self._requests[request_id]
        if self._is_in_flight(request_id):
            raise StepOrderError(
                f"request {request_id!r} is in an issued step: commit or abort that before it advances"
            )
        if not request.num_run <= num_run < request.num_prompt:
            raise ValueError(
                f"request {request_id!r} cannot stand at token {num_run}: accepted is {request.num_run} to "
                f"{request.num_prompt - 1}, before its prompt's last token"
            )
        request.stand_at(num_run, num_run, request.num_tokens)

    def admit(self) -> None:
        """Let requests run that wait and have room; `schedule` does that too, unless it is told who is held."""
        self._admit(self.config.max_running)

    def schedule(
        self,
        only: RequestId | None = None,
        held: Collection[RequestId] | None = None,
        expected: Collection[RequestId] = (),
    ) -> StepPlan | None:
        """The next step, or None where there is nothing to run, or nothing before the steps in flight have ended.
        Prompts of `held` requests wait for the step after; where it is given, requests were admitted before.
        `expected` are those that the newest step in flight gives a token, which is not their last: they are planned
        on, until an abort, and no other step is planned so before that one is committed.

        With `only`, it has a span of that one request, as far as free blocks reach: nothing is admitted or preempted,
        and None says that the request waits, or has no block to go on. Such a step counts as nobody's turn.
        """
        if only is not None:
            if self._flight:
                raise StepOrderError("a step of one request alone is asked for while others are in flight")
            alone = self._place_alone(self._requests[only])
            return self._issue(alone, {}, self._turns) if alone else None
        if held is None:
            self._admit(self.config.max_running)
        self._expect(expected)
        plan = self._plan(held or ())
        if plan is None:
            self._expect_nothing()
        return plan

    def _plan(self, held: Collection[RequestId]) -> StepPlan | None:
        preempted: dict[RequestId, Preemption] = {}
        while self._running:
            if not (chosen := self._choose(held)):
                return None  # all that could run are held, or in flight
            if (
                self._depth > 1
                and len(self._flight) >= self._num_groups
                and all(choice.request.kind is SpanKind.DECODE for choice in chosen)
            ):
                return None  # there are as many groups in flight as they are dealt to: others join this one
            choices = self._place(chosen, preempted)
            if choices is None:
                return None  # what lacks is held by requests in flight, perhaps
            if choices:
                return self._issue(choices, preempted)
            # All that were chosen gave way, each being the newest. Others run now, or the first in line.
            if not self._running:
                self._admit(1)
        return None

    def repeat(self, plan: StepPlan, num_before: int, seconds: float | None = None) -> None:
        """The oldest step in flight, of decodes alone, ran, in so many seconds, and goes on with the token after.
        So many passes were before this one. Its tokens are committed with those of its last pass."""
        self._check_oldest(plan)
        self._num_committed += 1
        self._num_repeated = num_before + 1
        self._budget.count(plan, seconds, num_before)

    def commit(
        self,
        plan: StepPlan,
        finished: Collection[RequestId] = (),
        seconds: float | None = None,
        num_before: int = 0,
    ) -> None:
        """The oldest step in flight ran, in so many seconds: its tokens are in the cache, and where it samples one
        more token is known; of one that was repeated, those of the passes before, too. Those that are finished by it
        are forgotten."""
        self._check_oldest(plan)
        if finished:
            self._check_finished(plan, finished)
        for planned in plan.spans:
            request = self._requests[planned.request_id]
            if (
                planned.samples
                and planned.span.end + num_before >= request.most_run
                and planned.request_id not in finished
            ):
                raise StepOrderError(
                    f"request {request.id!r} has its {request.max_tokens} tokens with this step: "
                    "name it as finished"
                )
        self._num_committed += 1
        self._budget.count(plan, seconds, num_before)
        self._settle_oldest(num_before)
        for request_id in set(finished):
            self._forget(self._requests[request_id])

    def split(self, plan: StepPlan, num_before: int) -> StepPlan:
        """The oldest step in flight, which was repeated so often, is committed but for its last pass: that is a step
        of its own, in flight."""
        self._check_oldest(plan)
        self._settle_oldest(num_before - 1)
        requests = [self._requests[planned.request_id] for planned in plan.spans]
        return self._issue([_Choice(request, request.num_tokens) for request in requests], {}, self._turns)

    def _settle_oldest(self, num_before: int) -> None:
        """What the oldest step in flight and as many passes before its last did is in the cache."""
        self._num_repeated = 0
        for planned in self._flight.popleft().plan.spans:
            request = self._requests[planned.request_id]
            if planned.samples:
                request.num_steps_at_token = self._num_committed
            num_new = planned.samples and not request.is_expected
            request.is_expected = False
            request.stand_at(
                planned.span.end + num_before,
                request.num_issued + num_before,
                request.num_tokens + num_before + num_new,
            )

    def abort(self, plan: StepPlan) -> None:
        """The step did not run, nor do those after it: every request stands where it stood. Preemptions stand, what
        they freed is gone."""
        self._check_issued(plan, "aborted")
        while True:
            issued = self._flight.pop()
            self._turns = issued.turns
            self._num_issued -= 1
            for before in issued.before:
                before.restore()
            if issued.plan is plan:
                break
        self._expect_nothing()

    def restart(self) -> None:
        """All that was in the cache is lost: every request reads its known tokens again. No step is in flight."""
        if self._flight:
            raise StepOrderError("requests cannot begin again while a step is in flight: abort it first")
        for request in self._requests.values():
            request.num_again = 0
            request.stand_at(0, 0, request.num_tokens)

    def shrink(self, plan: StepPlan) -> bool:
        """Abort the step since memory ran out in it: the next 64 committed steps read at most half as many tokens,
        on the grid where that is above it, and none twice. False if there is nothing to halve."""
        self.abort(plan)
        for request in self._requests.values():
            request.num_again = 0
        return self._budget.shrink(plan.num_chunk_tokens)

    def check_integrity(self) -> None:
        """AssertionError unless requests, lists and blocks agree."""
        requests = list(self._requests.values())
        assert requests == sorted(requests, key=_by_arrival)
        assert self._running == [request for request in requests if request.is_running]
        assert self._waiting == [request for request in requests if not request.is_running]
        assert len(self._running) <= self.config.max_running
        for request in requests:
            assert 0 <= request.num_run <= request.num_issued <= request.num_tokens <= request.most_run
            assert request.num_run < request.num_tokens
            assert request.num_held == self.limits.blocks_for(request.num_issued)
            assert request.num_overtakes <= self.config.max_overtakes
            assert self.limits.keeps_prefix or request.is_running or request.num_run == 0
        ends = {request.id: request.num_run for request in requests}
        for issued in self._flight:
            for planned in issued.plan.spans:
                assert self._requests[planned.request_id].is_running
                assert planned.span.start <= ends[planned.request_id] < planned.span.end
                ends[planned.request_id] = planned.span.end
        assert ends == {request.id: request.num_issued for request in requests}
        # A decode may have room for the tokens that follow it.
        nums_after = [
            self._num_repeated + _TOKENS_AFTER if request.num_issued >= request.num_prompt else 0
            for request in requests
        ]
        num_held = sum(
            self.limits.blocks_for(request.num_issued + num_after)
            for request, num_after in zip(requests, nums_after, strict=True)
        )
        num_free = self.num_free_blocks
        assert max(self.limits.num_blocks - num_held, 0) <= num_free <= self.limits.num_blocks

    def _expect(self, request_ids: Collection[RequestId]) -> None:
        for request in map(self._requests.__getitem__, request_ids):
            if request.is_expected or request.can_run or request.num_tokens >= request.most_run:
                raise StepOrderError(
                    f"request {request.id!r} cannot be expected to go on: it samples no token now"
                )
            request.is_expected = True
            request.stand_at(request.num_run, request.num_issued, request.num_tokens + 1)

    def _expect_nothing(self) -> None:
        for request in self._running:
            if request.is_expected:
                request.is_expected = False
                request.stand_at(request.num_run, request.num_issued, request.num_tokens - 1)

    def _admit(self, max_running: int) -> None:
        """Let requests run that wait and have room."""
        if not self._waiting:
            return
        num_room = self.num_free_blocks - sum(request.num_wanted for request in self._running)
        if not self._running:
            # It can run alone: what it lacks is held by others that wait, later than it, and they give way.
            first = self._waiting[0]
            if not any(request.num_held for request in self._waiting):
                first = min(self._waiting, key=lambda request: request.priority)
            num_room -= first.num_wanted
            self._start(first)
        num_places = max_running - len(self._running)
        if self._waiting and num_places > 0:
            line = fair_line(self._waiting, self._running, self.config.max_running_per_key)
            for request in choose_admissions(
                line, num_places, num_room, self.config.max_overtakes, self._ledger.num_shared
            ):
                self._start(request)

    def _start(self, request: TrackedRequest) -> None:
        self._waiting.remove(request)
        insort(self._running, request, key=_by_arrival)
        request.is_running = True
        # Before those that the step just issued serves, after those that wait for longer.
        request.turn = 2 * self._num_issued

    def _choose(self, held: Collection[RequestId]) -> list[_Choice]:
        """The spans that the policy and the budgets want in the next step, whether there is room for them or not;
        none of prompts that are held."""
        able = [request for request in self._running if request.can_run]
        decodes = [request for request in able if request.kind is SpanKind.DECODE]
        prompts = [
            request for request in able if request.kind is not SpanKind.DECODE and request.id not in held
        ]
        held_decodes: list[TrackedRequest] = []
        if decodes and prompts:
            prompts = prompts if self._turns.takes_chunks() else []
            if not self._turns.takes_decodes():
                decodes, held_decodes = [], decodes
        decodes = self._group_of(decodes)
        choices = [_Choice(request, request.num_tokens) for request in decodes]
        return choices + self._choose_chunks(prompts, decodes, held_decodes)

    def _group_of(self, able: list[TrackedRequest]) -> list[TrackedRequest]:
        """The decodes of one step, of those that could run: a group's part of all, those that were served longest
        ago; and each that would wait for more than `depth` steps if this one left it out."""
        if self._num_groups == 1 or not able:
            return able
        num_decoding = sum(request.kind is SpanKind.DECODE for request in self._running)
        num_group = -(-num_decoding // self._num_groups)
        # The token of one that is due, or earlier.
        last = self._num_committed + len(self._flight) + 1 - self._depth
        by_turn = sorted(able, key=_by_turn)
        group = by_turn[:num_group] + [
            each for each in by_turn[num_group:] if each.num_steps_at_token <= last
        ]
        return sorted(group, key=_by_arrival)

    def _choose_chunks(
        self,
        prompts: Sequence[TrackedRequest],
        decodes: Sequence[TrackedRequest] = (),
        held_decodes: Sequence[TrackedRequest] = (),
    ) -> list[_Choice]:
        """The chunks and replays that share the step's budget; `held_decodes` wait for the step to end."""
        if not prompts:
            self._budget.decision = None
            return []
        by_turn = sorted(prompts, key=_by_turn)
        if self._budget.is_shrunk and self.config.chunk_size == 0:
            by_turn = by_turn[:1]
        budget = self._budget.settle(by_turn, decodes, held_decodes)
        ends = share_chunks(
            [Span(request.next_start, request.furthest_end) for request in by_turn],
            budget.num_tokens,
            min_share=budget.min_share,
            grid=self.config.grid,
        )
        choices = []
        for request, end in zip(by_turn, ends, strict=True):
            if request.num_again and end <= request.num_issued:  # too short to run anything twice
                request.num_again = 0
                return self._choose_chunks(prompts, decodes, held_decodes)
            if end > request.num_issued:
                choices.append(_Choice(request, end))
        return choices

    def _place(
        self, choices: Sequence[_Choice], preempted: dict[RequestId, Preemption]
    ) -> list[_Choice] | None:
        """Those that have room for the blocks that their spans write, in order of arrival; others are preempted for
        them, and drop out. None where room is lacking while steps are in flight."""
        placed: list[_Choice] = []
        num_taken = 0
        num_free = self._num_free_after(preempted)
        for choice in sorted(choices, key=lambda choice: choice.request.arrival):
            request = choice.request
            if not request.is_running:  # it gave way to one before it
                continue
            num_new = self._num_new_blocks(request, choice.end)
            while request.is_running and num_free - num_taken < num_new:
                if self._flight:
                    return None
                self._preempt_newest(request, num_new - (num_free - num_taken), preempted)
                num_free = self._num_free_after(preempted)
            if request.is_running:
                num_taken += num_new
                placed.append(choice)
        return placed

    def _num_free_after(self, preempted: Mapping[RequestId, Preemption]) -> int:
        block_tokens = self.limits.block_tokens
        return self._ledger.num_writable(
            {name: each.num_kept // block_tokens for name, each in preempted.items()}
        )

    def _place_alone(self, request: TrackedRequest) -> list[_Choice]:
        if not request.is_running:
            return []
        if request.kind is SpanKind.DECODE:
            choice = _Choice(request, request.num_tokens)
        else:
            (choice,) = self._choose_chunks([request])
        reach = (request.num_held + self._ledger.num_writable({})) * self.limits.block_tokens
        if reach < choice.end:
            choice = _Choice(request, reach // self.config.grid * self.config.grid)
        return [choice] if choice.end > request.num_issued else []

    def _preempt_newest(
        self, needy: TrackedRequest, num_lacking: int, preempted: dict[RequestId, Preemption]
    ) -> None:
        """Send the newest request back to the line, without the blocks that are lacking, from its end, or all it has.

        It is no older than `needy`, which runs, so it is never one that has its place in the step. If it is `needy`
        itself, nobody needs what it has: it keeps its whole blocks, where a prefix can be kept.
        """
        newest = next(each for each in reversed(self._requests.values()) if each.is_running or each.num_held)
        if newest.num_held:
            num_blocks = 0
            if self.limits.keeps_prefix:
                num_blocks = newest.num_held - num_lacking if newest is not needy else newest.num_held
                num_blocks = max(min(num_blocks, newest.num_run // self.limits.block_tokens), 0)
            num_kept = num_blocks * self.limits.block_tokens
            had_run = newest.id in preempted and preempted[newest.id].was_running
            newest.num_preemptions += newest.is_running and not had_run
            preempted[newest.id] = Preemption(newest.id, num_kept, newest.is_running or had_run)
            newest.num_again = 0
            newest.stand_at(num_kept, num_kept, newest.num_tokens)
        if newest.is_running:
            newest.is_running = False
            self._running.remove(newest)
            insort(self._waiting, newest, key=_by_arrival)

    def _issue(
        self,
        choices: Sequence[_Choice],
        preempted: Mapping[RequestId, Preemption],
        turns_after: Turns | None = None,
    ) -> StepPlan:
        """Put the step in flight. It counts as a turn, unless the turns after it are given."""
        num_could_decode = sum(
            request.kind is SpanKind.DECODE and request.can_run for request in self._running
        )
        prompts_wait = any(request.kind is not SpanKind.DECODE for request in self._running)
        self._num_issued += 1
        decodes: list[PlannedSpan] = []
        chunks: list[PlannedSpan] = []
        before: list[_Before] = []
        for choice in choices:
            request, end = choice.request, choice.end
            before.append(_Before(request, request.num_issued, request.num_again, request.turn))
            kind, span = request.kind, Span(request.next_start, end)
            is_decode = kind is SpanKind.DECODE
            request.num_again = self._overlap_after(request, span)
            resumes_at = end - request.num_again if request.num_again else None
            planned = PlannedSpan(request.id, span, kind, end == request.num_tokens, resumes_at)
            (decodes if is_decode else chunks).append(planned)
            request.stand_at(request.num_run, end, request.num_tokens)
            if not is_decode or self._depth > 1:
                request.turn = 2 * self._num_issued + 1
        plan = StepPlan(
            spans=(*decodes, *chunks),
            preemptions=tuple(preempted.values()),
            num_held_decodes=num_could_decode - len(decodes),
        )
        self._flight.append(_Issued(plan, self._turns, tuple(before)))
        self._turns = turns_after or self._turns.after(
            has_decodes=bool(decodes),
            has_chunks=bool(chunks),
            decodes_wait=plan.num_held_decodes > 0,
            prompts_wait=prompts_wait,
        )
        return plan

    def _overlap_after(self, request: TrackedRequest, span: Span) -> int:
        """How many tokens of a span its request's next one runs again."""
        overlap = self.config.overlap
        if not overlap or self._budget.is_shrunk or len(span) <= overlap or span.end >= request.num_prompt:
            return 0
        return overlap

    def _forget(self, request: TrackedRequest) -> None:
        (self._running if request.is_running else self._waiting).remove(request)
        del self._requests[request.id]
        self._budget.forget(request.id)

    def _num_new_blocks(self, request: TrackedRequest, end: int) -> int:
        return self.limits.blocks_for(end) - request.num_held

    def _is_in_flight(self, request_id: RequestId) -> bool:
        return any(span.request_id == request_id for issued in self._flight for span in issued.plan.spans)

    def _check_finished(self, plan: StepPlan, finished: Collection[RequestId]) -> None:
        """Only requests of the step can finish, and none that a later step has spans of."""
        own = {planned.request_id for planned in plan.spans}
        later = {span.request_id for issued in list(self._flight)[1:] for span in issued.plan.spans}
        for request_id in finished:
            if request_id not in own:
                raise StepOrderError(f"request {request_id!r} cannot finish in a step that has no span of it")
            if request_id in later:
                raise StepOrderError(f"request {request_id!r} cannot finish: a later step has spans of it")

    def _check_issued(self, plan: StepPlan, verb: str) -> None:
        if not any(issued.plan is plan for issued in self._flight):
            raise StepOrderError(
                f"a step cannot be {verb} that is not in flight: {len(self._flight)} others are"
            )

    def _check_oldest(self, plan: StepPlan) -> None:
        if self._flight and self._flight[0].plan is plan:
            return
        self._check_issued(plan, "committed")
        raise StepOrderError("a step cannot be committed before those that were issued before it")


def share_chunks(wants: Sequence[Span], budget: int | None, *, min_share: int, grid: int) -> list[int]:
    """Where each of `wants`, spans that requests could run now, ends in this step; it is empty where it ends at its
    start. The first comes first: it is the one that was served longest ago. `budget` is None for one want, whole.

    As many as have room for `min_share` tokens share the budget equally, and what one does not need goes to the
    others; what is left then goes to the rest in their order. Spans end on the grid, or where the want ends. Those
    that share are multiples of `share_unit(grid)`, or end where the want ends. A budget below it leaves the grid.
    """
    ends = [want.start for want in wants]
    if not wants:
        return ends
    if budget is None:
        return [wants[0].end, *ends[1:]]
    unit = share_unit(grid)
    num_sharing = min(max(budget // min_share, 1), len(wants))
    lengths = _fill([len(want) for want in wants[:num_sharing]], budget, unit)
    left = budget
    for index, length in enumerate(lengths):
        ends[index] = _reach(wants[index], wants[index].start, length, grid)
        left -= ends[index] - wants[index].start
    for index, want in enumerate(wants):
        if left == 0:
            break
        whole = left if want.end - ends[index] <= left else left // unit * unit
        if whole and ends[index] < want.end:
            end = _reach(want, ends[index], whole, grid)
            left -= end - ends[index]
            ends[index] = end
    return ends


def _fill(needs: Sequence[int], budget: int, unit: int) -> list[int]:
    """The budget in equal parts of whole units, but for those that need less. A single one takes all it can."""
    lengths = [0] * len(needs)
    by_need = sorted(range(len(needs)), key=needs.__getitem__)
    while by_need and needs[by_need[0]] <= budget // len(by_need):
        index = by_need.pop(0)
        lengths[index] = needs[index]
        budget -= needs[index]
    if len(by_need) == 1 == len(needs):
        lengths[0] = budget
    elif by_need:
        units, num_extra = divmod(budget // unit, len(by_need))
        for place, index in enumerate(sorted(by_need)):
            lengths[index] = unit * (units + (place < num_extra))
    return lengths


def _reach(want: Span, start: int, num_tokens: int, grid: int) -> int:
    """How far so many tokens reach from `start`: to the want's end, or back to the grid if that is a way forward."""
    end = start + num_tokens
    if end >= want.end:
        return want.end
    on_grid = end // grid * grid
    return on_grid if on_grid > start else end
