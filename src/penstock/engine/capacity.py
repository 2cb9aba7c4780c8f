"""How large a service's cache may be, where nobody says it: what is free, less what steps were measured to need."""

from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.cache import BLOCK_TOKENS, SequenceCache
from penstock.cache.space import CacheSpace
from penstock.cache.tensors import CacheSpec
from penstock.engine.sampler import Sampler, SamplingParams
from penstock.engine.sampling import PlainRow, sample_rows
from penstock.engine.step import SpanInput, build_batch
from penstock.errors import CacheFullError, MemoryExhaustedError, is_out_of_memory
from penstock.kernels.device import device_kind
from penstock.models.decoder import Decoder
from penstock.plan import format_bytes
from penstock.plan.admission import WindowRoom
from penstock.plan.grids import RowLaw
from penstock.plan.sizing import largest_that
from penstock.plan.step import Span

# The share of the free memory that a cache takes: the rest is for activations, and for others.
_SHARE = 0.5
# A GPU is nobody else's, and what steps need there was measured: that is set aside, and more than that, for what was
# not (graphs, plans of libraries, a past that lies in pieces).
_SHARE_ON_GPU = 0.9
_STEP_MARGIN, _MARGIN_BYTES = 1.25, 256 << 20


class StageMemory(Protocol):
    """What another stage of the model says of its memory, and of its part of a cache."""

    @property
    def free_bytes(self) -> int | None: ...

    @property
    def cache(self) -> CacheSpec: ...


def cache_tokens_elsewhere(
    stages: Sequence[StageMemory], num_slots: int, most_tokens: int, windows: WindowRoom | None = None
) -> int:
    """Places in half of the memory that is free on the machine of each of these stages: those of the tightest."""

    def fits(num_blocks: int) -> bool:
        return all(
            stage.cache.num_bytes(num_blocks, num_slots, windows) <= stage.free_bytes * _SHARE
            for stage in stages
            if stage.free_bytes is not None
        )

    most_tokens = min(most_tokens, largest_that(fits, 0, -(-most_tokens // BLOCK_TOKENS) + 1) * BLOCK_TOKENS)
    if most_tokens < BLOCK_TOKENS:
        raise MemoryExhaustedError(
            "there is no memory for a cache on the machine of a stage: free some there"
        )
    return most_tokens


def cache_tokens_that_fit(
    spec: CacheSpec,
    num_slots: int,
    most_tokens: int,
    device: torch.device,
    step_bytes: int = 0,
    beside: Sequence[StageMemory] = (),
    windows: WindowRoom | None = None,
) -> int:
    """Places for keys and values in half of the memory that is free, beside the states; no more than are of use. On a
    GPU, in most of what steps leave that were measured to need `step_bytes`. Stages `beside` share the memory."""
    specs = (spec, *(stage.cache for stage in beside))
    states_bytes = num_slots * sum(each.bytes_per_slot for each in specs)
    free_bytes = device_kind(device).free_bytes()
    if free_bytes is None:
        return most_tokens
    is_gpu = device_kind(device).has_own_memory
    needed_bytes = int(_STEP_MARGIN * step_bytes) + _MARGIN_BYTES if is_gpu else 0
    share = _SHARE_ON_GPU if is_gpu else _SHARE
    room_bytes = int(max(free_bytes - needed_bytes, 0) * share) - states_bytes

    def fits(num_blocks: int) -> bool:
        return sum(each.num_bytes(num_blocks, 0, windows) for each in specs) <= room_bytes

    if not fits(1):
        needed = f" beside {format_bytes(needed_bytes)} that a step needs" if needed_bytes else ""
        raise MemoryExhaustedError(
            f"there is no memory for a cache: {format_bytes(free_bytes)} are free, of which {share:.0%} may be "
            f"used{needed}, and {num_slots} recurrent states take {format_bytes(states_bytes)}; free some, or lower "
            f"max_running"
        )
    num_blocks = largest_that(fits, 1, -(-most_tokens // BLOCK_TOKENS) + 1)
    return min(num_blocks * BLOCK_TOKENS, most_tokens)


def measured_step_bytes(model: Decoder, canon: RowLaw, num_tokens: int, num_decodes: int) -> int:
    """The most that is allocated beside weights and cache by a step that reads so many tokens, after others, and
    decodes beside them. Where memory does not allow it, that of the longest chunk that it allows, by halves."""
    num_tokens = min(num_tokens, model.config.max_position)
    while True:
        try:
            return _step_bytes(model, canon, num_tokens, num_decodes)
        except Exception as error:
            if num_tokens == 1 or not (isinstance(error, CacheFullError) or is_out_of_memory(error)):
                raise
            device_kind(model.device).release(error)
            num_tokens = -(-num_tokens // 2)


def _step_bytes(model: Decoder, canon: RowLaw, num_tokens: int, num_decodes: int) -> int:
    num_before = min(canon.tile_size or BLOCK_TOKENS, model.config.max_position - num_tokens)
    blocks = -(-(num_before + num_tokens) // BLOCK_TOKENS) + num_decodes
    space = CacheSpace.for_tokens(model, blocks * BLOCK_TOKENS, num_slots=2 * (1 + num_decodes))
    reader, *decoders = [space.new_sequence() for _ in range(1 + num_decodes)]
    device = device_kind(model.device)
    held = device.memory_bytes() or 0
    device.reset_peak()
    if num_before:
        _run(model, canon, space, [_span(reader, num_before, is_prompt=True)])
        reader.commit(num_before)
    spans = [_span(reader, num_tokens, is_prompt=True)]
    _run(model, canon, space, [*spans, *(_span(decoder, 1, is_prompt=False) for decoder in decoders)])
    return max(device.peak_bytes() - held, 0)


def _span(cache: SequenceCache, num_tokens: int, *, is_prompt: bool) -> SpanInput:
    span = Span(cache.num_tokens, cache.num_tokens + num_tokens)
    state = cache.reserve(span.start, [span.end])
    tokens = [0] * num_tokens
    return SpanInput(span, tokens, cache.kv_groups, is_prompt, True, state)


def _run(model: Decoder, canon: RowLaw, space: CacheSpace, inputs: list[SpanInput]) -> None:
    batch = build_batch(inputs, canon=canon)
    # What another stage would hand on.
    shape = len(batch.token_ids), model.config.hidden_size
    residual = torch.zeros(shape, dtype=model.dtype, device=model.device) if model.first_layer else None
    logits = model.forward(batch, space.tensors, residual)
    assert logits is not None
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.9))  # the way that takes the most
    sample_rows(logits, [PlainRow(sampler)] * len(inputs))
    device_kind(model.device).synchronize()
