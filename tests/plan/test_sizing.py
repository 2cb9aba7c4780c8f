"""Sizes follow the rules: memory and latency are kept, prompts end in no sliver, nothing known means caution."""

from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.plan import (
    ChunkedPrefillConfig,
    ChunkSizer,
    ModelShape,
    PlannedSpan,
    Prefill,
    PrefillChunk,
    PrefillScheduler,
    SizeDecision,
    SizeQuestion,
    SizeRules,
    Span,
    SpanKind,
    StartDecode,
    StepPlan,
    StepShape,
    StepTimeCoefficients,
    StepTimeModel,
)
from penstock.plan.activation import step_memory
from penstock.plan.memory import ActivationModel
from penstock.plan.sizing import CAUTIOUS_CHUNK, shape_of

CPU = StepTimeCoefficients(0.012, 8e-4, 9e-8, 4e-3, 1.5e-6)
SHAPE = ModelShape(30, 576, 1536, 9, 3, 64, 49152)


def step_bytes(step: StepShape) -> int:
    return step_memory(SHAPE, step, dtype_bytes=2).peak_bytes


def sizer(known: StepTimeCoefficients | None = CPU, **rules: Any) -> ChunkSizer:
    return ChunkSizer(SizeRules(**rules), StepTimeModel(known), step_bytes)


def read(
    prompt_tokens: int,
    chunk_sizer: ChunkSizer,
    *,
    speed: StepTimeCoefficients = CPU,
    overlap: int = 0,
) -> list[tuple[PrefillChunk, SizeDecision]]:
    """Read a prompt on a machine of this speed: each chunk, and why it is as long."""
    scheduler = PrefillScheduler(
        range(prompt_tokens), ChunkedPrefillConfig(overlap=overlap), sizer=chunk_sizer
    )
    seen: list[tuple[PrefillChunk, SizeDecision]] = []
    while not isinstance(action := scheduler.next_action(), StartDecode):
        assert isinstance(action, Prefill)
        assert action.decision is not None
        assert scheduler.total_chunks > len(seen)
        seen.append((action.chunk, action.decision))
        step = StepShape.of_chunk(len(action.chunk), action.chunk.start_pos)
        scheduler.complete(action.chunk, speed.seconds(step))
    assert scheduler.total_chunks == len(seen)
    return seen


def lengths(chunks: list[tuple[PrefillChunk, SizeDecision]]) -> list[int]:
    return [len(chunk) for chunk, _ in chunks]


def rules_of(chunks: list[tuple[PrefillChunk, SizeDecision]]) -> set[str]:
    return {decision.rule for _, decision in chunks}


def test_without_anything_to_go_by_chunks_have_the_default_size() -> None:
    chunks = read(3000, sizer(None))
    assert lengths(chunks) == [512] * 5 + [440]
    assert [decision.rule for _, decision in chunks] == ["default"] * 5 + ["end"]


def test_a_profile_says_what_is_fastest_but_not_at_the_cost_of_others() -> None:
    tuned = sizer(tuned=1024)
    assert tuned.decide(SizeQuestion(0, 9000)) == tuned.decide(SizeQuestion(0, 8000))
    assert (tuned.decide(SizeQuestion(0, 9000)).size, tuned.decide(SizeQuestion(0, 9000)).rule) == (
        1024,
        "tuned",
    )
    assert tuned.decide(SizeQuestion(0, 9000, num_decodes=1)).size == 512
    assert tuned.decide(SizeQuestion(0, 9000, num_held=1)).size == 512
    assert sizer(tuned=256).decide(SizeQuestion(0, 9000, num_decodes=1)).size == 256


def test_a_fixed_size_is_kept_to_the_letter() -> None:
    chunks = read(1030, sizer(fixed=512))
    assert PrefillScheduler(range(1030), ChunkedPrefillConfig(512)).total_chunks == 3
    assert lengths(chunks) == [512, 512, 6]
    assert [decision.rule for _, decision in chunks] == ["fixed", "fixed", "end"]
    assert sizer(fixed=0).decide(SizeQuestion(0, 700)).size == 700


# The end of a prompt.


@settings(deadline=None)
@given(
    num_tokens=st.integers(1, 9000),
    default=st.sampled_from([64, 128, 200, 256, 512, 700, 1024]),
    grid=st.sampled_from([1, 64]),
)
@example(num_tokens=159, default=128, grid=64)  # two grids would leave a sliver, one does not
def test_no_prompt_ends_in_a_sliver_and_none_has_a_chunk_too_many(
    num_tokens: int, default: int, grid: int
) -> None:
    size = max(default // grid, 1) * grid
    chunks = lengths(read(num_tokens, sizer(default=default, grid=grid)))
    assert sum(chunks) == num_tokens
    assert len(chunks) == -(-num_tokens // size)
    assert max(chunks) <= size
    assert all(length % grid == 0 for length in chunks[:-1])
    can_balance = size > grid  # a chunk of one grid has nothing to give
    if len(chunks) > 1 and can_balance:
        assert chunks[-1] >= size / 4
    # Only the last two chunks give way: those before them are as long as ever, and end on tiles.
    assert all(length == size for length in chunks[:-2])


def test_1030_tokens_by_hand() -> None:
    chunks = read(1030, sizer())
    assert lengths(chunks) == [512, 320, 198]
    assert [decision.rule for _, decision in chunks] == ["default", "balanced", "end"]


# Latency.


@settings(deadline=None, max_examples=60)
@given(
    past=st.integers(0, 30_000),
    num_decodes=st.integers(1, 16),
    target_s=st.floats(0.02, 3.0),
    grid=st.sampled_from([1, 64]),
)
def test_a_step_keeps_the_target_and_the_next_size_up_would_not(
    past: int, num_decodes: int, target_s: float, grid: int
) -> None:
    question = SizeQuestion(past, 10**6, num_decodes=num_decodes, decode_pasts=800 * num_decodes)
    bounded = sizer(target_itl_s=target_s, grid=grid)
    decision = bounded.decide(question)
    assert decision.predicted_s is not None
    assert decision.size % grid == 0
    if decision.rule == "smallest":
        least = max(bounded.rules.smallest, grid)
        assert decision.size == least
        assert decision.because == "target_itl cannot be kept"
        return
    assert decision.predicted_s <= target_s * 1.0001
    if decision.rule == "latency":
        longer = max(decision.size + 64 + grid, int(decision.size * 1.5))
        beyond = StepShape.of_chunk(longer, past, num_decodes=num_decodes, decode_pasts=800 * num_decodes)
        assert CPU.seconds(beyond) > target_s
    else:
        assert (decision.rule, decision.size) == ("largest", bounded.rules.most)


def test_chunks_shrink_as_the_past_grows() -> None:
    chunks = read(20_000, sizer(target_itl_s=0.2))
    sizes = lengths(chunks)[:-2]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.5 * sizes[-1]
    for chunk, decision in chunks:
        assert CPU.seconds(StepShape.of_chunk(len(chunk), chunk.start_pos)) <= 0.2 * 1.0001
        assert decision.predicted_s == pytest.approx(
            CPU.seconds(StepShape.of_chunk(len(chunk), chunk.start_pos)), rel=0.05
        )


def test_where_nothing_is_known_it_begins_with_a_cautious_chunk_and_at_most_doubles() -> None:
    chunks = read(8000, sizer(None, target_itl_s=0.4))
    sizes = lengths(chunks)
    assert sizes[0] == CAUTIOUS_CHUNK
    for index in range(1, len(sizes)):
        assert sizes[index] <= 2 * max(sizes[:index])
    assert max(sizes) > 4 * CAUTIOUS_CHUNK
    seconds = [CPU.seconds(StepShape.of_chunk(len(chunk), chunk.start_pos)) for chunk, _ in chunks]
    assert max(seconds) < 1.25 * 0.4
    assert sorted(seconds)[len(seconds) // 2] > 0.7 * 0.4  # and it is made use of


def test_a_machine_slower_than_its_profile_is_found_out() -> None:
    slow = StepTimeCoefficients(*(3 * getattr(CPU, name) for name in CPU.__slots__))
    chunks = read(12_000, sizer(target_itl_s=0.3), speed=slow)
    seconds = [slow.seconds(StepShape.of_chunk(len(chunk), chunk.start_pos)) for chunk, _ in chunks]
    assert sum(second > 1.25 * 0.3 for second in seconds) <= 2


def test_the_target_between_tokens_bounds_nothing_where_nobody_waits() -> None:
    bounded = sizer(target_itl_s=0.05)
    assert bounded.decide(SizeQuestion(0, 4000)).rule == "default"
    assert bounded.decide(SizeQuestion(0, 4000, num_decodes=1)).rule == "latency"
    assert bounded.decide(SizeQuestion(0, 4000, keeps_itl=True)).rule == "latency"
    # A decode that waits for the step needs one of its own after it.
    held = bounded.decide(SizeQuestion(0, 4000, num_held=4))
    assert held.size < bounded.decide(SizeQuestion(0, 4000, keeps_itl=True)).size


@pytest.mark.parametrize("times_slower", [0.1, 1, 4, 20])
def test_the_default_between_tokens_makes_chunks_shorter_and_never_longer(times_slower: float) -> None:
    speed = StepTimeCoefficients(*(times_slower * getattr(CPU, name) for name in CPU.__slots__))
    bounded = sizer(speed, decode_gap_s=0.5)
    assert bounded.decide(SizeQuestion(0, 4000, keeps_itl=True, num_prompts=3)).size == 512
    for past in (0, 3000, 20_000):
        for waiting in ({"num_decodes": 2, "decode_pasts": 900}, {"num_held": 2, "held_pasts": 900}):
            decision = bounded.decide(SizeQuestion(past, 4000, **waiting))  # type: ignore[arg-type]
            step = StepShape.of_chunk(decision.size, past, **waiting if "num_decodes" in waiting else {})  # type: ignore[arg-type]
            is_shorter = decision.size < 512 and "the default while others decode" in decision.because
            assert decision.size == 512 or is_shorter
            assert decision.rule == "smallest" or speed.seconds(step) <= 0.5 * 1.0001


def ttft(size: int, num_tokens: int) -> float:
    """The time of a whole prompt, where pasts are what they are however it is cut."""
    num_steps = -(-num_tokens // size)
    return num_steps * CPU.constant + num_tokens * (CPU.per_token + CPU.per_token_past * num_tokens / 2)


def test_a_target_for_the_first_token_puts_a_floor_under_the_chunk() -> None:
    num_tokens = 8000
    usual, least = ttft(512, num_tokens), ttft(2048, num_tokens)
    easy = sizer(target_ttft_s=usual + 0.001).decide(SizeQuestion(0, num_tokens))
    assert (easy.size, easy.rule) == (512, "default")
    target_s = (usual + least) / 2
    floor = sizer(target_ttft_s=target_s).decide(SizeQuestion(0, num_tokens))
    assert floor.rule == "latency"
    assert 512 < floor.size < 2048
    assert ttft(floor.size, num_tokens) <= target_s < ttft(floor.size - 200, num_tokens)
    out_of_reach = sizer(target_ttft_s=0.1).decide(SizeQuestion(0, num_tokens))
    assert out_of_reach.size == 2048
    # What was waited for is gone from the target.
    waited = sizer(target_ttft_s=usual + 0.001).decide(SizeQuestion(0, num_tokens, waited_s=0.1))
    assert waited.size > 512


def test_of_two_targets_the_one_between_tokens_holds_and_the_decision_says_so() -> None:
    question = SizeQuestion(0, 8000, num_decodes=2)
    both = sizer(target_itl_s=0.1, target_ttft_s=1.0).decide(question)
    assert both.size == sizer(target_itl_s=0.1).decide(question).size
    assert both.because == "target_ttft would need 8000, target_itl comes first"


# Memory.


@settings(deadline=None, max_examples=30)
@given(
    num_tokens=st.integers(1, 4000),
    budget=st.integers(2 * 10**6, 6 * 10**7),
    grid=st.sampled_from([1, 64]),
    target_s=st.none() | st.floats(0.05, 1.0),
)
def test_no_step_needs_more_than_the_budget(
    num_tokens: int, budget: int, grid: int, target_s: float | None
) -> None:
    budget = max(budget, ActivationModel(SHAPE, 2).smallest_budget(num_tokens, grid=grid))
    bounded = sizer(max_activation_bytes=budget, grid=grid, target_itl_s=target_s)
    for chunk, decision in read(num_tokens, bounded):
        needed = step_bytes(StepShape.of_chunk(len(chunk), chunk.start_pos, is_last=True))
        assert needed == decision.predicted_bytes
        assert needed <= budget
        if decision.rule == "memory":
            longer = len(chunk) + grid
            assert step_bytes(StepShape.of_chunk(longer, chunk.start_pos, is_last=True)) > budget


def test_a_budget_gives_the_largest_chunk_that_fits_and_free_memory_only_bounds() -> None:
    budget = step_bytes(StepShape.of_chunk(900, 0, is_last=True))
    given = sizer(max_activation_bytes=budget).decide(SizeQuestion(0, 9000))
    assert given.rule == "memory"
    assert given.size >= 900
    assert sizer(free_bytes=2 * budget).decide(SizeQuestion(0, 9000)).size == 512
    short = sizer(free_bytes=step_bytes(StepShape.of_chunk(200, 0, is_last=True)) * 2)
    assert short.decide(SizeQuestion(0, 9000)).rule == "memory"
    exact = sizer(max_activation_bytes=step_bytes(StepShape.of_chunk(512, 0, is_last=True)), largest=512)
    assert (exact.decide(SizeQuestion(0, 512)).size, exact.decide(SizeQuestion(0, 9000)).size) == (512, 512)
    # Hardly any: it is tried all the same, memory that is not there makes itself known.
    none = sizer(free_bytes=0, grid=64).decide(SizeQuestion(0, 9000))
    assert (none.size, none.rule) == (64, "smallest")
    # Beside decodes without a target, the default is enough.
    assert sizer(max_activation_bytes=10**9).decide(SizeQuestion(0, 9000, num_decodes=2)).size == 512
    assert sizer(max_activation_bytes=10**9).decide(SizeQuestion(0, 9000)).rule == "largest"


# Running out of memory.


@given(st.integers(2, 4000), st.integers(0, 12), st.sampled_from([1, 64]))
def test_what_ran_out_is_halved_and_stays_so(num_tokens: int, fails_at: int, grid: int) -> None:
    scheduler = PrefillScheduler(
        range(num_tokens), ChunkedPrefillConfig(), grid=grid, sizer=sizer(default=512, grid=grid)
    )
    done, index, most = 0, 0, 512
    while not isinstance(action := scheduler.next_action(), StartDecode):
        assert isinstance(action, Prefill)
        chunk = action.chunk
        assert chunk.start_pos == done
        assert len(chunk) <= most
        if index == fails_at and len(chunk) > 1:
            scheduler.shrink(chunk)
            most = max(-(-len(chunk) // 2), min(grid, len(chunk)))
            most = -(-most // grid) * grid
        else:
            scheduler.complete(chunk, 0.1)
            done = chunk.end_pos
            if most < 512 and not chunk.is_last and len(chunk) == most:
                assert action.decision is not None
                assert action.decision.rule == "halved"
        index += 1
    assert done == num_tokens


@given(st.integers(1, 3000), st.integers(0, 100), st.sampled_from([64, 128, 512]))
def test_sized_chunks_overlap_as_fixed_ones_do(num_tokens: int, overlap: int, default: int) -> None:
    chunks = [chunk for chunk, _ in read(num_tokens, sizer(default=default), overlap=overlap)]
    end = 0
    for chunk in chunks:
        assert chunk.start_pos in (max(end - overlap, 0), end)
        assert chunk.end_pos > end
        end = chunk.end_pos
    assert end == num_tokens


def test_learning_from_a_noisy_machine_keeps_most_steps_within_a_quarter_of_the_target() -> None:
    """Four streams decode while prompts of 8,000 tokens are read, one after the other."""
    random, model = Random(4), StepTimeModel()
    bounded = ChunkSizer(SizeRules(target_itl_s=0.2), model)
    over = total = 0
    for _ in range(4):
        done = 0
        while done < 8000:
            question = SizeQuestion(done, 8000 - done, num_decodes=4, decode_pasts=4 * 700)
            size = bounded.decide(question).size
            step = StepShape.of_chunk(size, done, num_decodes=4, decode_pasts=4 * 700)
            seconds = CPU.seconds(step) * max(random.gauss(1, 0.06), 0.8)
            bounded.record(step, seconds)
            over, total, done = over + (seconds > 1.25 * 0.2), total + 1, done + size
    assert over <= 0.05 * total
    assert total < 4 * 8000 / 100  # chunks of 100 and more: the target is made use of


def random_sizer(random: Random) -> ChunkSizer:
    """Any rules; nothing is known of step times, a profile is, or a few steps ran."""

    def maybe(value: Any) -> Any:
        return value if random.random() < 0.5 else None

    times = StepTimeModel(maybe(CPU))
    for _ in range(random.choice([0, 0, 5])):
        step = StepShape.of_chunk(random.choice([1, 50, 200]), random.randrange(3000))
        times.record(step, CPU.seconds(step))
    is_fixed = random.random() < 0.1
    rules = SizeRules(
        fixed=random.choice([0, 100]) if is_fixed else None,
        max_activation_bytes=maybe(random.randrange(100, 10_000) * 1000),
        free_bytes=maybe(random.randrange(10_000) * 1000),
        target_itl_s=None if is_fixed else maybe(random.choice([0.001, 0.02, 0.1, 0.5, 2.0, 9.0])),
        target_ttft_s=None if is_fixed else maybe(random.choice([0.1, 2.0, 10.0])),
        grid=random.choice([1, 1, 16, 64, 100]),
        smallest=random.choice([8, 20]),
        largest=random.choice([700, 2048]),
        default=random.choice([64, 512]),
        tuned=maybe(random.choice([100, 1000, 3000])),
    )
    return ChunkSizer(
        rules, times, maybe(lambda step: 3000 * step.num_prompt_tokens + 40 * step.longest_past)
    )


def random_question(random: Random) -> SizeQuestion:
    num_decodes, num_held = random.choice([0, 0, 3]), random.choice([0, 0, 2])
    return SizeQuestion(
        past=random.choice([0, 500, 8000]),
        num_left=random.randrange(1, random.choice([10, 300, 2000, 9000])),
        longest_past=random.choice([0, 9000]),
        num_prompts=random.choice([1, 1, 2, 5]),
        num_decodes=num_decodes,
        decode_pasts=700 * num_decodes,
        num_held=num_held,
        held_pasts=900 * num_held,
        keeps_itl=random.random() < 0.3,
        waited_s=random.choice([0.0, 1.0]),
        most=random.choice([None, None, None, 5, 120]),
    )


def test_thousands_of_questions_are_answered_as_ever() -> None:
    """How often each rule held, the tokens that it gave in all, and what was expected of its steps."""
    random, answers = Random(1), dict[str, list[SizeDecision]]()
    for _ in range(1500):
        asked = random_sizer(random)
        for _ in range(4):
            decision = asked.decide(random_question(random))
            answers.setdefault(decision.rule, []).append(decision)
    found = {
        rule: (
            len(decisions),
            sum(decision.size for decision in decisions),
            sum(bool(decision.because) for decision in decisions),
            sum(decision.predicted_bytes or 0 for decision in decisions),
            round(sum(decision.predicted_s or 0.0 for decision in decisions), 4),
        )
        for rule, decisions in sorted(answers.items())
    }
    assert found == ANSWERS


ANSWERS = {
    "balanced": (40, 15_929, 20, 11_034_000, 12.7636),
    "default": (691, 136_752, 0, 249_460_000, 95.1621),
    "end": (2313, 470_993, 879, 944_148_000, 431.0685),
    "fixed": (161, 16_100, 0, 42_200_000, 14.5151),
    "halved": (1388, 48_110, 1388, 239_930_000, 56.0142),
    "largest": (62, 68_300, 15, 85_440_000, 60.4644),
    "latency": (718, 192_597, 588, 314_166_000, 194.1809),
    "memory": (113, 63_338, 0, 216_814_000, 52.8316),
    "smallest": (365, 15_147, 365, 84_397_000, 21.8874),
    "tuned": (149, 58_680, 0, 85_272_000, 38.6541),
}


def test_defaults_of_rules_and_questions() -> None:
    rules = SizeRules()
    assert (rules.grid, rules.smallest, rules.largest, rules.default) == (1, 8, 2048, 512)
    assert (rules.most, rules.budget_bytes, rules.is_auto) == (2048, None, True)
    assert SizeRules(tuned=4000).most == 4000
    assert SizeRules(default=3000, grid=64).most == 2944
    assert SizeRules(free_bytes=101).budget_bytes == 50
    assert SizeRules(free_bytes=100, max_activation_bytes=60).budget_bytes == 60
    assert [SizeRules(grid=64).on_grid(size) for size in (1, 63, 64, 127, 128)] == [64, 64, 64, 64, 128]
    SizeRules(fixed=0, max_activation_bytes=1, free_bytes=0)  # as little as this is accepted
    SizeRules(tuned=1, grid=1, smallest=1, largest=1, default=1)
    question = SizeQuestion(5, 7)
    assert (question.num_prompts, question.num_decodes, question.num_held) == (1, 0, 0)
    assert question == SizeQuestion(5, 7, 0, 1, 0, 0, 0, 0, False, 0.0, None)


@given(st.integers(0, 400), st.integers(0, 400))
def test_the_pasts_of_a_chunk_are_what_its_tokens_see(num_tokens: int, past: int) -> None:
    step = StepShape.of_chunk(num_tokens, past, num_decodes=3, decode_pasts=60, is_last=True)
    assert step.token_pasts == sum(range(past, past + num_tokens))
    assert step == StepShape(num_tokens, step.token_pasts, past, 3, 60, 4)
    assert step.num_rows == num_tokens + 3
    assert StepShape.of_chunk(num_tokens, past) == StepShape(num_tokens, step.token_pasts, past, 0, 0, 0)


def test_the_shape_of_a_planned_step() -> None:
    spans = [
        ("a", Span(90, 91), SpanKind.DECODE, True),
        ("b", Span(10, 13), SpanKind.CHUNK, False),
        ("c", Span(40, 42), SpanKind.CHUNK, True),
        ("d", Span(20, 24), SpanKind.REPLAY, False),
    ]
    plan = StepPlan(tuple(PlannedSpan(*span) for span in spans))
    assert (plan.num_tokens, plan.num_chunk_tokens) == (10, 9)
    assert shape_of(plan) == StepShape(
        num_prompt_tokens=5,
        token_pasts=10 + 11 + 12 + 40 + 41,
        longest_past=40,
        num_decodes=5,
        decode_pasts=91 + 21 + 22 + 23 + 24,
        num_logits=2,
    )
    assert shape_of(StepPlan(plan.spans[:1])) == StepShape(0, num_decodes=1, decode_pasts=91, num_logits=1)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"fixed": -1}, "fixed=-1"),
        ({"fixed": 64, "target_itl_s": 0.1}, "target_itl_s=0.1 contradicts fixed=64"),
        ({"fixed": 0, "target_ttft_s": 0.1}, "target_ttft_s=0.1 contradicts fixed=0"),
        ({"target_itl_s": 0}, "target_itl_s=0 is not accepted"),
        ({"target_ttft_s": float("nan")}, "target_ttft_s=nan"),
        ({"max_activation_bytes": 0}, "max_activation_bytes=0"),
        ({"grid": 0}, "grid=0"),
    ],
)
def test_rules_are_checked(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        SizeRules(**rules)
