"""How many tokens of prompts the next step reads: of one prompt, and of many that share a step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Literal

from penstock.errors import SettingError
from penstock.plan.admission import TrackedRequest
from penstock.plan.checks import check_int
from penstock.plan.grids import DEFAULT_CHUNK_SIZE, QUERY_GRID
from penstock.plan.policy import MOST_SHARES, ScheduleConfig, half_of
from penstock.plan.step import RequestId, SpanKind, StepPlan, StepShape, pasts_of_chunk
from penstock.plan.step_time import StepTimeCoefficients, StepTimeModel

# What set a size: what the user fixed, the memory budget, a latency target, the profile of this machine, or nothing
# that is known (default); the prompt's end, the wish to leave no sliver there (balanced), memory that ran out
# (halved); or a bound of all automatic sizes (smallest, largest).
SizeRule = Literal[
    "fixed", "memory", "latency", "tuned", "default", "end", "balanced", "halved", "smallest", "largest"
]

SMALLEST_CHUNK = 8
LARGEST_CHUNK = 2048
# Where a target is to be kept and nothing is known of step times, the first chunk has so many tokens, and no chunk
# has more than twice as many as the longest before it.
CAUTIOUS_CHUNK = 64
# Where there is no target, and others decode, a step takes no longer.
DECODE_GAP_S = 0.5
# A last chunk below this part of the one before it is a sliver: the last two are then about equal.
SLIVER = 0.25
# Beyond any prompt.
MOST_TOKENS = 1 << 40

StepBytes = Callable[[StepShape], int]


@dataclass(frozen=True)
class SizeRules:
    """`fixed` is a number of tokens, 0 the whole prompt, None leaves the size to the other rules.

    `max_activation_bytes` is a promise: no step is planned that needs more. `free_bytes` is what the machine has
    free: a step is to need no more than half of it.

    `target_itl_s` bounds a step that tokens of others wait for: it is the time from one of their tokens to the next.
    `target_ttft_s` bounds the time from a prompt's arrival to its first token. Larger chunks read a prompt in less
    time, since each step costs something of its own, so it puts a floor under the chunk; where the two contradict
    each other, the bound of a step holds.

    `decode_gap_s`, where there is no target, bounds a step that a decode is in, or waits for; it makes none longer.

    Sizes are multiples of `grid`, but for a prompt's end. A latency target makes them no smaller than `smallest`.
    """

    fixed: int | None = None
    max_activation_bytes: int | None = None
    free_bytes: int | None = None
    target_itl_s: float | None = None
    target_ttft_s: float | None = None
    decode_gap_s: float | None = None
    grid: int = 1
    smallest: int = SMALLEST_CHUNK
    largest: int = LARGEST_CHUNK
    default: int = DEFAULT_CHUNK_SIZE
    tuned: int | None = None  # the chunk that a profile found to be the fastest

    def __post_init__(self) -> None:
        for name in ("grid", "smallest", "largest", "default"):
            check_int(name, getattr(self, name), 1)
        for name, least in (("fixed", 0), ("max_activation_bytes", 1), ("free_bytes", 0), ("tuned", 1)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least)
        for name in ("target_itl_s", "target_ttft_s", "decode_gap_s"):
            target = getattr(self, name)
            if target is None:
                continue
            if not isfinite(target) or target <= 0:
                raise SettingError(name, target, "a number of seconds above 0")
            if self.fixed is not None:
                raise SettingError(
                    name,
                    target,
                    contradicts={"fixed": self.fixed},
                    because="a fixed size follows no target",
                )

    @property
    def is_auto(self) -> bool:
        return self.fixed is None

    @property
    def most(self) -> int:
        """The most tokens of an automatic chunk, on the grid."""
        return self.on_grid(max(self.largest, self.tuned or 0, self.default))

    @property
    def budget_bytes(self) -> int | None:
        """The most that a step's activations may need."""
        if self.max_activation_bytes is not None:
            return self.max_activation_bytes
        return None if self.free_bytes is None else self.free_bytes // 2

    def on_grid(self, size: int) -> int:
        """The multiple of the grid at or below `size`, at least one."""
        return max(size // self.grid, 1) * self.grid


@dataclass(frozen=True, slots=True)
class SizeQuestion:
    """A step that is to read a part of a prompt, or of several that share it: then `past` is the mean of theirs and
    `num_left` is what they have left together."""

    past: int
    num_left: int
    longest_past: int = 0
    num_prompts: int = 1
    num_decodes: int = 0  # that run in the step
    decode_pasts: int = 0
    num_held: int = 0  # that wait for it, and run in the next
    held_pasts: int = 0
    keeps_itl: bool = False  # whether target_itl bounds the step though no decode is known to wait for it
    waited_s: float = 0.0  # since the prompt came
    most: int | None = None  # since memory ran out at more


@dataclass(frozen=True, slots=True)
class SizeDecision:
    """How many tokens a step reads and the rule that says so; `because` tells a person more, where there is more to
    tell. What is predicted is of the whole step, decodes included; None where nothing is known."""

    size: int
    rule: SizeRule
    predicted_s: float | None = None
    predicted_bytes: int | None = None
    because: str = ""


class ChunkSizer:
    """Answers one question at a time, from what is known of step times by then.

    An automatic size is the smaller of two: what the memory budget allows and what the latency targets allow. With
    neither, it is the size that a profile found to be the fastest, or the default. Each is asked anew for every
    chunk: as the past grows, attention takes longer and needs more, and chunks become smaller.
    """

    def __init__(
        self, rules: SizeRules, times: StepTimeModel | None = None, step_bytes: StepBytes | None = None
    ) -> None:
        """`step_bytes` tells what a step's activations need; without it memory is no rule."""
        self.rules = rules
        self.times = StepTimeModel() if times is None else times
        self._step_bytes = step_bytes
        self._last_fit = 0  # in units of the grid

    def decide(self, question: SizeQuestion) -> SizeDecision:
        """How far to read, no further than what is left."""
        fixed = self.rules.fixed
        found = self._auto(question) if fixed is None else SizeDecision(fixed or question.num_left, "fixed")
        if question.most is not None and found.size > question.most:
            found = SizeDecision(question.most, "halved", because="memory ran out in a longer one")
        if found.size >= question.num_left:
            found = replace(found, size=question.num_left, rule="end")
        elif self.rules.is_auto and question.num_prompts == 1:
            found = self._without_sliver(found, question.num_left)
        step = _step(question, found.size)
        return replace(found, predicted_s=self.times.predict(step), predicted_bytes=self.predict_bytes(step))

    def record(self, step: StepShape, seconds: float) -> None:
        """A step ran and took so long."""
        self.times.record(step, seconds)

    def predict_s(self, step: StepShape) -> float | None:
        return self.times.predict(step)

    def predict_bytes(self, step: StepShape) -> int | None:
        return None if self._step_bytes is None else self._step_bytes(step)

    def _auto(self, question: SizeQuestion) -> SizeDecision:
        rules = self.rules
        # Whoever shares a step with a long prompt waits for its first token.
        is_waited_for = question.num_decodes > 0 or question.num_held > 0 or question.num_prompts > 1
        if rules.target_itl_s is not None and (is_waited_for or question.keeps_itl):
            found = self._within_itl(question, rules.target_itl_s, "target_itl")
            wanted = self._floor_of_ttft(question)
            if wanted is not None and wanted > found.size:
                found = replace(found, because=f"target_ttft would need {wanted}, target_itl comes first")
        else:
            found = self._usual(is_waited_for)
            wanted = self._floor_of_ttft(question)
            if wanted is not None and wanted > found.size:
                because = "target_ttft asks for as few steps"
                found = SizeDecision(min(wanted, rules.most), "latency", because=because)
            if rules.decode_gap_s is not None and (question.num_decodes or question.num_held):
                what = f"a gap of {1000 * rules.decode_gap_s:g} ms, the default while others decode,"
                bounded = self._within_itl(question, rules.decode_gap_s, what)
                found = bounded if bounded.size < found.size else found
        return self._within_memory(question, replace(found, size=rules.on_grid(found.size)))

    def _usual(self, is_waited_for: bool) -> SizeDecision:
        """Where no target bounds the step."""
        rules = self.rules
        if rules.tuned is not None and not (is_waited_for and rules.tuned > rules.default):
            return SizeDecision(rules.tuned, "tuned")
        if rules.max_activation_bytes is not None and not is_waited_for:
            return SizeDecision(rules.most, "largest")
        return SizeDecision(rules.default, "default")

    def _within_itl(self, question: SizeQuestion, target_s: float, what: str) -> SizeDecision:
        """The longest chunk whose step keeps a target of this name, by what is known of step times."""
        rules, times = self.rules, self.times
        cautious = max(CAUTIOUS_CHUNK, rules.grid)
        empty = times.predict(replace(_step(question, 0), num_logits=0))
        if empty is None:
            return SizeDecision(cautious, "latency", because="nothing is known of step times yet")
        held = StepShape(0, num_decodes=question.num_held, decode_pasts=question.held_pasts)
        held_s = times.predict(held) if question.num_held else 0.0
        room_s = target_s - empty - (held_s or 0.0)
        fitting = min(_tokens_in(room_s, times.coefficients, question), rules.most)
        if fitting < max(rules.smallest, rules.grid):
            return SizeDecision(max(rules.smallest, rules.grid), "smallest", because=f"{what} cannot be kept")
        if not times.has_prior and fitting > (learned := max(cautious, 2 * times.most_prompt_tokens)):
            return SizeDecision(learned, "latency", because="step times are being learned")
        rule: SizeRule = "latency" if fitting < rules.most else "largest"
        because = "" if what == "target_itl" else f"{what} asks for less"
        return SizeDecision(_rounded_down(fitting), rule, because=because)

    def _floor_of_ttft(self, question: SizeQuestion) -> int | None:
        """The smallest chunk by which the rest of the prompt is predicted to be read in time; None where there is no
        such target, or no prediction. Pasts are as long as they are, however the prompt is cut: what a larger chunk
        saves is what each step costs beside its tokens."""
        target_s = self.rules.target_ttft_s
        per_step_s = self.times.predict(replace(_step(question, 0), num_logits=0))
        if target_s is None or per_step_s is None:
            return None
        known, num_left = self.times.coefficients, question.num_left
        tokens_s = num_left * (known.per_token + known.per_token_past * (question.past + num_left / 2))
        room_s = target_s - question.waited_s - tokens_s
        num_steps = int(min(room_s / per_step_s, num_left)) if per_step_s > 0 else num_left
        return -(-num_left // num_steps) if num_steps >= 1 else max(num_left, self.rules.most)

    def _within_memory(self, question: SizeQuestion, found: SizeDecision) -> SizeDecision:
        """No longer than the budget allows, by bisection: a longer chunk never needs less."""
        budget, step_bytes, grid = self.rules.budget_bytes, self._step_bytes, self.rules.grid
        # What is left may be less than the size, and is then all there is to fit in.
        num_tokens = min(found.size, question.num_left)
        if budget is None or step_bytes is None or step_bytes(_step(question, num_tokens)) <= budget:
            return found
        # It is often what it was the last time, or a little less.
        guesses = [self._last_fit + 1, self._last_fit, self._last_fit - 1, self._last_fit - 4]
        too_long = -(-num_tokens // grid)  # in units of the grid
        fits = self._last_fit = largest_that(
            lambda units: step_bytes(_step(question, units * grid)) <= budget, 0, too_long, guesses
        )
        if fits == 0:
            return SizeDecision(grid, "smallest", because="there is hardly any memory left")
        return SizeDecision(fits * grid, "memory")

    def _without_sliver(self, found: SizeDecision, num_left: int) -> SizeDecision:
        """Where a chunk of this size would leave a sliver after it, about half of what is left; on the grid, and on
        whole rows of attention's tiles where chunks are long."""
        num_tokens = found.size
        if num_left - num_tokens >= SLIVER * num_tokens:
            return found
        unit = _unit(num_tokens, self.rules.grid)
        for half in (-(-num_left // (2 * unit)) * unit, num_left // (2 * unit) * unit):
            rest = num_left - half
            if SLIVER * num_tokens <= min(half, rest) and max(half, rest) <= num_tokens:
                return replace(found, size=half, rule="balanced")
        return found


def largest_that(fits: Callable[[int], bool], start: int, end: int, guesses: Iterable[int] = ()) -> int:
    """The largest number of [start, end) that fits, by bisection: `start` is taken to fit, and a larger one never
    fits where a smaller one does not. Guesses are tried first."""
    left = list(guesses)
    while end - start > 1:
        middle = left.pop(0) if left else (start + end) // 2
        if start < middle < end:
            start, end = (middle, end) if fits(middle) else (start, middle)
    return start


def shape_of(plan: StepPlan) -> StepShape:
    """What a planned step runs."""
    kinds = ((planned.kind, planned.span.start, planned.span.end) for planned in plan.spans)
    return shape_of_spans(kinds, num_logits=sum(planned.samples for planned in plan.spans))


def repeated(decodes: StepShape, num_before: int) -> StepShape:
    """The step that follows so many of these decodes, the first included: each is as many tokens further."""
    return replace(decodes, decode_pasts=decodes.decode_pasts + num_before * decodes.num_decodes)


def shape_of_spans(spans: Iterable[tuple[SpanKind, int, int]], *, num_logits: int = 0) -> StepShape:
    """What a step of spans [start, end) runs. Tokens of a replay run as decodes do."""
    num_tokens = token_pasts = longest_past = num_decodes = decode_pasts = 0
    for kind, start, end in spans:
        if kind is SpanKind.CHUNK:
            num_tokens += end - start
            token_pasts += pasts_of_chunk(end - start, start)
            longest_past = max(longest_past, start)
        else:
            num_decodes += end - start
            decode_pasts += (end - start) * (start + end + 1) // 2
    return StepShape(num_tokens, token_pasts, longest_past, num_decodes, decode_pasts, num_logits)


def _step(question: SizeQuestion, num_tokens: int) -> StepShape:
    """The step with a chunk of so many tokens, or equal parts of them; each may end its prompt."""
    num_parts = min(question.num_prompts, MOST_SHARES)
    return StepShape(
        num_prompt_tokens=num_tokens,
        token_pasts=num_parts * pasts_of_chunk(num_tokens // num_parts, question.past)
        + num_tokens % num_parts * (question.past + num_tokens // num_parts),
        longest_past=max(question.longest_past, question.past),
        num_decodes=question.num_decodes,
        decode_pasts=question.decode_pasts,
        num_logits=question.num_decodes + question.num_prompts,
    )


def _tokens_in(room_s: float, known: StepTimeCoefficients, question: SizeQuestion) -> int:
    """The most prompt tokens that take no longer: n tokens in k equal parts cost linear * n + quadratic * n^2, where
    the square is of what the tokens of a part see of each other."""
    if room_s <= 0:
        return 0
    linear = known.per_token + known.per_token_past * (question.past - 0.5)
    quadratic = known.per_token_past / (2 * min(question.num_prompts, MOST_SHARES))
    root = sqrt(max(linear, 0.0) ** 2 + 4 * quadratic * room_s)
    # The form of the solution that is right without a square, too; no cost at all is as good as any number.
    most = 2 * room_s / (max(linear, 0.0) + root) if root > 0 else MOST_TOKENS
    return int(min(most, MOST_TOKENS))


def _unit(num_tokens: int, grid: int) -> int:
    """What long chunks are cut by: attention runs on whole rows of queries."""
    return grid if num_tokens < 256 else -(-QUERY_GRID // grid) * grid


def _rounded_down(num_tokens: int) -> int:
    """A size that comes up again: few shapes are learned sooner than many."""
    unit = 1 if num_tokens < 32 else 8 if num_tokens < 128 else 16 if num_tokens < 512 else 64
    return num_tokens // unit * unit


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
        self._counted: tuple[StepPlan, StepShape] | None = None  # the last step, which may be repeated
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

    def count(self, plan: StepPlan, seconds: float | None, num_before: int = 0) -> None:
        """A step ran, in so many seconds if they are known; or once more, after so many passes."""
        if self._num_shrunk_left:
            self._num_shrunk_left -= 1
            if self._num_shrunk_left == 0:
                self._shrunk = None
        if seconds is not None:
            self._clock_s += seconds
            if self._sizer is not None:
                if self._counted is None or self._counted[0] is not plan:
                    self._counted = plan, shape_of(plan)
                self._sizer.record(repeated(self._counted[1], num_before), seconds)

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
