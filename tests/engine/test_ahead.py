"""Decodes that are launched before they are planned: used where they are what comes, and forgotten where not."""

import gc
import random
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.cache import BLOCK_TOKENS, SequenceCache
from penstock.cache.space import CacheSpace
from penstock.cache.tensors import CacheTensors
from penstock.engine.batcher import Batcher
from penstock.engine.job import Job
from penstock.engine.sampling import Choice
from penstock.engine.status import StepRecord
from penstock.engine.step import SpanInput, Step, StepOutcome, build_batch, expect
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder
from penstock.plan.grids import RowLaw
from penstock.plan.policy import ScheduleConfig
from penstock.plan.sizing import shape_of_spans
from penstock.plan.step import Span, SpanKind
from tests.cache.storing import open_store
from tests.engine.batching import Sharing, Wish, new_batcher, new_job, serve, serve_with
from tests.oracle import load_model, make_oracle, random_prompt, run_prompt

WISHES = [Wish(tuple(random_prompt(66 + index, seed=index)), 40) for index in range(3)]
SCHEDULE = ScheduleConfig(chunk_size=128, max_running=4)


@pytest.fixture
def model() -> Decoder:
    return load_model(make_oracle("llama").folder)


def num_passes(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of rows of each pass."""
    passes: list[int] = []
    forward = type(model).forward

    def counted(self: Decoder, batch: ForwardBatch, caches: CacheTensors) -> object:
        passes.append(batch.num_tokens)
        return forward(self, batch, caches)

    monkeypatch.setattr(type(model), "forward", counted)
    return passes


def test_no_pass_is_run_twice(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = num_passes(model, monkeypatch)
    plain = serve(model, WISHES, SCHEDULE)
    without = list(passes)
    passes.clear()
    ahead = serve(model, WISHES, SCHEDULE, looks_ahead=True)
    assert [job.generated for job in ahead] == [job.generated for job in plain]
    assert passes == without


def test_it_is_launched_before_the_step_is_settled(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = num_passes(model, monkeypatch)
    batcher = new_batcher(model, SCHEDULE, 1024, strict=False, looks_ahead=True)
    batcher.add(new_job(batcher, "one", WISHES[0]))
    counts = []
    settle = batcher.settle

    def counted(step: Step, outcome: StepOutcome) -> StepRecord | None:
        counts.append(len(passes))
        return settle(step, outcome)

    monkeypatch.setattr(batcher, "settle", counted)
    for _ in range(4):
        batcher.step()
    # The chunk gives the first token; from the first decode on there is one more under way.
    assert counts == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("max_running", "cache_tokens", "counts"),
    [
        (1, 1024, [1, 3, 4, 5, 6]),  # all places are taken: the next step is of those that decode
        (2, 128, [1, 2, 3, 4, 5]),  # one is free, and may be given to the one that waits for blocks
    ],
)
def test_with_others_waiting_it_is_launched_where_none_can_come_in(
    model: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    max_running: int,
    cache_tokens: int,
    counts: list[int],
) -> None:
    schedule = replace(SCHEDULE, max_running=max_running)
    plain = serve(model, WISHES[:2], schedule, cache_tokens=cache_tokens)
    batcher = new_batcher(model, schedule, cache_tokens, strict=False, looks_ahead=True)
    jobs = [new_job(batcher, str(index), wish) for index, wish in enumerate(WISHES[:2])]
    for job in jobs:
        batcher.add(job)
    passes, found = num_passes(model, monkeypatch), []
    while batcher.has_work:
        num_waiting = batcher.status().num_waiting
        batcher.step()
        found += [len(passes)] * (num_waiting > 0)
    assert found[:5] == counts
    assert [job.generated for job in jobs] == [job.generated for job in plain]


def test_alone_every_pass_is_run_once(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_prompt(model, list(WISHES[0].prompt), num_tokens=40, max_tokens=40)
    passes = num_passes(model, monkeypatch)
    monkeypatch.setattr(model.kernels, "can_capture", True)
    ahead = run_prompt(model, list(WISHES[0].prompt), num_tokens=40, max_tokens=40)
    assert ahead.generated == plain.generated
    assert passes == [len(WISHES[0].prompt), *[1] * 39]


def test_a_pass_that_nobody_wants_is_forgotten(model: Decoder) -> None:
    """One is cancelled, and another comes, after the next step was launched."""
    wishes = [
        Wish(WISHES[0].prompt, 30),
        Wish(WISHES[1].prompt, 30, cancelled=9),
        Wish(WISHES[2].prompt, 12, arrives=14),
        Wish(WISHES[0].prompt[:20], 3, arrives=20),
    ]
    ours = serve(model, wishes, SCHEDULE, looks_ahead=True)
    theirs = serve(model, wishes, SCHEDULE)
    assert [job.generated for job in ours] == [job.generated for job in theirs]


def test_it_is_made_ready_while_the_step_before_is_computed(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the tokens are there, nothing is built any more."""
    said: list[str] = []

    def telling(name: str, told: str) -> None:
        work = getattr(type(model), name)

        def listening(self: Decoder, batch: ForwardBatch, caches: CacheTensors) -> object:
            said.append(told)
            return work(self, batch, caches)

        monkeypatch.setattr(type(model), name, listening)

    telling("prepare", "made ready")
    telling("forward", "launched")
    choose = Job.choose

    def chosen(self: Job, logits: Tensor) -> Choice:
        said.append("chosen")
        return choose(self, logits)

    monkeypatch.setattr(Job, "choose", chosen)
    monkeypatch.setattr(Job, "needs_logits", True)
    batcher = new_batcher(model, SCHEDULE, 1024, strict=False, looks_ahead=True)
    batcher.add(new_job(batcher, "one", WISHES[0]))
    for _ in range(3):
        assert batcher.step() is not None
    assert said == [
        *("launched", "chosen"),  # the chunk
        *("launched", "made ready", "chosen", "launched"),
        *("made ready", "chosen", "launched"),
    ]


def test_what_is_expected_and_never_comes_keeps_no_cache(model: Decoder) -> None:
    batcher = new_batcher(model, SCHEDULE, 1024, strict=False, looks_ahead=True)
    tensors = weakref.ref(batcher.space.tensors)
    batcher.add(new_job(batcher, "one", WISHES[0]))
    for _ in range(3):
        assert batcher.step() is not None
    expected = batcher._runner._lookahead._expected
    inputs = batcher._runner._lookahead._inputs  # of what was launched ahead, which the step has gone on with
    assert expected is None
    assert inputs
    batch = build_batch(inputs, canon=RowLaw(512))
    model.prepare(batch, batcher.space.tensors)
    del batcher, inputs
    gc.collect()
    assert tensors() is None
    assert batch.num_tokens == 1


@pytest.mark.parametrize("num_tokens", [63, 64, 65])
def test_a_sequence_without_room_is_not_expected(model: Decoder, num_tokens: int) -> None:
    """The step that sets room aside for it comes first."""
    space = CacheSpace.for_tokens(model, 1024)
    cache = space.new_sequence()
    cache.reserve(0, [num_tokens])
    span = SpanInput(
        Span(num_tokens - 1, num_tokens), (5,), cache.kv_groups, is_prompt=False, wants_logits=True
    )
    found = expect([span], lambda inputs: build_batch(inputs, canon=RowLaw(512)))
    assert (found is None) == (num_tokens == 64)
    chunk = replace(span, is_prompt=True)
    assert expect([span, chunk], lambda inputs: build_batch(inputs, canon=RowLaw(512))) is None


def test_it_is_taken_only_by_who_it_was_launched_for(model: Decoder) -> None:
    """The same tokens, at the same positions of the same sequences, where they lay by then."""
    space = CacheSpace.for_tokens(model, 1024)
    cache, other = space.new_sequence(), space.new_sequence()
    for each in (cache, other):
        each.reserve(0, [10])
        each.commit(10)
    step = SpanInput(Span(8, 9), (5,), cache.kv_groups, is_prompt=False, wants_logits=True)
    expected = expect([step], lambda inputs: build_batch(inputs, canon=RowLaw(512)))
    assert expected is not None
    ahead = expected.launch([7], lambda batch, overlap: torch.zeros(1, 300))
    assert ahead is not None
    own = replace(step, span=Span(9, 10), token_ids=[7])
    assert ahead.is_of([own])
    for different in (
        [],
        [own, own],
        [replace(own, token_ids=[8])],
        [replace(own, span=Span(10, 11))],
        [replace(own, kv_groups=other.kv_groups)],
        [replace(own, is_prompt=True)],
    ):
        assert not ahead.is_of(different)
    cache.free()
    space.new_sequence().reserve(0, [10])
    cache.reserve(0, [10])
    assert not ahead.is_of([own])


def test_a_run_that_is_dropped_is_gone_at_once(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache is free for the next one, and does not wait for garbage to be collected."""
    monkeypatch.setattr(model.kernels, "can_capture", True)
    gc.collect()
    gc.disable()
    try:
        run = run_prompt(model, list(WISHES[0].prompt), num_tokens=3, max_tokens=40)
        dropped = weakref.ref(run)
        del run
        assert dropped() is None
    finally:
        gc.enable()


def steps_of(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> list[StepRecord]:
    """Grows by each step that was settled."""
    records: list[StepRecord] = []
    settle = batcher.settle

    def noted(step: Step, outcome: StepOutcome) -> StepRecord | None:
        record = settle(step, outcome)
        if record is not None:
            records.append(record)
        return record

    monkeypatch.setattr(batcher, "settle", noted)
    return records


def is_beginning(one: list[int], other: list[int]) -> bool:
    return one[: len(other)] == other[: len(one)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("seed", range(6))
def test_decodes_that_go_on_leave_what_single_steps_do(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes, ends, is cancelled or preempted meanwhile, and where steps fail or the cache is lost."""
    chance = random.Random(seed)
    model = load_model(make_oracle(family).folder)
    wishes = [
        Wish(
            tuple(random_prompt(chance.randint(1, 140), seed=100 * seed + index)),
            chance.randint(1, 150),
            arrives=chance.choice([0, 0, 0, 40, 90]),
            cancelled=chance.randint(20, 160) if chance.random() < 0.3 else None,
        )
        for index in range(5)
    ]
    disturbed = {"fails": chance.sample(range(170), 3), "rewinds": chance.sample(range(170), 2)}
    schedule = replace(SCHEDULE, max_running=chance.choice([2, 4, 8]))
    cache_tokens = chance.choice([384, 1024, 4096])
    plain = serve(model, wishes, schedule, cache_tokens=cache_tokens, strict=True)
    batcher = new_batcher(model, schedule, cache_tokens, strict=True, looks_ahead=True)
    records = steps_of(batcher, monkeypatch)
    ours = serve_with(batcher, wishes, **disturbed)
    for job, other, wish in zip(ours, plain, wishes, strict=True):
        # A step that is undone makes one that is cancelled end some tokens sooner.
        same = is_beginning if wish.cancelled else list.__eq__
        assert same(job.generated, other.generated)
        assert job.outcome == other.outcome or wish.cancelled
    assert sum(record.is_repeated for record in records) > len(records) // 4
    # What is told of a step is what it ran, as if it had been planned.
    reach: dict[str, int] = {}
    for record in records:
        for span in record.spans:
            assert span.start <= reach.get(span.request_id, 0)  # it goes on, or reads again what it lost
            reach[span.request_id] = span.end
        of_spans = shape_of_spans((span.kind, span.start, span.end) for span in list(record.spans))
        assert record.shape == of_spans
        assert record.num_decodes == sum(span.kind is SpanKind.DECODE for span in list(record.spans))


def test_nothing_is_planned_or_reserved_for_decodes_that_go_on(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a block, where one begins; and the books are right whenever somebody looks."""
    batcher = new_batcher(model, SCHEDULE, 1024, strict=False, looks_ahead=True)
    jobs = [new_job(batcher, str(index), wish) for index, wish in enumerate(WISHES)]
    for job in jobs:
        batcher.add(job)
    while not all(job.num_generated for job in jobs):
        batcher.step()
    batcher.step()
    said: list[str] = []

    def telling(owner: object, name: str) -> None:
        work = getattr(owner, name)

        def listening(*given: Any, **named: Any) -> Any:
            said.append(name)
            return work(*given, **named)

        monkeypatch.setattr(owner, name, listening)

    telling(batcher._scheduler, "schedule")
    telling(SequenceCache, "reserve")
    for _ in range(20):
        record = batcher.step()
        assert record is not None
        assert record.is_repeated
        batcher.check_integrity()
        status = batcher.status()
        assert [each.num_generated for each in status.requests] == [job.num_generated for job in jobs]
        assert {each.phase for each in status.requests} == {"decode"}
        (running,) = status.in_flight
        assert [span.end for span in running.spans] == [len(job.tokens) for job in jobs]
    assert not said
    # Somebody comes: what was launched is used, then all is planned.
    batcher.add(new_job(batcher, "late", WISHES[0]))
    assert batcher.step() is not None
    assert not said
    record = batcher.step()
    assert record is not None
    assert said == ["schedule", *4 * ["reserve"]]
    assert record.num_chunk_tokens == len(WISHES[0].prompt)
    assert [job.cache.num_tokens for job in jobs] == [len(job.tokens) - 1 for job in jobs]


@pytest.mark.parametrize("num_prompt", [30, 62, 63, 64, 65])
def test_where_a_block_begins_decodes_go_on(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, num_prompt: int
) -> None:
    """Each sequence has room for a token more by then: none waits for a step that makes some."""
    wishes = [Wish(tuple(random_prompt(length, seed=length)), 140) for length in (num_prompt, num_prompt + 7)]
    batcher = new_batcher(model, replace(SCHEDULE, max_running=2), 1024, strict=False, looks_ahead=True)
    records = steps_of(batcher, monkeypatch)
    serve_with(batcher, wishes)
    both = [record for record in records if record.num_decodes == 2]
    assert len(both) > 130
    assert [record.is_repeated for record in both] == [False] + [True] * (len(both) - 1)


def test_a_pass_that_fails_undoes_none_before_it(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is begun anew, and only if it fails again it is somebody's fault."""
    batcher = new_batcher(model, SCHEDULE, 1024, strict=False, looks_ahead=True)
    jobs = [new_job(batcher, str(index), wish) for index, wish in enumerate(WISHES[:2])]
    plain = serve(model, WISHES[:2], SCHEDULE)
    for job in jobs:
        batcher.add(job)
    while jobs[1].num_generated < 9:
        batcher.step()
    finish = batcher._runner.finish
    failed: list[int] = []

    def fails_once(step: Step, *given: Any) -> StepOutcome:
        if failed:
            return finish(step, *given)
        failed.append(step.num_before)
        return StepOutcome(error=RuntimeError("as the test wants it"))

    monkeypatch.setattr(batcher._runner, "finish", fails_once)
    before = [len(job.tokens) for job in jobs]
    assert batcher.step() is None
    assert failed[0] > 0
    assert [len(job.tokens) for job in jobs] == before
    assert not batcher.num_in_flight
    batcher.check_integrity()
    while batcher.has_work:
        batcher.step()
    assert [job.generated for job in jobs] == [job.generated for job in plain]


def test_where_no_block_is_left_a_step_does_not_go_on(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after it preempts the newest."""
    wishes = [Wish(tuple(random_prompt(60, seed=index)), 80) for index in range(2)]
    plain = serve(model, wishes, SCHEDULE)
    batcher = new_batcher(model, SCHEDULE, 4 * BLOCK_TOKENS, strict=False, looks_ahead=True)
    records = steps_of(batcher, monkeypatch)
    jobs = serve_with(batcher, wishes)
    assert [job.generated for job in jobs] == [job.generated for job in plain]
    assert sum(job.num_preemptions for job in jobs) > 0
    assert any(record.is_repeated for record in records)


def test_where_blocks_are_found_by_others_they_are_when_a_step_ends(model: Decoder) -> None:
    """What decodes of one step after the other filled is told, and told rightly."""
    prompt = WISHES[0].prompt
    batcher = new_batcher(model, SCHEDULE, 4096, strict=False, looks_ahead=True, sharing=Sharing())
    (first,) = serve_with(batcher, [Wish(prompt, 150)])
    again = Wish((*prompt, *first.generated[:130]), 20)
    (second,) = serve_with(batcher, [again])
    assert second.num_cached == (len(again.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.generated == first.generated[130:150]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
@settings(max_examples=12)
@given(
    first=st.sampled_from([40, 60, 64, 65]),
    second=st.sampled_from([60, 64, 120]),
    arrives=st.integers(18, 70),
    num_blocks=st.sampled_from([3, 4]),
    chunk=st.sampled_from([64, 128]),
)
def test_a_full_cache_is_shared_as_it_is_without(
    family: str, first: int, second: int, arrives: int, num_blocks: int, chunk: int
) -> None:
    """Room ahead is what the others leave: it takes no block that a step has for another, and nobody is preempted
    for it."""
    found, schedule = load_model(make_oracle(family).folder), ScheduleConfig(chunk_size=chunk, max_running=4)
    wishes = [
        Wish(tuple(random_prompt(first, seed=1)), 193 - max(first, 64)),
        Wish(tuple(random_prompt(second, seed=2)), 4),
    ]
    left = []
    for looks_ahead in (False, True):
        batcher = new_batcher(
            found, schedule, num_blocks * BLOCK_TOKENS, strict=True, looks_ahead=looks_ahead
        )
        jobs = [new_job(batcher, str(index), wish) for index, wish in enumerate(wishes)]
        batcher.add(jobs[0])
        num_steps, has_come = 0, False
        while batcher.has_work or not has_come:
            if not has_come and jobs[0].num_generated >= arrives:
                batcher.add(jobs[1])
                has_come = True
            batcher.step()
            num_steps += 1
            assert num_steps < 600, "requests do not go on"
        batcher.check_integrity()
        left.append([(job.generated, job.num_preemptions) for job in jobs])
    # The second one may be preempted where it arrives a step sooner or later; the oldest is not.
    assert [tokens for tokens, _ in left[0]] == [tokens for tokens, _ in left[1]]
    assert left[0][0] == left[1][0]


def test_windows_that_are_kept_for_others_are_not_given_up_for_room_ahead() -> None:
    model = load_model(make_oracle("gemma3_text").folder)
    schedule = ScheduleConfig(chunk_size=128, max_running=2)
    prompts = [Wish(tuple(random_prompt(130, seed=50 + index)), 1) for index in range(5)]
    batcher = new_batcher(model, schedule, 8192, strict=False, looks_ahead=True, sharing=Sharing())
    serve_with(batcher, prompts)
    serve_with(batcher, [Wish(tuple(random_prompt(66, seed=9)), 1500)])
    assert [job.num_cached for job in serve_with(batcher, prompts)] == [128] * len(prompts)


def test_a_disk_is_offered_again_what_it_had_no_room_for(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While decodes go on, too: blocks of a prompt of which it takes one in the time of a step."""
    with closing(open_store(tmp_path, model.cache_spec)) as store:
        schedule = ScheduleConfig(chunk_size=1280, max_running=2)
        batcher = new_batcher(model, schedule, 8192, strict=False, looks_ahead=True, sharing=Sharing(store))
        assert batcher.reuse is not None
        batcher.reuse.piece_blocks = 1
        num_left, has_room = [0], store.has_room

        def has_little_room(num_bytes: int) -> bool:
            num_left[0] -= 1
            return num_left[0] >= 0 and has_room(num_bytes)

        monkeypatch.setattr(store, "has_room", has_little_room)
        job = new_job(batcher, "one", Wish(tuple(random_prompt(1280, seed=1)), 100))
        batcher.add(job)
        while batcher.has_work:
            num_left[0] = 1
            batcher.step()
        assert store.stats().num_dropped == 0
