"""Hybrids have the same bits for every schedule whose chunks end on multiples of 64, and rounding for all others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.native.kernels import NativeKernels
from penstock.kernels.probe import ProbeResult, measure
from penstock.kernels.reference import delta as torch_delta
from penstock.kernels.reference.kernels import TorchKernels
from penstock.models.decoder import Decoder
from tests.engine.hybrids import MIXTURES, MODELS, Tape, assert_all_equal, hybrid, hybrid_oracle
from tests.oracle import load_model, random_prompt, run_prompt

DTYPES = (torch.float32, torch.bfloat16)


def read(model: Decoder, prompt: list[int], ends: list[int]) -> Tape:
    tape = Tape(model, prompt)
    for end in ends:
        tape.run(end)
    return tape


def assert_same_bits(ours: Tape, theirs: Tape) -> None:
    assert ours.logits is not None
    assert theirs.logits is not None
    assert_all_equal(ours.keys_and_values() + ours.states(), theirs.keys_and_values() + theirs.states())
    assert torch.equal(ours.logits, theirs.logits)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_chunks_on_the_grid(data: st.DataObject) -> None:
    """Logits, every key and value, and every state."""
    model = hybrid(data.draw(st.sampled_from(sorted(MODELS))), data.draw(st.sampled_from(DTYPES)))
    prompt = random_prompt(data.draw(st.integers(2, 900)), seed=data.draw(st.integers(0, 9)))
    cuts = data.draw(st.sets(st.integers(1, max(len(prompt) // 64, 1)), max_size=8))
    ends = [64 * cut for cut in sorted(cuts) if 64 * cut < len(prompt)]
    assert_same_bits(read(model, prompt, [*ends, len(prompt)]), read(model, prompt, [len(prompt)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_at_any_chunk_size(name: str, dtype: torch.dtype) -> None:
    """Without recurrent state there is no grid: which tokens share an expert's product must not matter."""
    prompt = random_prompt(300)
    model = hybrid(name, dtype)
    whole = read(model, prompt, [300])
    for size in (1, 3, 7, 64, 100):
        assert_same_bits(read(model, prompt, [*range(size, 300, size), 300]), whole)


@pytest.mark.parametrize("name", MODELS)
def test_chunks_off_the_grid_differ_by_rounding(name: str) -> None:
    prompt = random_prompt(200)
    whole = read(hybrid(name), prompt, [200])
    for size in (1, 3, 65, 100):
        tape = read(hybrid(name), prompt, [*range(size, 200, size), 200])
        for ours, theirs in zip(tape.states(), whole.states(), strict=True):
            assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_overlap_on_the_grid(dtype: torch.dtype) -> None:
    model = hybrid("qwen3_5", dtype)
    prompt = random_prompt(500)
    whole = run_prompt(model, prompt).logits
    assert whole is not None
    logits = run_prompt(model, prompt, chunk_size=192, overlap=64).logits
    assert logits is not None
    assert torch.equal(logits, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_5, published widths"])
def test_any_number_of_threads(name: str, num_threads: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        # Not from the test session's cache: the probe must see this number of threads.
        model = load_model.__wrapped__(hybrid_oracle(name).folder, dtype)
        prompt = random_prompt(520)
        whole = read(model, prompt, [520])
        for size in (64, 192):
            assert_same_bits(read(model, prompt, [*range(size, 520, size), 520]), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("expert_slab", [0, 32])
def test_products_in_slabs(expert_slab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only a fixed number of rows is row-invariant, an expert's tokens are padded up to one as well."""
    monkeypatch.setattr(NativeKernels, "stacks_experts", lambda *_: False)  # one by one
    monkeypatch.setattr(NativeKernels, "pack", TorchKernels.pack)  # torch multiplies
    model = load_model.__wrapped__(hybrid_oracle("qwen3_next").folder, dtype)
    canon = ProbeResult(128, 128, True, True, True, expert_slab=expert_slab).bind(model.kernels)
    kernels = model.kernels
    assert isinstance(kernels, TorchKernels)
    product = kernels._product
    rows_seen: set[int] = set()

    def recorded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if weight is not model._head:
            rows_seen.add(x.shape[0])
        return product(x, weight, bias)

    monkeypatch.setattr(kernels, "_product", recorded)
    prompt = random_prompt(300)
    whole = run_prompt(model, prompt, canon=canon).logits
    assert whole is not None
    for chunk_size in (64, 128):
        logits = run_prompt(model, prompt, canon=canon, chunk_size=chunk_size).logits
        assert logits is not None
        assert torch.equal(logits, whole)
    assert rows_seen == {128, expert_slab or 128}


def test_probe_notices_blocks_that_depend_on_the_span(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid("qwen3_5")
    shapes = model.probe_shapes
    assert measure(model.kernels, shapes, model.dtype, model.device).same_bits
    monkeypatch.setattr(torch_delta, "BLOCK", 128)
    monkeypatch.setattr(torch_delta, "_constants", torch_delta._constants.__wrapped__)
    result = measure(model.kernels, shapes, model.dtype, model.device)
    assert not result.recurrence_holds
    assert not result.same_bits
