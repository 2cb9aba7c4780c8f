"""Requests that come and go at given steps, through a real batcher, with every row of logits kept."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.cache import BLOCK_TOKENS
from penstock.cache.space import CacheSpace
from penstock.cache.store.block_store import BlockStore
from penstock.cache.tensors import CacheTensors
from penstock.engine.batcher import Batcher
from penstock.engine.events import Event, Failed, Finished, GenerationRequest
from penstock.engine.job import Job
from penstock.engine.reuse import Reuse
from penstock.engine.sampler import SamplingParams
from penstock.engine.sampling import Choice, Sampling
from penstock.engine.step import Launched, Step, StepOutcome
from penstock.models.decoder import Decoder
from penstock.models.text.tokenizer import SpecialTokens, Tokenizer
from penstock.plan.admission import WindowRoom
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
    plans_ahead: bool = False,
    depth: int = 1,
) -> Batcher:
    schedule = replace(schedule, grid=64) if model.config.has_state else schedule
    num_slots = (1 + depth + plans_ahead) * schedule.max_running + (sharing.max_snapshots if sharing else 0)
    windows = WindowRoom(
        schedule.max_running, depth * schedule.chunk_size, sharing.max_snapshots if sharing else 0
    )
    space = CacheSpace.for_tokens(model, cache_tokens, num_slots=num_slots, windows=windows)
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
        model,
        canon_of(model),
        space,
        schedule,
        strict=strict,
        reuse=reuse,
        looks_ahead=looks_ahead,
        plans_ahead=plans_ahead,
        depth=depth,
    )


def spoil(tensors: CacheTensors) -> None:
    """Nothing of a cache can be used any more. What a mask hides is finite, as ever."""
    for group in tensors.kv_groups:
        for layer in group.layers:
            for kept in (layer.keys, layer.values):
                kept.fill_(7)
    if tensors.recurrent is not None:
        for states in tensors.recurrent.layers:
            for kept in (states.tails, states.matrices):
                kept.fill_(7)


def spoil_windows(space: CacheSpace) -> None:
    """Blocks of windows that nobody has hold no numbers: whoever reads what was given back is found out."""
    for group, pool in zip(space.tensors.window_groups, space.windows, strict=True):
        for block in range(pool.num_blocks):
            if not pool.num_owners(block) and not pool.is_kept(block):
                places = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
                for layer in group.layers:
                    layer.keys[places] = torch.nan
                    layer.values[places] = torch.nan


def new_job(batcher: Batcher, name: str, wish: Wish) -> RecordingJob:
    events: list[Event] = []
    request = GenerationRequest(wish.prompt, wish.max_tokens, wish.sampling)
    cache, prefix = batcher.new_sequence(request), None
    if batcher.reuse is not None:
        prefix = batcher.reuse.open(wish.prompt, cache)
        prefix.search(prefix.num_in_memory())
    tokenizer = Tokenizer(byte_backend(), SpecialTokens(), None)
    job = RecordingJob(name, request, cache, tokenizer, frozenset(), None, events.append, prefix)
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
    rewinds: Collection[int] = (),
    looks_ahead: bool = False,
    depth: int = 1,
) -> list[RecordingJob]:
    """Serve all wishes to their end. Steps in `fails` that have several requests fail after they have run, and so do
    those in `runs_out`, for want of memory. Before those in `rewinds` the cache is lost."""
    batcher = new_batcher(model, schedule, cache_tokens, strict=strict, looks_ahead=looks_ahead, depth=depth)
    return serve_with(batcher, wishes, fails, runs_out, rewinds)


def serve_with(
    batcher: Batcher,
    wishes: Sequence[Wish],
    fails: Collection[int] = (),
    runs_out: Collection[int] = (),
    rewinds: Collection[int] = (),
) -> list[RecordingJob]:
    jobs = [new_job(batcher, f"request {index}", wish) for index, wish in enumerate(wishes)]
    last_event = max([0, *(wish.arrives for wish in wishes), *(wish.cancelled or 0 for wish in wishes)])
    index = 0
    finish = batcher._runner.finish

    def finish_or_fail(
        step: Step, launched: Launched, sampling: Sequence[Job], meanwhile: Callable[[Sampling], None]
    ) -> StepOutcome:
        for preemption in step.plan.preemptions:
            next(job for job in jobs if job.id == preemption.request_id)._num_preemptions += 1
        outcome = finish(step, launched, sampling, meanwhile)
        error: Exception | None = None
        if index in fails and len(step.plan.spans) > 1:
            error = RuntimeError("as the test wants it")
        elif index in runs_out and step.plan.num_chunk_tokens > 1:
            error = torch.OutOfMemoryError("as the test wants it")
        if error is None:
            return outcome
        for job in jobs:  # the logits of a step that is to fail are forgotten
            if job.id in outcome.choices and job.needs_logits:
                job.logits.pop()
        return StepOutcome(error=error)

    batcher._runner.finish = finish_or_fail  # type: ignore[assignment, method-assign]
    while index <= last_event or batcher.has_work:
        for job, wish in zip(jobs, wishes, strict=True):
            if wish.arrives == index:
                batcher.add(job)
            if wish.cancelled == index:
                batcher.cancel(job.id)
        if index in rewinds:
            batcher.restart()
            spoil(batcher.space.tensors)
        num_before, was_in_flight = batcher.num_begun, batcher.num_in_flight > 0
        batcher.step()
        spoil_windows(batcher.space)
        is_loading = any(job.prefix and job.prefix.has_more_on_disk for job in jobs)
        has_run = batcher.num_begun > num_before or was_in_flight
        assert has_run or not batcher.has_work or is_loading, "requests wait, and nothing runs"
        batcher.check_integrity()
        while batcher.notices:
            batcher.notices.popleft().tell()
        index += 1
    batcher._runner.finish = finish  # type: ignore[method-assign]
    for pool in batcher.space.pools:
        assert pool.num_available == pool.num_blocks
    if batcher.space.slots is not None:
        num_kept = batcher.reuse.index.num_snapshots if batcher.reuse else 0
        assert batcher.space.slots.num_free == batcher.space.slots.num_slots - num_kept
    for job in jobs:
        ends = [event for event in job.events if isinstance(event, Finished | Failed)]
        assert ends == job.events[-1:] or not job.events, "a request ends once, and says nothing after it"
    return jobs
