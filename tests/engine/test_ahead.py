"""Decodes that are launched before they are planned: used where they are what comes, and forgotten where not."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.cache.space import CacheSpace
from penstock.cache.tensors import CacheTensors
from penstock.engine.job import Job
from penstock.engine.sampling import Choice
from penstock.engine.status import StepRecord
from penstock.engine.step import SpanInput, Step, StepOutcome, build_batch, expect
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder
from penstock.plan.grids import RowLaw
from penstock.plan.policy import ScheduleConfig
from penstock.plan.step import Span
from tests.engine.batching import Wish, new_batcher, new_job, serve
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
    ahead = batcher._runner._lookahead._ahead
    assert expected is None
    assert ahead is not None
    batch = build_batch(ahead.inputs, canon=RowLaw(512))
    model.prepare(batch, batcher.space.tensors)
    del batcher, ahead
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
    ahead = expected.launch([7], lambda batch: torch.zeros(1, 300))
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
