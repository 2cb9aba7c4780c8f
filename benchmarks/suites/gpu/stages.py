"""Two stages on one card: the same bits as one, what they cost, and what two cards would bring, by the clock."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.suites.gpu.job import Job, over
from benchmarks.suites.gpu.models import kernels_of
from benchmarks.suites.gpu.plan import PrefillCase
from penstock.cache import SequenceCache
from penstock.cache.space import CacheSpace
from penstock.cache.tensors import CacheTensors
from penstock.cache.transfer import cache_digests
from penstock.engine.step import SpanInput, build_batch
from penstock.kernels.probe import probe
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder
from penstock.models.loading import load_decoder
from penstock.plan import ChunkedPrefillConfig, Span
from penstock.plan.chunks import num_prefill_chunks, prefill_chunk_span
from penstock.plan.pipeline import Ends, Link, Machine, PartCosts, PipelineStep, cut_layers, run_pipeline

NUM_STAGES = 2
LINK = Link(100e9 / 8)
OVER_ONE = "device time of two stages over one"
PREDICTED = "predicted: two cards at 100 Gb/s, time over one card's"


@dataclass(frozen=True)
class Chain:
    """Stages with caches of their own, or one that has all layers; blocks and slots are those of one space."""

    stages: Sequence[Decoder]
    caches: Sequence[CacheTensors]

    def forward(self, batch: ForwardBatch, mark: Callable[[], None]) -> Tensor | None:
        x: Tensor | None = None
        mark()
        for stage, caches in zip(self.stages, self.caches, strict=True):
            x = stage.forward(batch, caches, x)
            mark()
        return x


def measure_stages(job: Job, errors: list[str]) -> None:
    for case in job.plan.stages:
        with job.attempt(case.label, errors):
            _measure(job, case)


def _measure(job: Job, case: PrefillCase) -> None:
    weights = job.weights(case.model)
    kernels = kernels_of(job.device)
    whole = load_decoder(weights, kernels, job.dtype, job.device)
    canon = probe(kernels, whole.probe_shapes, job.dtype, job.device).bind(kernels)
    space = CacheSpace.for_tokens(whole, case.prompt_tokens)
    one = Chain([whole], [space.tensors])
    prompt = job.prompt(case.model, case.prompt_tokens)

    def read(chain: Chain) -> tuple[SequenceCache, Tensor, list[list[float]]]:
        """What is left of a prompt, its logits, and seconds by chunk and stage."""
        cache, clock = space.new_sequence(), _Clock(job)
        config = ChunkedPrefillConfig(case.chunk)
        logits: Tensor | None = None
        for index in range(num_prefill_chunks(len(prompt), config)):
            span = prefill_chunk_span(index, len(prompt), config)
            state = cache.reserve(span.start, [span.end])
            is_last = span.end == len(prompt)
            item = SpanInput(
                Span(span.start, span.end),
                prompt[span.start : span.end],
                cache.kv_groups,
                True,
                is_last,
                state,
            )
            logits = chain.forward(build_batch([item], canon=canon), clock.mark)
            cache.commit(span.end)
            clock.next_row()
        assert logits is not None
        return cache, logits, clock.seconds()

    # The cut is the plan's, for chunks that take as long as they do on one card.
    for _ in range(2):  # the first time kernels are made
        cache, _, seconds = read(one)
        cache.free()
    costs = PartCosts.of_model(whole.config, dtype_bytes=job.dtype.itemsize, past=case.prompt_tokens / 2)
    ends = Ends.of([PipelineStep(sum(row)) for row in seconds])
    cut = cut_layers(costs, [Machine()] * NUM_STAGES, ends)
    stages = [load_decoder(weights, kernels, job.dtype, job.device, layers=each.layers) for each in cut]
    num_slots = space.slots.num_slots if space.slots else 0
    caches = [
        CacheTensors.of(stage.cache_spec, [space.blocks.num_blocks], num_slots, job.device)
        for stage in stages
    ]
    two = Chain(stages, caches)

    found = []
    for chain in (one, two):
        cache, logits, _ = read(chain)
        slot = cache.state.slot if cache.state else None
        parts = [cache_digests(tensors, cache.places, slot) for tensors in chain.caches]
        kv = [digest for part in parts for group in part.kv for digest in group]
        states = [digest for part in parts for digest in part.states]
        found.append((kv, states, logits.cpu()))
        cache.free()
    (kv, states, logits), (their_kv, their_states, their_logits) = found
    is_same = (kv, states) == (their_kv, their_states) and torch.equal(logits, their_logits)
    job.fact(f"{case.label}, two stages have the bits of one", is_same)

    times: dict[int, list[list[list[float]]]] = {1: [], 2: []}
    for _ in range(job.repeats):
        for num_stages, chain in ((1, one), (2, two)):
            cache, _, seconds = read(chain)
            times[num_stages].append(seconds)
            cache.free()
    ones = [sum(map(sum, run)) for run in times[1]]
    twos = [sum(map(sum, run)) for run in times[2]]
    job.figure(f"{case.label}, one stage", "ms", [1e3 * each for each in ones])
    for stage in range(NUM_STAGES):
        each = [1e3 * sum(row[stage] for row in run) for run in times[2]]
        job.figure(f"{case.label}, stage {stage} of two ({len(cut[stage].layers)} layers)", "ms", each)
    job.figure(f"{case.label}, {OVER_ONE}", "x", over(twos, ones))
    token_bytes = whole.config.hidden_size * job.dtype.itemsize
    clocks = [_clock_of(run, case, len(prompt), token_bytes) for run in times[2]]
    job.figure(f"{case.label}, {PREDICTED}", "x", over(clocks, ones))


def _clock_of(run: Sequence[Sequence[float]], case: PrefillCase, num_tokens: int, token_bytes: int) -> float:
    """When two cards would have the first token, by the pipeline's clock over what each stage took of each chunk."""
    config = ChunkedPrefillConfig(case.chunk)
    steps = [
        PipelineStep(sum(row), len(prefill_chunk_span(index, num_tokens, config)) * token_bytes)
        for index, row in enumerate(run)
    ]
    total = sum(map(sum, run))
    shares = [sum(row[stage] for row in run) / total for stage in range(NUM_STAGES)]
    return run_pipeline(steps, shares, LINK).seconds


class _Clock:
    """Times between marks, on the device where it has events, else on the host."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows: list[list[torch.cuda.Event | float]] = [[]]

    def mark(self) -> None:
        if self._job.device.type == "cuda":
            event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._rows[-1].append(event)
        else:
            self._rows[-1].append(time.perf_counter())

    def next_row(self) -> None:
        self._rows.append([])

    def seconds(self) -> list[list[float]]:
        self._job.synchronize()
        return [[_between(one, other) for one, other in pairwise(row)] for row in self._rows if row]


def _between(one: "torch.cuda.Event | float", other: "torch.cuda.Event | float") -> float:
    if isinstance(one, float) and isinstance(other, float):
        return other - one
    assert not isinstance(one, float)
    assert not isinstance(other, float)
    return float(one.elapsed_time(other)) / 1e3
