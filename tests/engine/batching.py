"""Requests that come and go at given steps, through a real batcher, with every row of logits kept."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.cache import BLOCK_TOKENS
from penstock.cache.space import CacheSpace
from penstock.cache.store.block_store import BlockStore
from penstock.engine.batcher import Batcher
from penstock.engine.events import Event, Failed, Finished, GenerationRequest
from penstock.engine.job import Job
from penstock.engine.reuse import Reuse
from penstock.engine.sampler import SamplingParams
from penstock.engine.sampling import Choice
from penstock.engine.step import StepOutcome
from penstock.models.decoder import Decoder
from penstock.models.text.tokenizer import SpecialTokens, Tokenizer
from penstock.plan.policy import ScheduleConfig
from tests.byte_models import byte_backend
from tests.oracle import canon_of


@dataclass(frozen=True)
class Wish:
    """A request, the step before which it comes, and the one before which it is cancelled, if it is."""

    prompt: tuple[int, ...] = field(repr=False)
    max_tokens: int
    arrives: int = 0
    cancelled: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)


class RecordingJob(Job):
    """A job that keeps the logits of all it was asked to choose from, and its events."""

    logits: list[Tensor]
    events: list[Event]
    needs_logits = True

    def choose(self, logits: Tensor) -> Choice:
        self.logits.append(logits.clone())
        return super().choose(logits)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def outcome(self) -> str:
        last = self.events[-1]
        return last.reason if isinstance(last, Finished) else type(last).__name__

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

    _num_preemptions = 0


@dataclass(frozen=True)
class Sharing:
    """How prompts that begin alike share what was read of them."""

    store: BlockStore | None = None
    max_snapshots: int = 6


def new_batcher(
    model: Decoder,
    schedule: ScheduleConfig,
    cache_tokens: int,
    *,
    strict: bool,
    sharing: Sharing | None = None,
    looks_ahead: bool = False,
) -> Batcher:
    schedule = replace(schedule, grid=64) if model.config.has_state else schedule
    num_slots = 2 * schedule.max_running + (sharing.max_snapshots if sharing else 0)
    space = CacheSpace.for_tokens(model, cache_tokens, num_slots=num_slots)
    reuse = None
    if sharing is not None:
        reuse = Reuse(
            space,
            fingerprint=b"the model",
            store=sharing.store,
            clean_only=strict,
            max_snapshots=sharing.max_snapshots,
        )
    return Batcher(
        model, canon_of(model), space, schedule, strict=strict, reuse=reuse, looks_ahead=looks_ahead
    )


def new_job(batcher: Batcher, name: str, wish: Wish) -> RecordingJob:
    events: list[Event] = []
    request = GenerationRequest(wish.prompt, wish.max_tokens, wish.sampling)
    prefix = None
    if batcher.reuse is not None:
        prefix = batcher.reuse.open(wish.prompt)
        batcher.reuse.search(prefix, batcher.reuse.num_in_memory(prefix))
    job = RecordingJob(
        name,
        request,
        batcher.space.new_sequence(),
        Tokenizer(byte_backend(), SpecialTokens(), None),
        frozenset(),
        None,
        events.append,
        0.0,
        prefix,
    )
    job.logits, job.events = [], events
    return job


def serve(
    model: Decoder,
    wishes: Sequence[Wish],
    schedule: ScheduleConfig,
    *,
    cache_tokens: int = 64 * BLOCK_TOKENS,
    strict: bool = False,
    fails: Collection[int] = (),
    runs_out: Collection[int] = (),
    looks_ahead: bool = False,
) -> list[RecordingJob]:
    """Serve all wishes to their end. Steps in `fails` that have several requests fail after they have run, and so do
    those in `runs_out`, for want of memory."""
    batcher = new_batcher(model, schedule, cache_tokens, strict=strict, looks_ahead=looks_ahead)
    return serve_with(batcher, wishes, fails, runs_out)


def serve_with(
    batcher: Batcher, wishes: Sequence[Wish], fails: Collection[int] = (), runs_out: Collection[int] = ()
) -> list[RecordingJob]:
    jobs = [new_job(batcher, f"request {index}", wish) for index, wish in enumerate(wishes)]
    last_event = max([0, *(wish.arrives for wish in wishes), *(wish.cancelled or 0 for wish in wishes)])
    index = 0
    while index <= last_event or batcher.has_work:
        for job, wish in zip(jobs, wishes, strict=True):
            if wish.arrives == index:
                batcher.add(job)
            if wish.cancelled == index:
                batcher.cancel(job.id)
        step = batcher.begin()
        is_loading = any(job.prefix and job.prefix.stored for job in jobs)
        assert step is not None or not batcher.has_work or is_loading, "requests wait, and nothing runs"
        if step is not None:
            outcome = batcher.run(step)
            if index in fails and len(step.plan.spans) > 1:
                undo(jobs, step.plan.spans, outcome)
                outcome = StepOutcome(error=RuntimeError("as the test wants it"))
            elif index in runs_out and step.plan.num_chunk_tokens > 1:
                undo(jobs, step.plan.spans, outcome)
                outcome = StepOutcome(error=torch.OutOfMemoryError("as the test wants it"))
            batcher.settle(step, outcome)
            for preemption in step.plan.preemptions:
                next(job for job in jobs if job.id == preemption.request_id)._num_preemptions += 1
        batcher.check_integrity()
        while batcher.notices:
            batcher.notices.popleft().tell()
        index += 1
    assert batcher.space.blocks.num_available == batcher.space.blocks.num_blocks
    if batcher.space.slots is not None:
        num_kept = batcher.reuse.index.num_snapshots if batcher.reuse else 0
        assert batcher.space.slots.num_free == batcher.space.slots.num_slots - num_kept
    for job in jobs:
        ends = [event for event in job.events if isinstance(event, Finished | Failed)]
        assert ends == job.events[-1:] or not job.events, "a request ends once, and says nothing after it"
    return jobs


def undo(jobs: Sequence[RecordingJob], spans: Sequence[object], outcome: StepOutcome) -> None:
    """Forget the logits of a step that is to fail."""
    for job in jobs:
        if job.id in outcome.choices:
            job.logits.pop()
