"""What the largest step of a service needs on its device, measured before there is a cache."""

from penstock.cache import BLOCK_TOKENS, SequenceCache
from penstock.cache.space import CacheSpace
from penstock.engine.batch import SpanInput, build_batch
from penstock.engine.sampler import Sampler, SamplingParams
from penstock.engine.sampling import PlainRow, sample_rows
from penstock.errors import CacheFullError, is_out_of_memory
from penstock.kernels.device import device_kind
from penstock.models.decoder import Decoder
from penstock.plan.grids import RowLaw
from penstock.plan.request import Span


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
    return SpanInput(span, [0] * num_tokens, cache.blocks, is_prompt, wants_logits=True, state=state)


def _run(model: Decoder, canon: RowLaw, space: CacheSpace, inputs: list[SpanInput]) -> None:
    logits = model.forward(build_batch(inputs, canon=canon), space.tensors)
    assert logits is not None
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.9))  # the way that takes the most
    sample_rows(logits, [PlainRow(sampler)] * len(inputs))
    device_kind(model.device).synchronize()
