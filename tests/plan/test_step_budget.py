"""A step's budget: what is configured, what a sizer says of those that share it, half of it once memory ran out."""

from dataclasses import dataclass
from typing import Any

import pytest

from penstock.errors import SettingError
from penstock.plan import (
    ChunkSizer,
    PlannedSpan,
    ScheduleConfig,
    SizeDecision,
    SizeQuestion,
    SizeRules,
    Span,
    SpanKind,
    StepPlan,
    StepShape,
)
from penstock.plan.sizing import SHRUNK_STEPS, StepBudget, TokenBudget


@dataclass(frozen=True)
class Waiting:
    """A request, as far as a budget looks at it."""

    id: str
    num_run: int
    furthest_end: int
    num_tokens: int = 0

    @property
    def next_start(self) -> int:
        return self.num_run


class Recorder(ChunkSizer):
    """Answers with a size of its own, and keeps what it is asked and told."""

    def __init__(self, size: int) -> None:
        super().__init__(SizeRules())
        self.size = size
        self.questions: list[SizeQuestion] = []
        self.steps: list[tuple[StepShape, float]] = []

    def decide(self, question: SizeQuestion) -> SizeDecision:
        self.questions.append(question)
        return SizeDecision(self.size, "latency")

    def record(self, step: StepShape, seconds: float) -> None:
        self.steps.append((step, seconds))


def budget(sizer: ChunkSizer | None = None, **config: Any) -> StepBudget:
    return StepBudget(ScheduleConfig(**config), sizer)


def prompts(*pasts_and_ends: tuple[int, int]) -> Any:
    return [Waiting(f"p{index}", *each) for index, each in enumerate(pasts_and_ends)]


def decodes(*num_tokens: int) -> Any:
    return [Waiting(f"d{index}", each - 1, each, each) for index, each in enumerate(num_tokens)]


def why(settled: StepBudget) -> SizeDecision | None:
    return settled.decision


def is_shrunk(settled: StepBudget) -> bool:
    return settled.is_shrunk


A_DECODE = StepPlan((PlannedSpan("d0", Span(7, 8), SpanKind.DECODE, True),))


def test_a_configured_budget_is_what_it_is() -> None:
    fixed = budget(chunk_size=512, step_tokens=520)
    assert fixed.settle(prompts((0, 900)), decodes(5, 6), []) == TokenBudget(512, 128)
    assert why(fixed) == SizeDecision(512, "fixed")
    assert fixed.settle(prompts((0, 900)), decodes(*range(1, 17)), []) == TokenBudget(504, 128)
    assert fixed.settle([], decodes(5), []) == TokenBudget(512, 128)
    assert why(fixed) is None
    whole = budget(chunk_size=0)
    assert whole.settle(prompts((100, 900), (0, 50)), [], []).num_tokens is None
    assert why(whole) == SizeDecision(800, "fixed")


def test_a_sizer_is_asked_of_all_that_share_the_step() -> None:
    sizer = Recorder(300)
    auto = budget(sizer, chunk_size=512, auto_chunk=True)
    reading = prompts((0, 10), (100, 600), (200, 250), (401, 500), (7000, 9000))
    auto.arrive("p4")
    auto.count(A_DECODE, 2.0)
    for request in reading[:4]:
        auto.arrive(request.id)
    auto.count(A_DECODE, 0.5)
    assert auto.settle(reading, decodes(5, 6), decodes(70, 80, 90)) == TokenBudget(300, 64)
    assert why(auto) == SizeDecision(300, "latency")
    assert sizer.questions == [
        SizeQuestion(
            past=(0 + 100 + 200 + 401) // 4,  # of the four that share it
            num_left=10 + 500 + 50 + 99 + 2000,
            longest_past=7000,
            num_prompts=5,
            num_decodes=2,
            decode_pasts=11,
            num_held=3,
            held_pasts=240,
            waited_s=0.5,
            most=None,
        )
    ]
    auto.settle(reading[4:], [], [])
    assert sizer.questions[-1].waited_s == 2.5
    strict = budget(sizer, auto_chunk=True, keeps_itl=True)
    strict.arrive("p4")
    strict.settle(reading[4:], [], [])
    assert [question.keeps_itl for question in sizer.questions] == [False, False, True]
    sizer.size = 2000
    assert auto.settle(reading, [], []) == TokenBudget(512, 128)
    auto.forget("p4")
    with pytest.raises(KeyError):
        auto.settle(reading[4:], [], [])


def test_it_learns_from_steps_whose_seconds_are_known() -> None:
    sizer = Recorder(300)
    learning = budget(sizer)
    learning.count(A_DECODE, None)
    learning.count(A_DECODE, 0.25)
    assert sizer.steps == [(StepShape(0, num_decodes=1, decode_pasts=8, num_logits=1), 0.25)]
    budget().count(A_DECODE, 0.25)  # without a sizer nobody learns
    with pytest.raises(SettingError, match="without a sizer"):
        budget(auto_chunk=True)


@pytest.mark.parametrize(
    ("num_tokens", "grid", "half"),
    [
        (512, 1, 256),
        (7, 1, 4),
        (2, 1, 1),
        (512, 64, 256),
        (400, 64, 256),
        (130, 64, 128),
        (128, 64, 64),
        (100, 64, 64),
        (64, 64, 32),
        (51, 64, 26),
    ],
)
def test_half_of_what_ran_out_is_on_the_grid_while_it_is_longer(
    num_tokens: int, grid: int, half: int
) -> None:
    shrunk = budget(chunk_size=512, grid=grid)
    assert not is_shrunk(shrunk)
    assert shrunk.shrink(num_tokens)
    assert is_shrunk(shrunk)
    assert shrunk.settle(prompts((0, 9000)), [], []).num_tokens == half
    assert why(shrunk) == SizeDecision(half, "halved")


def test_a_token_cannot_be_halved() -> None:
    for num_tokens in (0, 1):
        single = budget()
        assert not single.shrink(num_tokens)
        assert not is_shrunk(single)
        assert single.settle(prompts((0, 9000)), [], []).num_tokens == 512


def test_half_a_budget_lasts_for_some_steps() -> None:
    sizer = Recorder(1000)
    shrunk = budget(sizer, chunk_size=2048, auto_chunk=True)
    shrunk.arrive("p0")
    shrunk.shrink(800)
    for _ in range(SHRUNK_STEPS):
        assert shrunk.settle(prompts((0, 9000)), [], []).num_tokens == 400
        assert sizer.questions[-1].most == 400
        shrunk.count(A_DECODE, None)
    assert not is_shrunk(shrunk)
    assert shrunk.settle(prompts((0, 9000)), [], []).num_tokens == 1000
    assert sizer.questions[-1].most is None
    whole = budget(chunk_size=0)
    whole.shrink(800)
    whole.count(A_DECODE, None)
    whole.shrink(600)  # which begins anew
    for _ in range(SHRUNK_STEPS):
        assert whole.settle(prompts((0, 9000)), [], []).num_tokens == 300
        whole.count(A_DECODE, None)
    assert whole.settle(prompts((0, 9000)), [], []).num_tokens is None
    assert SHRUNK_STEPS == 64
