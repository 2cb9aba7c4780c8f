"""Steps in flight change nothing: not the bits, not what a failed step leaves, not how soon a cancel takes effect."""

from typing import Any

import pytest
import torch

from penstock.engine.run import Run
from penstock.engine.step import Step
from penstock.kernels.device import DeviceKind
from penstock.models.decoder import Decoder
from penstock.plan import STATE_GRID, ChunkedPrefillConfig, ScheduleConfig
from penstock.plan.step import SpanKind
from tests.engine.batching import Sharing, Wish, new_batcher, new_job
from tests.engine.hybrids import assert_all_equal, assert_all_free, keys_and_values_of, states_of
from tests.engine.test_batched_alone import NAMES, model_of
from tests.oracle import canon_of, random_prompt

PROMPT = random_prompt(450)


def start(model: Decoder, depth: int, **settings: Any) -> Run:
    config = ChunkedPrefillConfig(settings.pop("chunk", 64), settings.pop("overlap", 0))
    return Run(model, PROMPT, config=config, canon=canon_of(model), max_tokens=6, depth=depth, **settings)


def contents(run: Run) -> list[torch.Tensor]:
    assert run.logits is not None
    held = keys_and_values_of(run.space, run.cache, run.cache.num_tokens)
    return [run.logits, *held, *(states_of(run.space, run.cache) if run.cache.state else [])]


def finish(run: Run) -> list[torch.Tensor]:
    while len(run.generated) < 4:
        run.step()
    return contents(run)


@pytest.mark.parametrize("depth", [2, 3, 5])
@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_one_step_at_a_time(name: str, chunk: int, depth: int) -> None:
    model = model_of(name, torch.float32)
    alone, ahead = start(model, 1, chunk=chunk), start(model, depth, chunk=chunk)
    assert_all_equal(finish(ahead), finish(alone))
    assert ahead.generated == alone.generated
    assert [(each.start, each.end) for each in ahead.chunks] == [
        (each.start, each.end) for each in alone.chunks
    ]
    assert ahead.lies_on(STATE_GRID)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_launched_ahead_until_a_step_samples(name: str) -> None:
    run = start(model_of(name, torch.float32), 3)
    in_flight = []
    while len(run.generated) < 3:
        run.step()
        in_flight.append(run.cache.num_in_flight)
    # Eight chunks, of which the last samples; two are left in flight after the oldest is settled.
    assert in_flight == [2, 2, 2, 2, 2, 2, 1, 0, 0, 0][: len(in_flight)]


@pytest.mark.parametrize("fails_at", range(8))
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_fails_takes_those_after_it_along(name: str, fails_at: int) -> None:
    model = model_of(name, torch.float32)
    run, num_launched = start(model, 3), 0
    forward = model.forward

    def fail_once(*parts: Any) -> torch.Tensor | None:
        nonlocal num_launched
        num_launched += 1
        if num_launched == fails_at + 1:
            raise RuntimeError("injected")
        return forward(*parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", fail_once)
        with pytest.raises(RuntimeError, match="injected"):
            finish(run)
    assert run.cache.num_in_flight == 0
    run.space.blocks.check_integrity()
    assert_all_equal(finish(run), finish(start(model, 1)))


@pytest.mark.parametrize("num_steps", [0, 1, 4, 9])
@pytest.mark.parametrize("name", NAMES)
def test_a_cancel_frees_what_is_in_flight(name: str, num_steps: int) -> None:
    run = start(model_of(name, torch.float32), 3)
    for _ in range(num_steps):
        run.step()
    run.cancel()
    assert run.finish_reason == "cancelled"
    assert_all_free(run.space)


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_is_cancelled_in_flight_begins_no_other_step(name: str) -> None:
    model = model_of(name, torch.float32)
    batcher = new_batcher(model, ScheduleConfig(chunk_size=64), 4096, strict=False, depth=3)
    job = new_job(batcher, "long", Wish(tuple(random_prompt(1500)), 4))
    batcher.add(job)
    batcher.step()
    assert batcher.num_in_flight == 2
    batcher.cancel("long")
    for _ in range(2):
        assert batcher.has_work
        batcher.step()
    assert not batcher.has_work
    batcher.check_integrity()


def test_an_overlap_is_run_again_with_steps_in_flight() -> None:
    model = model_of(NAMES[0], torch.float32)
    assert_all_equal(
        finish(start(model, 3, chunk=128, overlap=32)), finish(start(model, 1, chunk=128, overlap=32))
    )


@pytest.mark.parametrize("name", NAMES)
def test_requests_decode_in_groups_while_others_wait_for_their_tokens(name: str) -> None:
    model, schedule = model_of(name, torch.float32), ScheduleConfig(chunk_size=64)
    batcher = new_batcher(model, schedule, 4096, strict=False, depth=3)
    wishes = [Wish(tuple(random_prompt(length)), 12) for length in (20, 21, 22, 200)]
    for index, wish in enumerate(wishes):
        batcher.add(new_job(batcher, str(index), wish))
    groups = []
    while batcher.has_work:
        record = batcher.step()
        assert record is not None
        batcher.check_integrity()
        groups.append(tuple(span.request_id for span in record.spans if span.kind is SpanKind.DECODE))
    # All four decode once the last prompt is read: two groups of two.
    first = next(index for index, group in enumerate(groups) if "3" in group)
    assert {len(group) for group in groups[first + 3 : first + 7]} == {2}, groups
    assert len({*groups[first + 3 : first + 7]}) == 2, groups


@pytest.mark.parametrize("fails_at", [None, 3])
def test_where_the_depth_is_the_device_s_none_is_begun_behind_a_step_that_samples_or_failed(
    monkeypatch: pytest.MonkeyPatch, fails_at: int | None
) -> None:
    """The next one wants its tokens, or would run on what was not written."""
    monkeypatch.setattr(DeviceKind, "steps_in_flight", 2)
    model, schedule = model_of(NAMES[0], torch.float32), ScheduleConfig(chunk_size=64)
    batcher = new_batcher(model, schedule, 4096, strict=False, depth=2)
    begin, forward = batcher.begin, model.forward
    depths, launches = [], []

    def begun() -> Step | None:
        before = list(batcher._flight)
        assert not any(each.step.plan.samples or each.has_failed for each in before)
        depths.append(len(before))
        return begin()

    def launched(*parts: Any) -> torch.Tensor | None:
        launches.append(len(depths))
        if len(launches) == fails_at:
            raise RuntimeError("injected")
        return forward(*parts)

    monkeypatch.setattr(batcher, "begin", begun)
    monkeypatch.setattr(model, "forward", launched)
    jobs = [new_job(batcher, str(length), Wish(tuple(random_prompt(length)), 8)) for length in (400, 500)]
    for job in jobs:
        batcher.add(job)
        for _ in range(8):  # the second is read while the first decodes
            batcher.step()
    while batcher.has_work:
        batcher.step()
    assert {*depths} == {0, 1}
    if fails_at is None:
        assert [len(job.generated) for job in jobs] == [8, 8]


@pytest.mark.parametrize("num_steps", [1, 4, 9, 14])
@pytest.mark.parametrize("name", NAMES)
def test_requests_go_on_after_all_caches_are_lost(name: str, num_steps: int) -> None:
    model, schedule = model_of(name, torch.float32), ScheduleConfig(chunk_size=64)
    generated = []
    for is_lost in (False, True):
        batcher = new_batcher(model, schedule, 64 * 12, strict=True, depth=3, sharing=Sharing())
        begin = random_prompt(64)
        jobs = [
            new_job(batcher, str(length), Wish((*begin, *random_prompt(length)), 12))
            for length in (20, 100, 300)
        ]
        for job in jobs:
            batcher.add(job)
        for _ in range(num_steps):
            batcher.step()
        if is_lost:
            batcher.restart()
            for tensor in (part for kv in batcher.space.tensors.kv.layers for part in (kv.keys, kv.values)):
                tensor.fill_(7)
            batcher.check_integrity()
        while batcher.has_work:
            batcher.step()
            batcher.check_integrity()
        generated.append([job.generated for job in jobs])
    assert generated[0] == generated[1]
