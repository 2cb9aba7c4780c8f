"""What the first requests of a service would wait for, done before they come: recordings, kernels, plans."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from penstock.cache import BLOCK_TOKENS, SequenceCache
from penstock.cache.space import CacheSpace
from penstock.engine.sampler import Sampler, SamplingParams
from penstock.engine.sampling import PlainRow, sample_rows
from penstock.engine.step import SpanInput, build_batch
from penstock.models.decoder import Decoder
from penstock.plan.grids import RowLaw
from penstock.plan.policy import ScheduleConfig
from penstock.plan.step import Span


def preparations(
    model: Decoder, canon: RowLaw, space: CacheSpace, schedule: ScheduleConfig, *, strict: bool
) -> Iterator[None]:
    """A piece at each step, what is needed first first. Between two of them nothing is left in the caches."""
    chunk, most_decodes = schedule.chunk_size or model.config.max_position, schedule.max_running
    recorded = model.recorded
    if recorded is not None and schedule.chunk_size:  # whole prompts are as long as they are
        # Chunks that begin a prompt, and that go on; then, for each number of rows that they have with decodes beside
        # them, as few as have it. What comes twice is recorded.
        beside = {canon.prompt_rows(chunk + count): count for count in range(most_decodes, 0, -1)}
        for past, num_decodes in ((0, 0), (chunk, 0), *(2 * [(chunk, count) for count in beside.values()])):
            _rehearse(model, canon, space, chunk, past, num_decodes, strict=strict)
            yield
    yield from model.preparations(space.tensors, chunk)
    if recorded is not None:
        is_canonical = strict and canon.free_decodes == 0
        yield from recorded.record_decodes(most_decodes, space.tensors, is_canonical=is_canonical)


def _rehearse(
    model: Decoder,
    canon: RowLaw,
    space: CacheSpace,
    num_tokens: int,
    past: int,
    num_decodes: int,
    *,
    strict: bool,
) -> None:
    """A chunk after such a past, whose last token is sampled from, and decodes beside it; where there is room without
    giving up what is cached."""
    num_slots = 2 * (1 + num_decodes)
    end = past + num_tokens
    has_cached = any(pool.num_idle for pool in space.pools)
    num_wanted = end + BLOCK_TOKENS * num_decodes
    if has_cached or end > model.config.max_position or not space.has_room(num_wanted, num_slots):
        return
    with ExitStack() as stack:

        def new(start: int) -> SequenceCache:
            cache = space.new_sequence(num_tokens=end)
            stack.callback(cache.free)
            stack.callback(cache.abort)
            if start:
                cache.reserve(0, [start])
                cache.commit(start)
            return cache

        reader = new(past)
        inputs = [_input(new(0), 1, is_prompt=False) for _ in range(num_decodes)]
        inputs.append(_input(reader, num_tokens, is_prompt=True))
        _run(model, canon, space, inputs, strict=strict)


def _input(cache: SequenceCache, num_tokens: int, *, is_prompt: bool) -> SpanInput:
    span = Span(cache.num_tokens, cache.num_tokens + num_tokens)
    state = cache.reserve(span.start, [span.end])
    return SpanInput(span, [0] * num_tokens, cache.kv_groups, is_prompt, True, state)


def _run(
    model: Decoder, canon: RowLaw, space: CacheSpace, inputs: Sequence[SpanInput], *, strict: bool
) -> None:
    logits = model.forward(build_batch(inputs, canon=canon, strict=strict), space.tensors)
    assert logits is not None
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)):
        sample_rows(logits, [PlainRow(Sampler(params))] * len(inputs))
