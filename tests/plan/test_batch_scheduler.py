from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.errors import CacheFullError, QueueFullError, SettingError
from penstock.plan import (
    BatchScheduler,
    CacheLimits,
    ScheduleConfig,
    SchedulePolicy,
    Span,
    SpanKind,
    StepOrderError,
    StepPlan,
)
from penstock.plan.admission import REPLAY_TOKENS
from penstock.plan.batch_scheduler import share_chunks

AMPLE = CacheLimits(num_blocks=10_000, block_tokens=64, keeps_prefix=True)


def scheduler(limits: CacheLimits = AMPLE, **settings: Any) -> BatchScheduler:
    return BatchScheduler(ScheduleConfig(**settings), limits)


def step(subject: BatchScheduler, finished: Sequence[str] = ()) -> StepPlan:
    plan = subject.schedule()
    assert plan is not None
    subject.commit(plan, finished)
    subject.check_integrity()
    return plan


def ranges(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {planned.request_id: (planned.span.start, planned.span.end) for planned in plan.spans}


def kinds(plan: StepPlan) -> dict[str, SpanKind]:
    return {planned.request_id: planned.kind for planned in plan.spans}


# Owners.


def running(subject: BatchScheduler) -> list[str]:
    return [name for name in subject.request_ids if subject.view(name).phase != "waiting"]


def test_owners_take_turns() -> None:
    subject = scheduler(max_running=3, max_waiting=20)
    for index in range(8):
        subject.add(f"many{index}", 10, 50, "k")
    step(subject)
    assert running(subject) == ["many0", "many1", "many2"]
    subject.add("few0", 10, 50, "l")
    subject.add("few1", 10, 50, "l")
    subject.add("one", 10, 50, "m")
    for ended, next_one in (("many0", "few0"), ("many1", "one"), ("many2", "many3"), ("many3", "many4")):
        step(subject, finished=[ended])
        step(subject)
        assert next_one in running(subject)
    assert running(subject) == ["many4", "few0", "one"]


def test_an_owner_has_no_more_places_than_it_may() -> None:
    subject = scheduler(max_running=4, max_running_per_key=2)
    for index in range(4):
        subject.add(f"k{index}", 10, 50, "k")
    subject.add("l0", 10, 50, "l")
    step(subject)
    assert running(subject) == ["k0", "k1", "l0"]
    step(subject, finished=["k0"])
    step(subject)
    assert running(subject) == ["k1", "k2", "l0"]


def test_no_owner_takes_all_of_the_queue() -> None:
    subject = scheduler(max_running=2, max_waiting=8)
    for index in range(6):
        subject.add(f"k{index}", 10, 50, "k")
        if index == 1:
            subject.admit()
    with pytest.raises(QueueFullError, match="of this key"):
        subject.add("k6", 10, 50, "k")
    for index in range(2):
        subject.add(f"l{index}", 10, 50, "l")
    with pytest.raises(QueueFullError, match="of this key"):
        subject.add("l2", 10, 50, "l")
    subject.add("m0", 10, 50, "m")
    subject.check_integrity()


# One request.


def test_a_lone_prompt_has_the_whole_budget_then_decodes() -> None:
    subject = scheduler()
    subject.add("a", 1200, 3)
    spans = [ranges(step(subject))["a"] for _ in range(4)]
    assert spans == [(0, 512), (512, 1024), (1024, 1200), (1200, 1201)]
    assert subject.view("a").phase == "decode"
    last = step(subject, finished=["a"])
    assert last.spans[0].samples
    assert ranges(last) == {"a": (1201, 1202)}
    assert subject.schedule() is None
    assert (subject.request_ids, subject.num_free_blocks) == ((), AMPLE.num_blocks)


def test_only_the_end_of_what_is_known_samples() -> None:
    subject = scheduler()
    subject.add("a", 600, 9)
    assert [step(subject).spans[0].samples for _ in range(3)] == [False, True, True]


def test_a_lone_prompt_may_run_whole() -> None:
    subject = scheduler(chunk_size=0)
    subject.add("a", 5000, 2)
    subject.add("b", 5000, 2)
    assert ranges(step(subject)) == {"a": (0, 5000)}
    assert ranges(step(subject, ["a"])) == {"a": (5000, 5001), "b": (0, 5000)}


def test_a_chunk_of_any_size_leaves_no_token_out() -> None:
    subject = scheduler(chunk_size=7)
    subject.add("a", 30, 1)
    ends = [ranges(step(subject, ["a"] if i == 4 else []))["a"] for i in range(5)]
    assert ends == [(0, 7), (7, 14), (14, 21), (21, 28), (28, 30)]


# Prompts beside each other.


def test_a_short_prompt_beside_a_long_one_starts_in_the_next_step() -> None:
    subject = scheduler()
    subject.add("long", 8000, 10)
    step(subject)
    subject.add("short", 200, 10)
    plan = step(subject)
    assert ranges(plan) == {"long": (512, 768), "short": (0, 200)}
    assert kinds(step(subject))["short"] is SpanKind.DECODE


def test_many_short_prompts_fit_beside_a_long_one() -> None:
    subject = scheduler()
    subject.add("long", 8000, 10)
    step(subject)
    for index in range(8):
        subject.add(f"s{index}", 20, 10)
    plan = step(subject)
    assert {planned.request_id for planned in plan.spans} >= {f"s{index}" for index in range(8)}


def test_prompts_take_turns_the_one_served_longest_ago_first() -> None:
    subject = scheduler()
    for index in range(8):
        subject.add(f"r{index}", 5000, 1)
    first, second, third = (ranges(step(subject)) for _ in range(3))
    assert first == {f"r{index}": (0, 128) for index in range(4)}
    assert second == {f"r{index}": (0, 128) for index in range(4, 8)}
    assert third == {f"r{index}": (128, 256) for index in range(4)}


def test_a_new_prompt_comes_before_those_that_were_just_served() -> None:
    subject = scheduler()
    for index in range(4):
        subject.add(f"r{index}", 5000, 1)
    step(subject)
    subject.add("new", 5000, 1)
    assert "new" in ranges(step(subject))


def test_a_prompt_that_another_step_lost_is_served_as_if_nothing_was() -> None:
    subject = scheduler()
    for index in range(8):
        subject.add(f"r{index}", 5000, 1)
    plan = subject.schedule()
    assert plan is not None
    subject.abort(plan)
    subject.check_integrity()
    assert subject.schedule() == plan


wants = st.builds(
    lambda start, length: Span(start, start + length), st.integers(0, 5000), st.integers(1, 3000)
)


@given(
    st.lists(wants, max_size=8),
    st.integers(1, 2000),
    st.sampled_from([64, 128, 512]),
    st.sampled_from([1, 64]),
)
def test_shares(wanted: list[Span], budget: int, min_share: int, grid: int) -> None:
    budget = max(budget // grid * grid, grid)
    ends = share_chunks(wanted, budget, min_share=min_share, grid=grid)
    lengths = [end - want.start for want, end in zip(wanted, ends, strict=True)]
    assert sum(lengths) <= budget
    for want, end in zip(wanted, ends, strict=True):
        assert want.start <= end <= want.end
        assert end in (want.start, want.end) or end % grid == 0
    num_sharing = max(budget // min_share, 1)
    if len(wanted) == 1 and wanted[0].start % grid == 0:
        assert lengths[0] == min(budget, len(wanted[0]))
    for want, length in list(zip(wanted, lengths, strict=True))[:num_sharing]:
        assert length > 0
        if budget >= min_share and want.start % grid == 0:
            assert length >= min(min_share, len(want))
    if grid == 1 and len(wanted) > 1:
        # Less than a unit is left over, unless nobody wants it; and nobody has two units more than one that has less.
        left = budget - sum(lengths)
        hungry = [length for want, length in zip(wanted, lengths, strict=True) if length < len(want)]
        assert left < 64 or not hungry
        sharing = [
            length
            for want, length in list(zip(wanted, lengths, strict=True))[:num_sharing]
            if length < len(want)
        ]
        assert max(sharing, default=0) - min(sharing, default=0) <= 64 * 2


# Prompts and decodes.


def running_decode_and_prompt(policy: SchedulePolicy, **settings: Any) -> BatchScheduler:
    subject = scheduler(policy=policy, **settings)
    subject.add("decode", 10, 1000)
    step(subject)
    subject.add("prompt", 8000, 10)
    return subject


def test_mixed_keeps_every_decode_in_every_step() -> None:
    subject = running_decode_and_prompt(SchedulePolicy.MIXED)
    for _ in range(15):
        plan = step(subject)
        assert kinds(plan) == {"decode": SpanKind.DECODE, "prompt": SpanKind.CHUNK}
        assert plan.num_held_decodes == 0


def test_decodes_count_for_the_budget_of_a_step() -> None:
    subject = running_decode_and_prompt(SchedulePolicy.MIXED, step_tokens=256, grid=64)
    plan = step(subject)
    assert ranges(plan)["prompt"] == (0, 192)
    assert (plan.num_tokens, plan.num_chunk_tokens) == (193, 192)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (SchedulePolicy.PREFILL_FIRST, "ccdccdccdc"),
        (SchedulePolicy.INTERLEAVED, "dcdcdcdcdc"),
        (SchedulePolicy.DECODE_PRIORITY, "dddcdddcdd"),
    ],
)
def test_whose_turn_it_is(policy: SchedulePolicy, expected: str) -> None:
    subject = running_decode_and_prompt(policy, max_chunk_steps=2, max_decode_steps=3)
    plans = [step(subject) for _ in expected]
    assert "".join("c" if plan.num_chunk_tokens else "d" for plan in plans) == expected
    assert all(len(plan.spans) == 1 for plan in plans)
    assert [plan.num_held_decodes for plan in plans] == [int(letter == "c") for letter in expected]


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_nobody_waits_for_nobody(policy: SchedulePolicy) -> None:
    subject = scheduler(policy=policy)
    subject.add("a", 1024, 50)
    assert [ranges(step(subject))["a"] for _ in range(3)] == [(0, 512), (512, 1024), (1024, 1025)]
    assert len(step(subject).spans) == 1


# Space.


def small(num_blocks: int, *, keeps_prefix: bool = True, **settings: Any) -> BatchScheduler:
    return scheduler(CacheLimits(num_blocks, 64, keeps_prefix), **settings)


def crowd(*, keeps_prefix: bool) -> tuple[BatchScheduler, StepPlan]:
    """Two requests fill ten blocks, and the older one needs another."""
    subject = small(10, keeps_prefix=keeps_prefix)
    subject.add("old", 250, 200)
    subject.add("new", 250, 100)
    while True:
        plan = step(subject)
        if plan.preemptions:
            return subject, plan


def test_the_newest_gives_way_by_as_little_as_is_needed() -> None:
    subject, plan = crowd(keeps_prefix=True)
    (preemption,) = plan.preemptions
    assert preemption.request_id == "new"
    assert preemption.num_kept == 4 * 64  # of five blocks
    assert list(ranges(plan)) == ["old"]
    view = subject.view("new")
    assert (view.phase, view.num_run, view.num_preemptions) == ("waiting", 256, 1)
    assert subject.num_free_blocks == 0


def test_recurrent_state_is_given_up_as_a_whole() -> None:
    subject, plan = crowd(keeps_prefix=False)
    assert plan.preemptions[0].num_kept == 0
    assert subject.view("new").num_run == 0


@pytest.mark.parametrize("keeps_prefix", [True, False])
def test_what_was_lost_is_read_again_prompt_and_answer_apart(keeps_prefix: bool) -> None:
    subject, _ = crowd(keeps_prefix=keeps_prefix)
    num_tokens = subject.view("new").num_tokens
    start = 256 if keeps_prefix else 0
    subject.remove("old")
    if not keeps_prefix:
        plan = step(subject)
        assert ranges(plan) == {"new": (start, 250)}
        assert kinds(plan) == {"new": SpanKind.CHUNK}
        assert not plan.spans[0].samples
        start = 250
    # A part at a time: each token of it takes longer than one of a chunk.
    for part in range(start, num_tokens, REPLAY_TOKENS):
        plan = step(subject)
        end = min(part + REPLAY_TOKENS, num_tokens)
        assert ranges(plan) == {"new": (part, end)}
        assert kinds(plan) == {"new": SpanKind.REPLAY if num_tokens - part > 1 else SpanKind.DECODE}
        assert plan.spans[0].samples == (end == num_tokens)
    assert kinds(step(subject)) == {"new": SpanKind.DECODE}


def test_the_newest_that_needs_a_block_itself_waits_with_what_it_has() -> None:
    subject = small(8)
    subject.add("old", 250, 20)
    subject.add("new", 250, 100)
    plans = [step(subject)]
    while not plans[-1].preemptions:
        plans.append(step(subject))
    # Both come to 256 tokens at once. The old one takes the last block, from the new one.
    (preemption,) = plans[-1].preemptions
    assert (preemption.request_id, preemption.num_kept) == ("new", 192)
    assert list(ranges(plans[-1])) == ["old"]
    assert ranges(step(subject)) == {"old": (257, 258)}


def test_one_that_has_no_room_is_passed_only_so_often() -> None:
    subject = small(20, max_overtakes=2)
    subject.add("here", 640, 300)
    step(subject)
    subject.add("large", 1200, 10)
    for index in range(5):
        subject.add(f"small{index}", 10, 5)
    step(subject)
    waiting = [name for name in subject.request_ids if subject.view(name).phase == "waiting"]
    assert waiting == ["large", "small2", "small3", "small4"]
    subject.remove("here")
    subject.remove("small0")
    subject.remove("small1")
    assert "large" in ranges(step(subject))


def test_paused_requests_that_fill_the_cache_block_nobody() -> None:
    subject = small(12)
    subject.add("a", 300, 400)
    subject.add("b", 300, 400)
    while not step(subject).preemptions:
        pass
    subject.add("c", 700, 10)
    subject.remove("a")
    assert "b" in ranges(step(subject))
    while subject.view("b").num_tokens != 690:
        step(subject)
    subject.remove("b")
    assert ranges(step(subject)) == {"c": (0, 512)}


def test_what_can_never_run_is_refused_and_what_just_fits_runs_to_its_end() -> None:
    subject = small(10)
    with pytest.raises(CacheFullError, match=r"600 prompt tokens and 42 of answer need 11 blocks .* has 10"):
        subject.add("a", 600, 42)
    subject.add("a", 600, 41)
    while subject.view("a").num_tokens < 640:
        step(subject)
    assert ranges(step(subject, ["a"])) == {"a": (639, 640)}


def test_the_line_has_an_end() -> None:
    subject = scheduler(max_running=1, max_waiting=2)
    subject.add("a", 10, 10)
    subject.add("b", 10, 10)
    subject.add("c", 10, 10)  # no step has admitted the first yet, but it has a place
    with pytest.raises(QueueFullError, match=r"0 requests run and 3 wait, and 3 may be here"):
        subject.add("d", 10, 10)
    step(subject)
    with pytest.raises(QueueFullError, match=r"1 requests run and 2 wait, and 3 may be here"):
        subject.add("d", 10, 10)
    assert (subject.num_running, subject.num_waiting) == (1, 2)
    assert subject.request_ids == ("a", "b", "c")


# Steps that fail.


def test_memory_that_ran_out_halves_the_chunks_for_64_steps() -> None:
    subject = scheduler()
    subject.add("a", 100_000, 1)
    plan = subject.schedule()
    assert plan is not None
    assert subject.shrink(plan)
    lengths = [step(subject).num_tokens for _ in range(65)]
    assert lengths == [256] * 64 + [512]


@pytest.mark.parametrize(("grid", "expected"), [(1, [256, 128, 64, 32, 16]), (64, [256, 128, 64, 32, 16])])
def test_it_may_run_out_again_down_to_one_token(grid: int, expected: list[int]) -> None:
    subject = scheduler(grid=grid)
    subject.add("a", 100_000, 1)
    seen = []
    while (plan := subject.schedule()) and subject.shrink(plan):
        plan = subject.schedule()
        assert plan is not None
        seen.append(plan.num_tokens)
        subject.abort(plan)
    assert seen == [*expected, 8, 4, 2, 1]
    subject.check_integrity()


def test_half_of_a_chunk_lies_on_the_grid_where_it_can() -> None:
    subject = scheduler(chunk_size=448, grid=64)
    subject.add("a", 10_000, 1)
    plan = subject.schedule()
    assert plan is not None
    subject.shrink(plan)
    assert ranges(step(subject)) == {"a": (0, 256)}


def test_a_whole_prompt_may_be_halved_too() -> None:
    subject = scheduler(chunk_size=0)
    subject.add("a", 5000, 1)
    subject.add("b", 5000, 1)
    plan = subject.schedule()
    assert plan is not None
    assert subject.shrink(plan)
    assert ranges(step(subject)) == {"a": (0, 2500)}


def test_decodes_cannot_be_halved() -> None:
    subject = scheduler()
    subject.add("a", 10, 10)
    step(subject)
    plan = subject.schedule()
    assert plan is not None
    assert not subject.shrink(plan)
    assert subject.schedule() == plan


def test_one_request_alone() -> None:
    subject = running_decode_and_prompt(SchedulePolicy.MIXED)
    subject.add("waits", 100, 1)
    plan = subject.schedule()
    assert plan is not None
    subject.abort(plan)
    for name in ("decode", "prompt"):
        alone = subject.schedule(only=name)
        assert alone is not None
        assert list(ranges(alone)) == [name]
        assert alone.num_held_decodes == (name == "prompt")
        subject.commit(alone)
        subject.check_integrity()
    with pytest.raises(KeyError):
        subject.schedule(only="nobody")


def test_one_that_does_not_run_has_no_step_of_its_own() -> None:
    subject = scheduler()
    subject.add("a", 10, 10)
    assert subject.schedule(only="a") is None


# Misuse.


def test_steps_come_in_turn() -> None:
    subject = scheduler()
    subject.add("a", 2000, 10)
    plan, later = subject.schedule(), subject.schedule()
    assert plan is not None
    assert later is not None
    with pytest.raises(StepOrderError, match="before those that were issued before it"):
        subject.commit(later)
    with pytest.raises(StepOrderError, match="alone"):
        subject.schedule(only="a")
    with pytest.raises(StepOrderError, match="cannot be committed"):
        subject.commit(StepPlan(plan.spans))
    with pytest.raises(StepOrderError, match="cannot be aborted"):
        subject.abort(StepPlan(plan.spans))
    with pytest.raises(StepOrderError, match="'a' is in an issued step"):
        subject.remove("a")
    with pytest.raises(StepOrderError, match="'a' is in an issued step"):
        subject.advance("a", 600)
    with pytest.raises(StepOrderError, match="'b' cannot finish"):
        subject.commit(plan, ["b"])
    with pytest.raises(StepOrderError, match="a later step has spans"):
        subject.commit(plan, ["a"])
    subject.commit(plan)
    subject.commit(later)
    for late in (subject.commit, subject.abort, subject.shrink):
        with pytest.raises(StepOrderError, match="not in flight"):
            late(plan)


def test_a_prompt_is_read_ahead_of_the_steps_in_flight() -> None:
    """It is planned on from where its issued spans end, until one samples; an abort takes all after it along."""
    subject = scheduler()
    subject.add("a", 1200, 3)
    plans = [subject.schedule() for _ in range(4)]
    assert plans[3] is None  # its next token is sampled by a step in flight
    issued = [plan for plan in plans if plan is not None]
    assert [ranges(plan)["a"] for plan in issued] == [(0, 512), (512, 1024), (1024, 1200)]
    assert subject.view("a").num_run == 0
    subject.commit(issued[0])
    subject.abort(issued[1])
    assert (subject.view("a").num_run, subject.num_free_blocks) == (512, AMPLE.num_blocks - 8)
    assert ranges(step(subject))["a"] == (512, 1024)


def test_room_that_is_lacking_is_waited_for_while_steps_are_in_flight() -> None:
    """No request in flight is preempted: the steps end first."""
    subject = small(4, chunk_size=64)
    subject.add("a", 128, 60)
    subject.add("b", 64, 60)
    for _ in range(3):
        step(subject)
    first = subject.schedule()
    assert first is not None
    while (following := subject.schedule()) is not None:
        assert not following.preemptions
    subject.check_integrity()


def test_a_chunk_overlaps_the_one_before() -> None:
    subject = scheduler(max_running=1, chunk_size=64, overlap=16)
    subject.add("a", 150, 2)
    plans = [step(subject) for _ in range(3)]
    assert [ranges(plan)["a"] for plan in plans] == [(0, 64), (48, 112), (96, 150)]
    assert [plan.spans[0].resumes_at for plan in plans] == [48, 96, None]
    subject.add("b", 150, 1)
    assert subject.schedule() is not None


def test_an_answer_has_an_end() -> None:
    subject = scheduler()
    subject.add("a", 10, 1)
    plan = subject.schedule()
    assert plan is not None
    with pytest.raises(StepOrderError, match="name it as finished"):
        subject.commit(plan)
    subject.commit(plan, ["a"])


def test_requests_are_told_apart() -> None:
    subject = scheduler()
    subject.add("a", 10, 1)
    with pytest.raises(ValueError, match="'a' is here already"):
        subject.add("a", 10, 1)
    for unknown in (subject.remove, subject.view):
        with pytest.raises(KeyError):
            unknown("b")


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(0, 1), (1, 0), (-1, 1), (1.0, 1), (1, True)])
def test_counts_must_be_counts(num_prompt: Any, max_tokens: Any) -> None:
    with pytest.raises(SettingError, match="is not accepted"):
        scheduler().add("a", num_prompt, max_tokens)


@pytest.mark.parametrize("bad", [{"num_blocks": 0}, {"block_tokens": 0}, {"keeps_prefix": 1}])
def test_limits_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="is not accepted"):
        CacheLimits(**{"num_blocks": 1, "block_tokens": 64, "keeps_prefix": True, **bad})


# Whatever is done, in whatever order.


class AnyOrder(RuleBasedStateMachine):
    subject: BatchScheduler
    num_added = 0

    def __init__(self) -> None:
        super().__init__()
        self.flight: list[StepPlan] = []

    @initialize(
        policy=st.sampled_from(SchedulePolicy),
        chunk_units=st.integers(0, 4),
        block_tokens=st.sampled_from([4, 16, 64]),
        num_blocks=st.integers(1, 30),
        keeps_prefix=st.booleans(),
        grid=st.sampled_from([1, 16, 64]),
        max_running=st.integers(1, 5),
        max_overtakes=st.integers(0, 2),
        max_running_per_key=st.sampled_from([None, 1, 2]),
    )
    def begin(self, chunk_units: int, grid: int, **given: Any) -> None:
        limits = CacheLimits(given.pop("num_blocks"), given.pop("block_tokens"), given.pop("keeps_prefix"))
        self.subject = scheduler(limits, chunk_size=64 * chunk_units, grid=grid, max_waiting=5, **given)

    @rule(
        num_prompt=st.integers(1, 200), max_tokens=st.integers(1, 60), owner=st.sampled_from(["", "k", "l"])
    )
    def add(self, num_prompt: int, max_tokens: int, owner: str) -> None:
        before = self.subject.request_ids
        name = f"r{self.num_added}"
        try:
            self.subject.add(name, num_prompt, max_tokens, owner)
        except (QueueFullError, CacheFullError):
            assert self.subject.request_ids == before
        else:
            self.num_added += 1
            assert self.subject.request_ids == (*before, name)

    @precondition(lambda self: len(self.flight) < 4)
    @rule()
    def schedule(self) -> None:
        plan = self.subject.schedule()
        assert plan is not None or self.flight or not self.subject.request_ids
        if plan is not None:
            assert not (plan.preemptions and self.flight)
            self.flight.append(plan)

    @precondition(lambda self: not self.flight and self.subject.request_ids)
    @rule(data=st.data())
    def schedule_one(self, data: st.DataObject) -> None:
        plan = self.subject.schedule(only=data.draw(st.sampled_from(self.subject.request_ids)))
        if plan is not None:
            self.flight.append(plan)

    @precondition(lambda self: self.flight)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        plan = self.flight.pop(0)
        ending = []
        for planned in plan.spans:
            view = self.subject.view(planned.request_id)
            limit = self.subject._requests[planned.request_id].most_run
            if planned.samples and (view.num_tokens == limit or data.draw(st.integers(0, 9)) == 0):
                ending.append(planned.request_id)
        self.subject.commit(plan, ending)
        assert not set(ending) & set(self.subject.request_ids)

    @precondition(lambda self: self.flight)
    @rule(for_memory=st.booleans(), data=st.data())
    def fail(self, for_memory: bool, data: st.DataObject) -> None:
        stood = [(name, self.subject.view(name)) for name in self.subject.request_ids]
        index = data.draw(st.integers(0, len(self.flight) - 1))
        (self.subject.shrink if for_memory else self.subject.abort)(self.flight[index])
        assert [(name, self.subject.view(name)) for name in self.subject.request_ids] == stood
        del self.flight[index:]

    @precondition(lambda self: self.subject.request_ids)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.subject.request_ids))
        if any(name in ranges(plan) for plan in self.flight):
            with pytest.raises(StepOrderError):
                self.subject.remove(name)
        else:
            self.subject.remove(name)

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "subject"):
            self.subject.check_integrity()

    def teardown(self) -> None:
        """All that is left comes to its end."""
        if not hasattr(self, "subject"):
            return
        if self.flight:
            self.subject.abort(self.flight[0])
        for _ in range(20_000):
            if (plan := self.subject.schedule()) is None:
                break
            ending = [
                planned.request_id
                for planned in plan.spans
                if planned.samples and planned.span.end == self.subject._requests[planned.request_id].most_run
            ]
            self.subject.commit(plan, ending)
        assert self.subject.request_ids == ()
        assert self.subject.num_free_blocks == self.subject.limits.num_blocks


AnyOrder.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.sampled_from([1, 64]))
def test_the_spans_of_a_request_follow_on_each_other(prompts: list[int], grid: int) -> None:
    subject = scheduler(grid=grid, chunk_size=128)
    for index, num_prompt in enumerate(prompts):
        subject.add(f"r{index}", num_prompt, 1)
    seen: dict[str, list[tuple[int, int]]] = {}
    while plan := subject.schedule():
        for name, span in ranges(plan).items():
            seen.setdefault(name, []).append(span)
        subject.commit(plan, [planned.request_id for planned in plan.spans if planned.samples])
    for index, num_prompt in enumerate(prompts):
        spans = seen[f"r{index}"]
        assert spans[0][0] == 0
        assert spans[-1][1] == num_prompt
        assert all(before[1] == after[0] for before, after in pairwise(spans))


def test_a_prompt_that_is_in_the_cache_already_goes_on_from_there() -> None:
    subject = scheduler()
    subject.add("a", 300, 2)
    subject.add("b", 1, 1)
    for num_run in (-1, 300, 301):
        with pytest.raises(ValueError, match="accepted is 0 to 299"):
            subject.advance("a", num_run)
    subject.advance("a", 130)
    assert (subject.view("a").num_run, subject.num_free_blocks) == (130, AMPLE.num_blocks - 3)
    with pytest.raises(ValueError, match="accepted is 130 to 299"):
        subject.advance("a", 129)
    subject.advance("a", 130)
    subject.advance("b", 0)
    subject.advance("a", 299)
    assert ranges(step(subject, ["b"])) == {"a": (299, 300), "b": (0, 1)}


def test_held_prompts_sit_a_step_out() -> None:
    subject = scheduler()
    subject.add("a", 300, 2)
    subject.add("b", 300, 2)
    assert subject.schedule(held=()) is None  # nobody was admitted
    subject.admit()
    assert subject.schedule(held={"a", "b"}) is None
    plan = subject.schedule(held={"a"})
    assert plan is not None
    assert ranges(plan) == {"b": (0, 300)}
    subject.commit(plan)
    plan = subject.schedule(held={"b"})  # whose decode is no prompt
    assert plan is not None
    assert ranges(plan) == {"a": (0, 300), "b": (300, 301)}


def test_alone_a_request_has_all_blocks_that_there_are() -> None:
    """To the prompt's end, on the grid or not; else back to the grid."""
    for num_blocks, end in ((5, 80), (6, 80)):
        subject = scheduler(CacheLimits(num_blocks, 16, True), chunk_size=128, grid=64)
        subject.add("a", 80, 1)
        subject.admit()
        plan = subject.schedule(only="a")
        assert plan is not None
        assert ranges(plan) == {"a": (0, end)}


class SharedBlocks:
    """Ten blocks, of which each request that waits would share three; what is given up is counted by its blocks."""

    def __init__(self) -> None:
        self.asked: list[dict[str, int]] = []

    def num_free(self, kept: Mapping[str, int]) -> int:
        self.asked.append(dict(kept))
        return 4

    def num_writable(self, kept: Mapping[str, int]) -> int:
        return self.num_free(kept)

    def num_shared(self, request_id: str) -> int:
        return 3


def test_blocks_that_are_shared_take_no_room() -> None:
    ledger = SharedBlocks()
    subject = BatchScheduler(ScheduleConfig(), CacheLimits(10, 64, True), ledger=ledger)
    subject.add("a", 100, 1)  # 2 blocks of the 4
    subject.add("b", 64 * 5, 1)  # 5 blocks, 3 of them shared
    subject.add("c", 64 * 4, 1)  # which would need one more
    subject.admit()
    assert [subject.view(name).phase for name in "abc"] == ["prompt", "prompt", "waiting"]
    assert subject.num_free_blocks == 4
    assert set(map(str, ledger.asked)) == {"{}"}


def test_after_a_restart_every_request_reads_its_known_tokens_again() -> None:
    subject = scheduler(chunk_size=64)
    subject.add("a", 100, 50)
    subject.add("b", 40, 50)
    step(subject)
    plan = subject.schedule()
    assert plan is not None
    with pytest.raises(StepOrderError, match="in flight"):
        subject.restart()
    subject.abort(plan)
    for _ in range(4):
        step(subject)
    known = {name: subject.view(name).num_run for name in "ab"}
    subject.restart()
    subject.check_integrity()
    assert [subject.view(name).num_run for name in "ab"] == [0, 0]
    read = dict.fromkeys("ab", 0)
    while any(read[name] < known[name] for name in "ab"):
        for name, (start, end) in ranges(step(subject)).items():
            assert start == read[name]
            read[name] = end
