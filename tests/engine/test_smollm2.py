"""The laws on a real model: SmolLM2, its own weights, real text."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels.interface import select_kernels
from penstock.kernels.reference.kernels import TorchKernels
from penstock.measure.prompts import text_tokens
from penstock.measure.transformers_model import load_transformers
from penstock.models.decoder import Decoder
from penstock.models.loading import load_decoder
from penstock.models.opened import OpenedModel, open_model
from penstock.plan.grids import RowLaw
from tests.engine.test_parity import relative_error
from tests.engine.test_same_bits import assert_same_bits, fragmented_space
from tests.oracle import run_prompt

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def opened(smollm2_path: Path) -> OpenedModel:
    return open_model(smollm2_path)


@pytest.fixture(scope="module")
def prompt(opened: OpenedModel) -> list[int]:
    return text_tokens(opened.tokenizer, 2000)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def model(opened: OpenedModel, request: pytest.FixtureRequest) -> Decoder:
    return load_decoder(opened.source, select_kernels(CPU), request.param, CPU)


def test_transformers_agrees(opened: OpenedModel, prompt: list[int]) -> None:
    theirs = load_transformers(opened.source, torch.float32)
    ours = load_decoder(opened.source, select_kernels(CPU), torch.float32, CPU)
    prompt = prompt[:600]
    with torch.inference_mode():
        logits = theirs(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
        answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
    expected = answer[0, len(prompt) :].tolist()
    small = [*range(1, 20), *range(20, 40, 2), *range(42, 60, 3), *range(64, 200, 7), 500, 513, len(prompt)]
    schedules: list[dict[str, Any]] = [{"chunk_size": size} for size in (0, 64, 100, 512)]
    for schedule in (*schedules, {"chunk_ends": small}):
        run = run_prompt(ours, prompt, max_tokens=32, **schedule)
        assert run.logits is not None
        assert relative_error(run.logits, logits) < 1e-4
        while run.finish_reason is None:
            run.step()
        assert run.generated == expected


def test_same_bits(model: Decoder, prompt: list[int]) -> None:
    whole = run_prompt(model, prompt)
    for chunk_size in (64, 100, 512):
        assert_same_bits(run_prompt(model, prompt, chunk_size=chunk_size), whole)
    # Chunks of 1, 2, 3 and 7 tokens, across the edges of tiles and blocks, after and before larger ones.
    ends = [500, *range(501, 530), *range(530, 580, 2), *range(580, 640, 3), 760, *range(767, 800, 7), 1279]
    ends += [1280, 1281, 1790, 1999, 2000]
    assert_same_bits(run_prompt(model, prompt, chunk_ends=ends), whole)
    for seed in range(2):
        cuts = random.Random(seed).sample(range(1, len(prompt)), 9)
        assert_same_bits(run_prompt(model, prompt, chunk_ends=[*sorted(cuts), len(prompt)]), whole)
    run = run_prompt(model, prompt, chunk_size=512, space=fragmented_space(model, 2048))
    assert len(run.cache.blocks.extents) > 1
    assert_same_bits(run, whole)


def test_same_bits_in_tiny_chunks(model: Decoder, prompt: list[int]) -> None:
    """A size of 7 goes through two tiles' edges, smaller ones, of hundreds of steps, through one."""
    prompt = prompt[:1160]
    whole = run_prompt(model, prompt)
    assert_same_bits(run_prompt(model, prompt, chunk_size=7), whole)
    for chunk_size in (1, 2, 3):
        ends = [960, *range(960 + chunk_size, 1160, chunk_size), 1160]
        assert_same_bits(run_prompt(model, prompt, chunk_ends=ends), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_grid_is_what_keeps_the_bits(opened: OpenedModel, prompt: list[int], dtype: torch.dtype) -> None:
    """The comparison above can fail: with the reference kernels, without tiles and padding, the same schedules give
    other bits."""
    model = load_decoder(opened.source, TorchKernels(), dtype, CPU)
    plain = RowLaw(tile_size=0)
    whole = run_prompt(model, prompt, canon=plain).logits
    chunked = run_prompt(model, prompt, canon=plain, chunk_size=100).logits
    assert whole is not None
    assert chunked is not None
    assert not torch.equal(whole, chunked)
