"""How many prompt tokens the next step of many requests has."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import SettingError
from penstock.plan.admission import TrackedRequest
from penstock.plan.policy import MOST_SHARES, ScheduleConfig, half_of
from penstock.plan.sizing import ChunkSizer, SizeDecision, SizeQuestion, shape_of
from penstock.plan.step import RequestId, StepPlan

# Once memory ran out, chunks stay halved for so many steps.
SHRUNK_STEPS = 64


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The most prompt tokens of a step, None for one prompt, whole; and what a prompt gets of them at least."""

    num_tokens: int | None
    min_share: int


class StepBudget:
    """Settles a step's budget: what the configuration allows; with `auto_chunk`, what the sizer says of the requests
    that would share it; and half as much for a while once memory ran out."""

    def __init__(self, config: ScheduleConfig, sizer: ChunkSizer | None) -> None:
        if config.auto_chunk and sizer is None:
            raise SettingError("auto_chunk", True, "a sizer, or a fixed chunk", where="without a sizer")
        self._config = config
        self._sizer = sizer
        self._shrunk: int | None = None
        self._num_shrunk_left = 0
        self._clock_s = 0.0  # seconds of all committed steps
        self._arrived_s: dict[RequestId, float] = {}  # on that clock
        self.decision: SizeDecision | None = None  # of the last step, if it reads

    def arrive(self, request_id: RequestId) -> None:
        self._arrived_s[request_id] = self._clock_s

    def forget(self, request_id: RequestId) -> None:
        del self._arrived_s[request_id]

    def settle(
        self,
        prompts: Sequence[TrackedRequest],
        decodes: Sequence[TrackedRequest],
        held: Sequence[TrackedRequest],
    ) -> TokenBudget:
        """The budget of a step for these prompts, those to be served first first, with these decodes in it and those
        that wait for it to end."""
        config = self._config
        budget, min_share = config.chunk_budget(len(decodes)), config.min_share
        if self._shrunk is not None:
            budget = self._shrunk if budget is None else min(budget, self._shrunk)
        if not prompts:
            self.decision = None
        elif config.auto_chunk:
            assert self._sizer is not None
            assert budget is not None
            self.decision = self._sizer.decide(self._question(prompts, decodes, held))
            budget = min(budget, self.decision.size)
            min_share = config.min_share_of(budget)
        else:
            size = prompts[0].furthest_end - prompts[0].next_start if budget is None else budget
            self.decision = SizeDecision(size, "fixed" if self._shrunk is None else "halved")
        return TokenBudget(budget, min_share)

    @property
    def is_shrunk(self) -> bool:
        return self._shrunk is not None

    def shrink(self, num_chunk_tokens: int) -> bool:
        """Memory ran out in a step of so many tokens. False if there is nothing to halve."""
        if num_chunk_tokens <= 1:
            return False
        self._shrunk = half_of(num_chunk_tokens, self._config.grid)
        self._num_shrunk_left = SHRUNK_STEPS
        return True

    def count(self, plan: StepPlan, seconds: float | None) -> None:
        """A step was committed, in so many seconds if they are known."""
        if self._num_shrunk_left:
            self._num_shrunk_left -= 1
            if self._num_shrunk_left == 0:
                self._shrunk = None
        if seconds is not None:
            self._clock_s += seconds
            if self._sizer is not None:
                self._sizer.record(shape_of(plan), seconds)

    def _question(
        self,
        prompts: Sequence[TrackedRequest],
        decodes: Sequence[TrackedRequest],
        held: Sequence[TrackedRequest],
    ) -> SizeQuestion:
        """Those that share the step have about equal parts of it, so that the mean of their pasts counts."""
        sharing = prompts[:MOST_SHARES]
        return SizeQuestion(
            past=sum(request.next_start for request in sharing) // len(sharing),
            num_left=sum(request.furthest_end - request.next_start for request in prompts),
            longest_past=max(request.next_start for request in prompts),
            num_prompts=len(prompts),
            num_decodes=len(decodes),
            decode_pasts=sum(request.num_tokens for request in decodes),
            num_held=len(held),
            held_pasts=sum(request.num_tokens for request in held),
            keeps_itl=self._config.keeps_itl,
            waited_s=self._clock_s - min(self._arrived_s[request.id] for request in sharing),
            most=self._shrunk,
        )
