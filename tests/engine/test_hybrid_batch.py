"""Batched is alone: spans of several sequences in one pass do not notice each other."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.space import CacheSpace
from penstock.engine.step import build_batch
from penstock.kernels.probe import ProbeResult
from penstock.models.decoder import Decoder
from penstock.plan import Span
from penstock.plan.grids import RowLaw
from tests.engine.hybrids import (
    Tape,
    assert_all_close,
    assert_all_equal,
    assert_all_free,
    hybrid,
    hybrid_oracle,
)
from tests.oracle import canon_of, load_model, random_prompt

DTYPES = (torch.float32, torch.bfloat16)
# A hybrid, one whose logits come right from a recurrent layer, one with experts, and experts without state.
NAMES = ("qwen3_5", "qwen3_5, state in the last layer", "qwen3_next", "qwen3_moe")
NUM_DECODES = 2


@dataclass
class Request:
    """A prompt, where its chunks end, and the tokens that are decoded after it whatever the logits say."""

    tape: Tape
    ends: list[int]
    after_prompt: list[torch.Tensor] = field(default_factory=list)  # logits, keys and values, states
    decoded: list[torch.Tensor] = field(default_factory=list)  # the logits of each

    @property
    def is_done(self) -> bool:
        return len(self.decoded) == NUM_DECODES

    @property
    def is_prompt(self) -> bool:
        return bool(self.ends)

    def next_span(self) -> Span:
        start = self.tape.cache.num_tokens
        if self.ends:
            return Span(start, self.ends[0])
        self.tape.tokens.append(start % 200)
        return Span(start, start + 1)

    def commit(self, span: Span, logits: torch.Tensor | None) -> None:
        self.tape.cache.commit(span.end)
        if not self.ends:
            assert logits is not None
            self.decoded.append(logits)
            return
        self.ends.pop(0)
        if not self.ends:
            assert logits is not None
            self.after_prompt = [logits, *self.tape.keys_and_values(), *self.tape.states()]


def step(model: Decoder, space: CacheSpace, requests: list[Request], canon: RowLaw | None = None) -> None:
    """The next span of each request, all in one pass."""
    is_prompt = [request.is_prompt for request in requests]
    spans = [request.next_span() for request in requests]
    items = [
        request.tape.reserve(span, is_prompt=prompt)
        for request, span, prompt in zip(requests, spans, is_prompt, strict=True)
    ]
    batch = build_batch(items, canon=canon or canon_of(model))
    logits = model.forward(batch, space.tensors)
    rows = iter(() if logits is None else logits)
    for request, span, item in zip(requests, spans, items, strict=True):
        request.commit(span, next(rows) if item.wants_logits else None)
    assert next(rows, None) is None


def run_alone(model: Decoder, prompt: list[int], ends: list[int], canon: RowLaw | None = None) -> Request:
    request = Request(Tape(model, prompt, num_generated=NUM_DECODES), list(ends))
    while not request.is_done:
        step(model, request.tape.space, [request], canon)
    return request


def cut(num_tokens: int, size: int) -> list[int]:
    return [*range(size, num_tokens, size), num_tokens]


def check_two_prompts_and_a_decode(model: Decoder, canon: RowLaw) -> None:
    prompts = [random_prompt(num_tokens, seed=num_tokens) for num_tokens in (70, 300, 201)]
    sizes = (64, 128, 64)
    space = CacheSpace.for_tokens(model, 3 * 320, num_slots=6)
    requests = [
        Request(Tape(model, prompt, space=space), cut(len(prompt), size))
        for prompt, size in zip(prompts, sizes, strict=True)
    ]
    decoder, *others = requests
    while decoder.is_prompt:
        step(model, space, [decoder], canon)
    # The decode stands between two chunks, so rows before it and after it belong to others.
    step(model, space, [others[0], decoder, others[1]], canon)
    step(model, space, [others[1], others[0], decoder], canon)
    while not others[0].is_done or not others[1].is_done:
        step(model, space, [request for request in others if not request.is_done], canon)
    for request, prompt, size in zip(requests, prompts, sizes, strict=True):
        alone = run_alone(model, prompt, cut(len(prompt), size), canon)
        assert_all_equal(request.after_prompt, alone.after_prompt)
        if model.dtype == torch.float32:
            assert_all_close(request.decoded, alone.decoded)
            assert_all_close(request.tape.keys_and_values(), alone.tape.keys_and_values())
            assert_all_close(request.tape.states(), alone.tape.states())
        request.tape.cache.free()
    assert_all_free(space)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_two_prompts_and_a_decode(name: str, dtype: torch.dtype) -> None:
    """A prompt's chunks have the same bits beside others' chunks and decodes. A decode is a product of more rows
    beside others than alone, which is rounding."""
    model = hybrid(name, dtype)
    check_two_prompts_and_a_decode(model, canon_of(model))


@pytest.mark.parametrize("name", NAMES)
def test_in_slabs(name: str) -> None:
    """Where rows are padded up to a fixed number of them, those of all the spans are padded together."""
    # Not from the test session's cache: its kernels are set up otherwise.
    model = load_model.__wrapped__(hybrid_oracle(name).folder, torch.float32)
    check_two_prompts_and_a_decode(model, ProbeResult(128, 128, True, True, True).bind(model.kernels))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_mixture_of_spans(data: st.DataObject) -> None:
    """Requests join and leave passes in any order; their places lie scattered over one cache."""
    model = hybrid(data.draw(st.sampled_from(NAMES)), data.draw(st.sampled_from(DTYPES)))
    lengths = data.draw(st.lists(st.integers(1, 260), min_size=2, max_size=4))
    sizes = [data.draw(st.sampled_from([64, 128, 192])) for _ in lengths]
    prompts = [random_prompt(num_tokens, seed=index) for index, num_tokens in enumerate(lengths)]
    space = CacheSpace.for_tokens(model, 320 * len(lengths), num_slots=2 * len(lengths))
    requests = [
        Request(Tape(model, prompt, space=space), cut(len(prompt), size))
        for prompt, size in zip(prompts, sizes, strict=True)
    ]
    while waiting := [request for request in requests if not request.is_done]:
        chosen = data.draw(st.permutations(range(len(waiting))))
        num_chosen = data.draw(st.integers(1, len(waiting)))
        step(model, space, [waiting[index] for index in chosen[:num_chosen]])
    for request, prompt in zip(requests, prompts, strict=True):
        # In one piece: on the grid, how each was cut is no matter either.
        alone = run_alone(model, prompt, [len(prompt)])
        assert_all_equal(request.after_prompt, alone.after_prompt)
        if model.dtype == torch.float32:
            assert_all_close(request.decoded, alone.decoded)
        request.tape.cache.free()
    assert_all_free(space)
