"""Times and counts that are told, on a clock that moves with what is computed and nothing else: they are exact."""

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock.engine.batcher import ENDED_EXPLAINED, STEPS_SHOWN, Batcher
from penstock.engine.events import Finished, PromptProgress
from penstock.engine.llm import LLM
from penstock.engine.run import Run
from penstock.engine.status import RequestSummary, StepRecord
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder
from penstock.plan import ChunkedPrefillConfig
from penstock.plan.policy import ScheduleConfig
from penstock.plan.step import SpanKind
from tests.byte_models import model_of_bytes
from tests.engine.batching import Sharing, Wish, new_batcher, new_job
from tests.oracle import canon_of, load_model, make_oracle, random_prompt

STEP_S = 10.0  # what a step takes, beside a second for each token


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now, real = [1000.0], Decoder.forward

    def forward(self: Decoder, batch: ForwardBatch, *args: Any, **kwargs: Any) -> Tensor | None:
        now[0] += STEP_S + batch.num_tokens
        return real(self, batch, *args, **kwargs)

    monkeypatch.setattr(Decoder, "forward", forward)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@dataclass
class Watching:
    steps: list[StepRecord] = field(default_factory=list)
    tokens: list[tuple[str, float, bool]] = field(default_factory=list)
    ends: list[RequestSummary] = field(default_factory=list)

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_token(self, request_id: str, gap_s: float, *, is_first: bool) -> None:
        self.tokens.append((request_id, gap_s, is_first))

    def on_shrink(self) -> None: ...

    def on_end(self, summary: RequestSummary) -> None:
        self.ends.append(summary)


def tell(batcher: Batcher) -> None:
    while batcher.notices:
        batcher.notices.popleft().tell()


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_a_batcher_tells_what_steps_and_requests_took(name: str, clock: list[float]) -> None:
    model = load_model(make_oracle(name).folder)
    batcher = new_batcher(model, ScheduleConfig(chunk_size=128, max_running=2), 2048, strict=False)
    watching = Watching()
    batcher._observers = (watching,)
    clock[0] += 5
    jobs = [new_job(batcher, f"r{i}", Wish(tuple(random_prompt(n)), 3)) for i, n in enumerate((200, 64, 30))]
    for job in jobs:
        batcher.add(job)
    clock[0] += 7  # they wait
    began_s = clock[0]
    first = batcher.step()
    assert first is not None
    spans = {span.request_id: (span.start, span.end) for span in first.spans}
    num_first = sum(end - start for start, end in spans.values())
    assert (first.index, first.start_s, first.seconds) == (0, 12.0, STEP_S + num_first)
    status = batcher.status()
    assert status.uptime_s == clock[0] - 1000.0
    assert (status.num_running, status.num_waiting) == (2, 1)
    used = sum(-(-end // 64) for _, end in spans.values())
    slots = 2 if model.config.has_state else 0
    cache = status.cache
    assert (cache.blocks_used, cache.blocks_total, cache.block_tokens, cache.blocks_idle) == (used, 32, 64, 0)
    assert (cache.slots_used, cache.slots_total, cache.slots_idle) == (slots, 2 * slots, 0)
    assert (status.steps, status.in_flight) == ((first,), ())
    for told, job in zip(status.requests, jobs, strict=True):
        assert (told.id, told.age_s) == (job.id, clock[0] - 1005.0)
        assert told.num_prompt_done == spans.get(job.id, (0, 0))[1]
        assert (told.num_prompt_tokens, told.max_tokens, told.num_generated) == (
            job.num_prompt,
            3,
            job.num_generated,
        )
        left = told.num_prompt_tokens - told.num_prompt_done
        speed = told.num_prompt_done / (STEP_S + num_first)
        assert told.prompt_eta_s == (left / speed if left and told.num_prompt_done else None)
    step = batcher.begin()
    assert step is not None
    clock[0] += 3
    (flying,) = batcher.status().in_flight
    assert (flying.index, flying.start_s, flying.seconds) == (1, first.start_s + first.seconds, 3.0)
    batcher.abandon()
    clock[0] -= 3
    while batcher.has_work:
        batcher.step()
    tell(batcher)
    assert [record.index for record in watching.steps] == [*range(len(watching.steps))]
    at_s, ended_s = began_s, dict[Any, list[tuple[Any, float]]]()
    for record in watching.steps:
        num_tokens = sum(span.end - span.start for span in record.spans)
        assert (record.start_s, record.seconds) == (at_s - 1000.0, STEP_S + num_tokens)
        assert record.num_chunk_tokens + record.num_decodes == num_tokens
        at_s += record.seconds
        for span in record.spans:
            ended_s.setdefault(span.request_id, []).append((span, at_s))
    assert at_s == clock[0]
    for job, summary in zip(jobs, sorted(watching.ends, key=lambda end: end.id), strict=True):
        chunks = [end for span, end in ended_s[job.id] if span.kind is not SpanKind.DECODE]
        decodes = [end for span, end in ended_s[job.id] if span.kind is SpanKind.DECODE]
        times = [chunks[-1], *decodes]
        gaps = [times[0] - 1005.0, *(after - before for before, after in pairwise(times))]
        assert watching_tokens(watching, job.id) == [(gap, place == 0) for place, gap in enumerate(gaps)]
        last = job.events[-1]
        assert isinstance(last, Finished)
        began = ended_s[job.id][0][1] - next(
            record.seconds for record in watching.steps if record.spans and job.id in ids(record)
        )
        assert (last.queue_s, last.prefill_s) == (began - 1005.0, times[0] - began)
        assert last.decode_s == times[-1] - times[0]
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (job.num_prompt, 3)
        assert (summary.id, summary.outcome, summary.num_generated) == (job.id, "length", 3)
        assert (summary.first_token_s, summary.seconds) == (times[0] - 1005.0, times[-1] - 1005.0)
        explained = batcher.explain(job.id)
        assert explained is not None
        assert [(chunk.start, chunk.end, chunk.past) for chunk in explained] == [
            (span.start, span.end, span.start)
            for span, _ in ended_s[job.id]
            if span.kind is not SpanKind.DECODE
        ]
        steps = [record for record in watching.steps if job.id in ids(record)]
        for chunk, record in zip(explained, steps, strict=False):
            assert (chunk.measured_s, chunk.num_decodes) == (record.seconds, record.num_decodes)
    assert batcher.explain("nobody") is None


def ids(record: StepRecord) -> set[str]:
    return {span.request_id for span in record.spans}


def watching_tokens(watching: Watching, name: str) -> list[tuple[float, bool]]:
    return [(gap_s, is_first) for request_id, gap_s, is_first in watching.tokens if request_id == name]


def test_the_last_steps_are_shown_and_the_last_requests_explained() -> None:
    model = load_model(make_oracle("llama").folder)
    batcher = new_batcher(model, ScheduleConfig(chunk_size=128, max_running=4), 2048, strict=False)
    num_jobs, num_tokens = ENDED_EXPLAINED + 3, 5
    for index in range(num_jobs):
        batcher.add(new_job(batcher, f"r{index}", Wish((index,), num_tokens if index == 0 else 1)))
    num_steps = 0
    while batcher.has_work:
        num_steps += batcher.step() is not None
        assert [record.index for record in batcher.status().steps] == [
            *range(max(0, num_steps - STEPS_SHOWN), num_steps)
        ]
        tell(batcher)
    known = [batcher.explain(f"r{index}") is not None for index in range(num_jobs)]
    assert sum(known) == ENDED_EXPLAINED
    assert known[-20:] == [True] * 20


def test_what_was_found_is_counted() -> None:
    model = load_model(make_oracle("qwen3_5_text").folder)
    batcher = new_batcher(
        model, ScheduleConfig(chunk_size=128, max_running=2), 4096, strict=False, sharing=Sharing()
    )
    for index, prompt in enumerate((random_prompt(200), random_prompt(200))):
        job = new_job(batcher, f"r{index}", Wish(tuple(prompt), 2))
        batcher.add(job)
        while batcher.has_work:
            batcher.step()
            status = batcher.status()
            batcher.check_integrity()
            assert status.cache.slots_used == 2 * (job.cache.num_in_flight > 0) + bool(status.requests)
        tell(batcher)
        assert isinstance(job.events[-1], Finished)
        assert job.events[-1].usage.cached_tokens == (192 if index else 0)
    status = batcher.status()
    assert (status.reuse.num_hits, status.reuse.num_misses) == (1, 1)
    assert (status.reuse.memory_tokens, status.reuse.missed_tokens) == (192, 208)
    assert (status.cache.blocks_used, status.cache.slots_used) == (0, 0)
    assert status.cache.blocks_idle == 3
    assert batcher.reuse is not None
    assert status.cache.slots_idle == batcher.reuse.index.num_snapshots


def test_a_run_tells_prompts_from_decodes(clock: list[float]) -> None:
    model = load_model(make_oracle("llama").folder)
    run = Run(model, random_prompt(100), config=ChunkedPrefillConfig(64), canon=canon_of(model), max_tokens=3)
    told = []
    while run.finish_reason is None:
        was_reading = run.is_reading
        result = run.step()
        assert result.is_prompt == was_reading
        assert result.token == (run.generated[-1] if run.generated else None)
        told.append((result.span.start, result.span.end, result.is_prompt))
    assert told == [(0, 64, True), (64, 100, True), (100, 101, False), (101, 102, False)]
    progress = [event.progress for event in run.events if isinstance(event, PromptProgress)]
    assert [(part.num_done, part.chunks_done, part.num_chunks) for part in progress] == [
        (64, 1, 2),
        (100, 2, 2),
    ]
    assert [part.tokens_per_s for part in progress] == [64 / 74, 100 / 120]


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_a_stream_tells_what_it_took(tmp_path: Path, clock: list[float], num_tokens: int) -> None:
    llm = LLM(model_of_bytes("llama", tmp_path / "model"), dtype="float32", chunk=128)
    clock[0] = 5000.0
    with llm.stream(random_prompt(300, 256), max_tokens=num_tokens, ignore_eos=True) as stream:
        for _ in stream:
            pass
        timings, prefill, memory = stream.result.timings, stream.result.prefill, stream.result.memory
    num_decoded = max(num_tokens - 1, 0)
    assert timings.prefill_s == 3 * STEP_S + 300
    assert timings.prefill_tokens_per_s == 300 / (3 * STEP_S + 300)
    assert timings.decode_s == num_decoded * (STEP_S + 1)
    assert timings.time_to_first_token_s == (3 * STEP_S + 300 if num_tokens else None)
    assert timings.decode_tokens_per_s == (1 / (STEP_S + 1) if num_decoded else None)
    assert (prefill.chunks, prefill.effective, prefill.overlap, prefill.same_bits) == (3, 128, 0, True)
    assert [len(record) for record in prefill.records] == [128, 128, 44]
    assert memory.recurrent_bytes == 0
    assert memory.weights_bytes == llm.model.num_weight_bytes
    assert stream.result.usage.completion_tokens == num_tokens
