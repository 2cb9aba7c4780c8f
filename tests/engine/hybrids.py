"""Hybrids to test with, and a sequence that is run span by span, with steps that fail and places to come back to."""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.cache import EMPTY, SequenceCache, SlotPool
from penstock.cache.space import CacheSpace
from penstock.engine.step import SpanInput, build_batch
from penstock.models.decoder import Decoder
from penstock.plan import Span
from tests.oracle import Oracle, canon_of, load_model, make_oracle

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5, state in the last layer": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ("linear_attention", "full_attention", "linear_attention"),
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5, 3 taps": (
        "qwen3_5_text",
        {"linear_conv_kernel_dim": 3, "linear_num_key_heads": 1, "linear_value_head_dim": 16},
    ),
    # Heads of 128 and whole lanes everywhere, as published models have them.
    "qwen3_5, published widths": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 2,
            "layer_types": ("linear_attention", "full_attention"),
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, some dense layers": (
        "qwen3_next",
        {"decoder_sparse_step": 2, "mlp_only_layers": (3,), "norm_topk_prob": False},
    ),
}
# Mixtures of experts without recurrent state.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, normalised, one dense layer": (
        "qwen3_moe",
        {"norm_topk_prob": True, "mlp_only_layers": (0,), "num_experts": 5},
    ),
}


def hybrid_oracle(name: str) -> Oracle:
    family, overrides = (MODELS | MIXTURES)[name]
    return make_oracle(family, **overrides)


def hybrid(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(hybrid_oracle(name).folder, dtype)


class Tape:
    """One sequence and the tokens it will read. Every call runs real spans through the model."""

    def __init__(
        self, model: Decoder, tokens: list[int], *, num_generated: int = 0, space: CacheSpace | None = None
    ) -> None:
        self.model = model
        self.tokens = list(tokens)
        self.prompt_length = len(tokens)
        self.space = space or CacheSpace.for_tokens(model, len(tokens) + num_generated, num_slots=8)
        self.cache = self.space.new_sequence()
        self.logits: torch.Tensor | None = None

    def run(self, end: int, *, fails: bool = False) -> None:
        """Run the prompt up to `end`; a step that fails does all its work, and is aborted."""
        start = self.cache.num_tokens
        logits = self._forward(Span(start, end), is_prompt=True)
        if fails:
            self.cache.abort()
        else:
            self.cache.commit(end)
            self.logits = logits

    def generate(self, num_tokens: int, *, failures: frozenset[int] = frozenset()) -> list[int]:
        """Greedy tokens after the prompt. Steps in `failures` are aborted once and tried again."""
        for step in range(num_tokens):
            assert self.logits is not None
            self.tokens.append(int(self.logits.argmax()))
            end = len(self.tokens)
            if step in failures:
                self._forward(Span(end - 1, end), is_prompt=False)
                self.cache.abort()
            self.logits = self._forward(Span(end - 1, end), is_prompt=False)
            self.cache.commit(end)
        return self.tokens[self.prompt_length :]

    def snapshot(self) -> "Snapshot":
        assert self.cache.state is not None
        assert self.space.slots is not None
        return Snapshot(self.cache.num_tokens, self.cache.state.slot, self.space.slots)

    def restore(self, snapshot: "Snapshot") -> None:
        """Go back to where a snapshot was taken, as long as the sequence has not been shorter since."""
        assert self.cache.state is not None
        self.cache.state.free()
        if snapshot.slot != EMPTY:
            self.cache.state.adopt(snapshot.num_tokens, snapshot.slot)
        self.cache.blocks.truncate(snapshot.num_tokens)

    def states(self) -> list[torch.Tensor]:
        """Tail and matrix of every layer where the sequence stands, copied. None where the model has no state."""
        return states_of(self.space, self.cache)

    def keys_and_values(self) -> list[torch.Tensor]:
        return keys_and_values_of(self.space, self.cache, self.cache.num_tokens)

    def reserve(self, span: Span, *, is_prompt: bool) -> SpanInput:
        """A step over the span, its places taken; it ends in a commit or an abort."""
        state = self.cache.reserve(span.start, [span.end])
        wants_logits = not is_prompt or span.end == self.prompt_length
        tokens = self.tokens[span.start : span.end]
        cache = self.cache
        return SpanInput(span, tokens, cache.kv_groups, is_prompt, wants_logits, state)

    def _forward(self, span: Span, *, is_prompt: bool) -> torch.Tensor | None:
        item = self.reserve(span, is_prompt=is_prompt)
        batch = build_batch([item], canon=canon_of(self.model))
        logits = self.model.forward(batch, self.space.tensors)
        return None if logits is None else logits[0]


@dataclass(frozen=True)
class Snapshot:
    """A position to come back to: the slot with its state is pinned until `release`."""

    num_tokens: int
    slot: int
    pool: SlotPool

    def __post_init__(self) -> None:
        if self.slot != EMPTY:
            self.pool.retain(self.slot)

    def release(self) -> None:
        if self.slot != EMPTY:
            self.pool.release(self.slot)


def states_of(space: CacheSpace, cache: SequenceCache) -> list[torch.Tensor]:
    """Tail and matrix of every layer where a sequence stands, copied."""
    if cache.state is None:
        return []
    layers, slot = space.tensors.states.layers, cache.state.slot
    return [part.clone() for layer in layers for part in (layer.tail(slot), layer.matrix(slot))]


def keys_and_values_of(space: CacheSpace, cache: SequenceCache, num_tokens: int) -> list[torch.Tensor]:
    """Keys and values of a sequence's first tokens in every layer, copied."""
    places = cache.blocks.locate(0, num_tokens)
    read = [layer.read(places) for layer in space.tensors.kv.layers]
    return [part.clone() for cached in read for part in (cached.keys, cached.values)]


def assert_all_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for index, (part, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(part, other), index


def assert_all_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Up to rounding in float32, relative to the largest value of each tensor."""
    for index, (part, other) in enumerate(zip(ours, theirs, strict=True)):
        if part.numel():  # a short convolution has no matrix
            assert float((part - other).abs().max()) <= 1e-4 * float(other.abs().max()), index


def assert_all_free(space: CacheSpace) -> None:
    """Every block and every slot was given back."""
    space.blocks.check_integrity()
    assert space.blocks.num_free == space.blocks.num_blocks
    if space.slots is not None:
        space.slots.check_integrity()
        assert space.slots.num_free == space.slots.num_slots
