"""The same bits: a prompt's logits and its whole K/V cache do not depend on how it was cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import Extent
from penstock.cache.space import CacheSpace
from penstock.cache.tensors import KV
from penstock.engine.run import Run
from penstock.kernels.native.kernels import NativeKernels
from penstock.kernels.probe import ProbeResult
from penstock.kernels.reference.kernels import TorchKernels
from penstock.models.decoder import Decoder
from tests.oracle import load_model, make_oracle, random_prompt, run_prompt

DTYPES = (torch.float32, torch.bfloat16)
CHUNK_SIZES = (1, 2, 3, 7, 64, 100, 512)
MODELS = {
    "llama": ("llama", {}),
    "group-of-8": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}),
    "odd-sizes": ("llama", {"head_dim": 34, "hidden_size": 54, "intermediate_size": 77}),
    "qwen2": ("qwen2", {}),
    "windows": ("mistral", {"sliding_window": 100}),
    "some-windows": (
        "qwen3",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 65, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}),
}


def cached(run: Run) -> list[KV]:
    """All keys and values of a run's prompt, those of windows as far back as they see from its end."""
    found = []
    for blocks, group in zip(run.cache.kv_groups, run.space.tensors.kv_groups, strict=True):
        window = group.spec.window
        first = max(run.prompt_length - window, 0) if window else 0
        found += [layer.read(blocks.locate(first, run.prompt_length)) for layer in group.layers]
    return found


def assert_same_bits(run: Run, whole: Run) -> None:
    assert run.logits is not None
    assert whole.logits is not None
    for ours, theirs in zip(cached(run), cached(whole), strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    assert torch.equal(run.logits, whole.logits)


def fragmented_space(model: Decoder, num_tokens: int) -> CacheSpace:
    """Room for a sequence, in single blocks that do not touch."""
    num_blocks = 2 * -(-num_tokens // 64)
    space = CacheSpace.for_tokens(model, num_blocks * 64)
    for pool in space.pools:
        pool.allocate(num_blocks)
        pool.release([Extent(block, block + 1) for block in range(0, num_blocks, 2)])
    return space


@pytest.fixture(scope="module", params=[(name, dtype) for name in MODELS for dtype in DTYPES], ids=str)
def model(request: pytest.FixtureRequest) -> Decoder:
    name, dtype = request.param
    family, overrides = MODELS[name]
    return load_model(make_oracle(family, **overrides).folder, dtype)


@pytest.mark.parametrize("num_tokens", [1, 65, 300, 700])
def test_any_chunk_size(model: Decoder, num_tokens: int) -> None:
    prompt = random_prompt(num_tokens)
    whole = run_prompt(model, prompt)
    for chunk_size in CHUNK_SIZES if num_tokens < 500 else (7, 64, 100, 512):
        if chunk_size <= num_tokens:
            assert_same_bits(run_prompt(model, prompt, chunk_size=chunk_size), whole)


def test_overlap_rewrites_the_same_bits(model: Decoder) -> None:
    for num_tokens, chunk_size, overlap in ((300, 64, 1), (300, 100, 37), (90, 7, 6)):
        prompt = random_prompt(num_tokens)
        whole = run_prompt(model, prompt)
        assert_same_bits(run_prompt(model, prompt, chunk_size=chunk_size, overlap=overlap), whole)


def test_several_extents(model: Decoder) -> None:
    prompt = random_prompt(600)
    whole = run_prompt(model, prompt)
    for chunk_size in (0, 100, 512):
        space = fragmented_space(model, 640)
        run = run_prompt(model, prompt, chunk_size=chunk_size, space=space)
        assert len(run.cache.blocks.extents) > 1
        assert_same_bits(run, whole)
    expected = run_prompt(model, prompt, num_tokens=8).generated
    fragmented = run_prompt(model, prompt, num_tokens=8, space=fragmented_space(model, 640))
    assert fragmented.generated == expected


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_schedule(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(MODELS)))
    family, overrides = MODELS[name]
    model = load_model(make_oracle(family, **overrides).folder, data.draw(st.sampled_from(DTYPES)))
    prompt = random_prompt(data.draw(st.integers(2, 900)), seed=data.draw(st.integers(0, 9)))
    cuts = data.draw(st.sets(st.integers(1, len(prompt) - 1), max_size=12))
    run = run_prompt(model, prompt, chunk_ends=[*sorted(cuts), len(prompt)])
    assert_same_bits(run, run_prompt(model, prompt))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_plain_products_of_the_library_have_torchs_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prompts, and in decodes, whose layers may be one call."""
    family, overrides = MODELS[name]
    folder, prompt = make_oracle(family, **overrides).folder, random_prompt(150)

    def run() -> Run:
        return run_prompt(load_model.__wrapped__(folder, torch.bfloat16), prompt, chunk_size=64, num_tokens=8)

    ours = run()
    monkeypatch.setattr(NativeKernels, "pack", TorchKernels.pack)
    torchs = run()
    assert_same_bits(ours, torchs)
    assert ours.generated == torchs.generated


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_in_slabs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only a fixed number of rows is row-invariant, a prompt runs in slabs of that many."""
    monkeypatch.setattr(NativeKernels, "pack", TorchKernels.pack)  # torch multiplies
    oracle = make_oracle("qwen3")
    model = load_model.__wrapped__(oracle.folder, dtype)
    canon = ProbeResult(128, 128, True, True, True).bind(model.kernels)
    rows_seen: set[int] = set()
    kernels = model.kernels
    assert isinstance(kernels, TorchKernels)
    product = kernels._product

    def recorded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if weight is not model._head:
            rows_seen.add(x.shape[0])
        return product(x, weight, bias)

    monkeypatch.setattr(kernels, "_product", recorded)
    prompt = random_prompt(300)
    whole = run_prompt(model, prompt, canon=canon)
    for chunk_size in (7, 128, 200):
        assert_same_bits(run_prompt(model, prompt, canon=canon, chunk_size=chunk_size), whole)
    assert rows_seen == {128}
    if dtype == torch.float32:
        assert whole.logits is not None
        assert torch.allclose(whole.logits, oracle.logits(prompt), atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_any_number_of_threads(num_threads: int, dtype: torch.dtype) -> None:
    """How element-wise passes are split over threads depends on the rows; no row may notice."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        oracle = make_oracle("llama", intermediate_size=1090, num_hidden_layers=3)
        # Not from the test session's cache: the probe must see this number of threads.
        model = load_model.__wrapped__(oracle.folder, dtype)
        prompt = random_prompt(520)
        whole = run_prompt(model, prompt)
        for chunk_size in (33, 61, 200, 512):
            assert_same_bits(run_prompt(model, prompt, chunk_size=chunk_size), whole)
        assert_same_bits(run_prompt(model, prompt, chunk_ends=range(480, 521)), whole)
    finally:
        torch.set_num_threads(before)
