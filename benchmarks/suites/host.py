"""What the host does for a step, by the number of sequences: the device's part is left away."""

import argparse
import gc
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness import Bench
from benchmarks.suite import Suite, number
from benchmarks.suites.gpu.models import Subject, load_subject
from benchmarks.suites.gpu.steps import made_up_tokenizer
from penstock.cache import BLOCK_TOKENS, SequenceBlocks
from penstock.cache.tensors import CacheTensors
from penstock.engine.batcher import Batcher
from penstock.engine.events import Event, GenerationRequest
from penstock.engine.graphs.decode import DecodeLayout, FollowingDecodes, is_decode
from penstock.engine.graphs.passes import DECODE_ROWS
from penstock.engine.job import Job
from penstock.engine.reuse import Reuse
from penstock.frontends.server.metrics import Telemetry
from penstock.layers.forward_batch import NO_OVERLAP, ForwardBatch, LateTokens, Overlap
from penstock.measure.random_weights import FAMILIES, RandomWeights
from penstock.models.decoder import Decoder
from penstock.plan.grids import GPU_FEW_ROWS, GPU_ROW_GRID, GPU_TILE, RowLaw
from penstock.plan.policy import ScheduleConfig
from penstock.plan.sizing import ChunkSizer, SizeRules

DECODES, MIXED = "a step of decodes", "a step of decodes and a chunk"
GROWTH = "for each further sequence"
_WARM_UP_STEPS, _CHUNK, _VOCAB = 10, 2048, 300


class _LeftAway:
    """Stands for passes that a GPU has recorded: all that the host does for one is done, and nothing is computed."""

    def __init__(self) -> None:
        self._logits = torch.randn(DECODE_ROWS[-1] + 1, _VOCAB)
        self._prepared: tuple[ForwardBatch | None, NDArray[np.int64]] = (None, np.zeros(0, np.int64))

    def find(self, batch: ForwardBatch, caches: CacheTensors) -> "_LeftAway":
        return self

    def prepare(self, batch: ForwardBatch, caches: CacheTensors) -> None:
        if is_decode(batch):
            self._prepared = (batch, self._layout(batch, caches).of(batch))

    def must_record(self, batch: ForwardBatch, caches: CacheTensors) -> bool:
        return False

    def run(
        self, batch: ForwardBatch, model: Decoder, caches: CacheTensors, overlap: Overlap = NO_OVERLAP
    ) -> Tensor | None:
        if is_decode(batch):
            if self._prepared[0] is not batch:
                self.prepare(batch, caches)
            self._prepared[1][: batch.num_tokens] = batch.token_ids[: batch.num_tokens]
        return self._logits[: batch.num_logits] if batch.num_logits else None

    def follow(
        self, batch: ForwardBatch, caches: CacheTensors, blocks: Sequence[tuple[SequenceBlocks, ...]]
    ) -> FollowingDecodes:
        layout = self._layout(batch, caches)
        end = caches.kv.num_blocks * BLOCK_TOKENS
        return FollowingDecodes(layout, self._prepared[1], blocks, end, self._launch)

    def record_decodes(self, most: int, caches: CacheTensors, *, is_canonical: bool) -> Iterator[None]:
        return iter(())

    def _launch(self, told: NDArray[np.int64], num_tokens: int, late: LateTokens | None) -> Tensor:
        return self._logits[:num_tokens]

    def _layout(self, batch: ForwardBatch, caches: CacheTensors) -> DecodeLayout:
        num_rows = next(size for size in DECODE_ROWS if batch.num_tokens <= size)
        return DecodeLayout(num_rows, len(caches.kv_groups), caches.kv.num_blocks)


def _subject() -> Subject:
    sizes = {
        "vocab_size": _VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    device = torch.device("cpu")
    weights = RandomWeights("tiny", {**FAMILIES["qwen3-0.6b"], **sizes}, device)
    subject = load_subject(weights, torch.float32, device)
    subject.model.recorded = _LeftAway()
    law = RowLaw(GPU_TILE, row_grid=GPU_ROW_GRID, few_rows=GPU_FEW_ROWS)  # as on a GPU
    return replace(subject, canon=law)


def _job(batcher: Batcher, name: str, num_prompt: int, max_tokens: int, told: list[Event]) -> Job:
    prompt = random.Random(name).choices(range(256), k=num_prompt)
    request = GenerationRequest(prompt, max_tokens, ignore_eos=True)
    cache = batcher.new_sequence(request)
    prefix = None if batcher.reuse is None else batcher.reuse.open(prompt, cache)
    job = Job(name, request, cache, made_up_tokenizer(), frozenset(), None, told.append, prefix)
    batcher.add(job)
    return job


def step_us(subject: Subject, num_sequences: int, num_steps: int, *, reads: bool) -> list[float]:
    """Microseconds of the thread in each of some steps of so many decodes, all that is told of them included; while a
    long prompt is read, where it `reads`."""
    num_all = 2 * num_steps + _WARM_UP_STEPS + 4 * num_sequences
    num_read = (num_steps + _WARM_UP_STEPS + 2) * _CHUNK if reads else 0
    schedule = ScheduleConfig(chunk_size=_CHUNK, max_running=num_sequences + reads)
    space = subject.space(num_sequences * (num_all + 2 * BLOCK_TOKENS) + num_read)
    batcher = Batcher(
        subject.model,
        subject.canon,
        space,
        schedule,
        strict=True,
        observers=[Telemetry()],
        sizer=ChunkSizer(SizeRules(fixed=_CHUNK)),
        reuse=Reuse(space, clean_only=True),
        looks_ahead=True,
        plans_ahead=True,
    )
    told: list[Event] = []

    def step() -> None:
        batcher.step()
        while batcher.notices:
            batcher.notices.popleft().tell()
        told.clear()

    # They stand at different places of their blocks, as those do that came at different times.
    jobs = [
        _job(batcher, str(index), 1 + index % BLOCK_TOKENS, num_all, told) for index in range(num_sequences)
    ]
    while not all(job.num_generated for job in jobs):
        step()
    if reads:
        _job(batcher, "reading", num_read, 1, told)
    for _ in range(_WARM_UP_STEPS):
        step()
    gc.collect()
    found = []
    for _ in range(num_steps):
        started = time.thread_time_ns()
        step()
        found.append((time.thread_time_ns() - started) / 1e3)
    return found


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    subject = _subject()
    bench.describe("the host's part, nothing is computed", options, "sequences")
    for section in (DECODES, MIXED):
        medians = {}
        for count in options.sequences:
            times = step_us(subject, count, options.repeats or options.steps, reads=section == MIXED)
            medians[count] = bench.results.add(section, f"{count} sequences", "us", *times).median
        first, last = min(medians), max(medians)
        if first < last:
            growth = (medians[last] - medians[first]) / (last - first)
            bench.results.add(section, GROWTH, "us", growth)


HOST = Suite(
    "What the host does for a step of a GPU's, by the number of sequences that decode: alone, and while a long "
    "prompt is read. Processor time of the engine's thread on a tiny model, whose passes are left away.",
    _measure,
    repeats="steps of each, as --steps",
    takes=(),
    options={
        "--sequences": number((1, 16, 64), "sequences that decode"),
        "--steps": number(100, "steps of each"),
    },
)
