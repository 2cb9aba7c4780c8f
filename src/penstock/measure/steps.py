"""Times single steps of the engine, at any past and in any order: each is run, and none is committed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.cache import BLOCK_TOKENS, SequenceCache
from penstock.cache.space import CacheSpace
from penstock.engine.sampler import Sampler, SamplingParams
from penstock.engine.sampling import PlainRow, sample_rows
from penstock.engine.step import SpanInput, build_batch, parts_of
from penstock.kernels.device import device_kind
from penstock.models.decoder import Decoder
from penstock.plan.grids import RowLaw
from penstock.plan.step import Span, StepShape

_READ_CHUNK = 512


@dataclass(frozen=True)
class StepSpec:
    """A step to be timed: a chunk (none: 0 tokens) after a past, and decodes, each after a past of its own."""

    num_tokens: int
    past: int
    num_decodes: int = 0
    decode_past: int = 0

    @property
    def is_single_decode(self) -> bool:
        """Then it is the long sequence that decodes, after any past; those beside chunks are short, all alike."""
        return self.num_tokens == 0 and self.num_decodes == 1

    @property
    def long_past(self) -> int:
        """Tokens of the long sequence that must have been read."""
        return self.decode_past if self.is_single_decode else self.past

    @property
    def shape(self) -> StepShape:
        return StepShape.of_chunk(
            self.num_tokens,
            self.past,
            num_decodes=self.num_decodes,
            decode_pasts=self.num_decodes * self.decode_past,
        )


class StepTimer:
    """One long sequence, whose past a step may begin anywhere in, and short ones that decode beside it."""

    def __init__(
        self, model: Decoder, canon: RowLaw, prompt: Sequence[int], specs: Sequence[StepSpec]
    ) -> None:
        """Reads what the steps need to be in the cache. `prompt` is as long as the furthest of them."""
        self._model = model
        self._canon = canon
        self._prompt = prompt
        self._sampler = Sampler(SamplingParams())
        short = [spec for spec in specs if not spec.is_single_decode]
        num_short = max((spec.num_decodes for spec in short), default=0)
        short_past = max((spec.decode_past for spec in short), default=0)
        longest = max(spec.long_past + max(spec.num_tokens, 1) for spec in specs)
        num_blocks = -(-longest // BLOCK_TOKENS) + num_short * -(-(short_past + 1) // BLOCK_TOKENS)
        self.space = CacheSpace.for_tokens(model, num_blocks * BLOCK_TOKENS, num_slots=2 * (1 + num_short))
        self.long = self.space.new_sequence()
        self.short = [self.space.new_sequence() for _ in range(num_short)]
        self._read(self.long, max(spec.long_past for spec in specs))
        for cache in self.short:
            self._read(cache, short_past)

    def seconds(self, spec: StepSpec, *, strict: bool = False) -> float:
        """The time of one step, built, run and sampled from, as in the engine. It is not committed: the sequences
        stand where they stood."""
        started = time.perf_counter()
        decoding = [self.long] if spec.is_single_decode else self.short[: spec.num_decodes]
        inputs = [self._input(self.long, spec.past, spec.num_tokens)] if spec.num_tokens else []
        inputs += [self._input(cache, spec.decode_past, 1, is_prompt=False) for cache in decoding]
        self._forward(inputs, strict=strict)
        seconds = time.perf_counter() - started
        for cache in (self.long, *decoding) if spec.num_tokens else decoding:
            cache.abort()
        return seconds

    def _read(self, cache: SequenceCache, num_tokens: int) -> None:
        while (start := cache.num_tokens) < num_tokens:
            size = min(_READ_CHUNK, num_tokens - start)
            self._forward([self._input(cache, start, size)])
            cache.commit(start + size)

    def _forward(self, inputs: Sequence[SpanInput], *, strict: bool = False) -> None:
        for part in parts_of(inputs, self._canon.free_decodes if strict else 0):
            batch = build_batch(part.inputs, canon=self._canon, strict=strict)
            logits = self._model.forward(batch, self.space.tensors)
            if logits is not None:
                sample_rows(logits, [PlainRow(self._sampler)] * len(logits))
        device_kind(self._model.device).synchronize()

    def _input(self, cache: SequenceCache, start: int, size: int, *, is_prompt: bool = True) -> SpanInput:
        """A part of the prompt as a chunk, after which nothing is sampled, or as a decode."""
        span = Span(start, start + size)
        for blocks in cache.kv_groups:
            blocks.reserve(span.end)
        state = None
        if cache.state is not None:
            # The step may begin before the sequence's end. It begins with the state that there is: a state's values
            # have no part in the time.
            state = cache.state.reserve(cache.num_tokens, [cache.num_tokens + size])
            state = replace(state, writes=tuple(replace(write, end=span.end) for write in state.writes))
        tokens = list(self._prompt[span.start : span.end])
        return SpanInput(span, tokens, cache.kv_groups, is_prompt, not is_prompt, state)
