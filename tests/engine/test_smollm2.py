"""The laws on a real model: SmolLM2, its own weights, real text."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.events import Finished, GenerationRequest, TokenGenerated
from penstock.engine.llm import LLM
from penstock.engine.run import Run
from penstock.engine.service import Service, ServiceConfig
from penstock.kernels.interface import select_kernels
from penstock.kernels.reference.kernels import TorchKernels
from penstock.measure.prompts import text_tokens
from penstock.measure.transformers_model import load_transformers
from penstock.models.decoder import Decoder
from penstock.models.loading import load_decoder
from penstock.models.opened import OpenedModel, open_model
from penstock.plan.grids import RowLaw
from tests.engine.listening import Listening
from tests.engine.test_parity import relative_error
from tests.engine.test_same_bits import assert_same_bits, fragmented_space
from tests.oracle import run_prompt

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def opened(smollm2_path: Path) -> OpenedModel:
    return open_model(smollm2_path)


@pytest.fixture(scope="module")
def prompt(opened: OpenedModel) -> list[int]:
    """Through two tiles' edges and four segments'."""
    return text_tokens(opened.tokenizer, 1100)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def model(opened: OpenedModel, request: pytest.FixtureRequest) -> Decoder:
    return load_decoder(opened.source, select_kernels(CPU), request.param, CPU)


@pytest.fixture(scope="module")
def whole(model: Decoder, prompt: list[int]) -> Run:
    return run_prompt(model, prompt)


def test_transformers_agrees(opened: OpenedModel, prompt: list[int]) -> None:
    theirs = load_transformers(opened.source, torch.float32)
    ours = load_decoder(opened.source, select_kernels(CPU), torch.float32, CPU)
    prompt = prompt[:530]
    with torch.inference_mode():
        answer = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=16,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    expected = answer.sequences[0, len(prompt) :].tolist()
    small = [*range(1, 20), *range(20, 40, 2), *range(42, 60, 3), *range(64, 130, 7), 500, 513, len(prompt)]
    schedules: list[dict[str, Any]] = [{"chunk_size": 0}, {"chunk_size": 100}, {"chunk_ends": small}]
    for schedule in schedules:
        run = run_prompt(ours, prompt, max_tokens=16, **schedule)
        assert run.logits is not None
        assert relative_error(run.logits, answer.logits[0][0]) < 1e-4
        while run.finish_reason is None:
            run.step()
        assert run.generated == expected


def test_same_bits(model: Decoder, prompt: list[int], whole: Run) -> None:
    assert_same_bits(run_prompt(model, prompt, chunk_size=100), whole)


def test_same_bits_in_tiny_chunks(model: Decoder, prompt: list[int], whole: Run) -> None:
    """Chunks of 1, 2, 3 and 7 tokens, across the edges of tiles, segments and blocks, after and before large ones."""
    ends = [500, *range(501, 530), *range(530, 580, 2), *range(580, 645, 3), 730, *range(737, 800, 7), 1000]
    ends += [*range(1015, 1030, 3), 1099, 1100]
    assert_same_bits(run_prompt(model, prompt, chunk_ends=ends), whole)


def test_same_bits_of_random_chunks_in_several_extents(model: Decoder, prompt: list[int], whole: Run) -> None:
    cuts = sorted(random.Random(0).sample(range(1, len(prompt)), 9))
    space = fragmented_space(model, 1152)
    run = run_prompt(model, prompt, chunk_ends=[*cuts, len(prompt)], space=space)
    assert len(run.cache.blocks.extents) > 1
    assert_same_bits(run, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_grid_is_what_keeps_the_bits(opened: OpenedModel, prompt: list[int], dtype: torch.dtype) -> None:
    """The comparison above can fail: with the reference kernels, without tiles and padding, the same schedules give
    other bits."""
    model = load_decoder(opened.source, TorchKernels(), dtype, CPU)
    plain, prompt = RowLaw(tile_size=0), prompt[:300]
    whole = run_prompt(model, prompt, canon=plain).logits
    chunked = run_prompt(model, prompt, canon=plain, chunk_size=100).logits
    assert whole is not None
    assert chunked is not None
    assert not torch.equal(whole, chunked)


@pytest.mark.parametrize(
    "how", [{}, {"weights": "bf16"}, {"activations": "int8"}], ids=lambda how: "".join(how.values()) or "auto"
)
def test_answers_at_once_are_those_alone_by_default(smollm2_path: Path, how: dict[str, Any]) -> None:
    """To the last bit of their log-probabilities, beside chunks and others."""
    llm = LLM(smollm2_path, dtype="bfloat16", chunk=64, **how)
    tokens = text_tokens(llm.tokenizer, 3000)
    requests = [
        GenerationRequest(tokens[170 * index :][: 40 + 17 * index], 10, num_logprobs=2, ignore_eos=True)
        for index in range(16)
    ]
    with Service(llm, ServiceConfig(cache_tokens=16384, reuse=False)) as service:
        assert service.config.strict == llm.canon.frees(16)
        if not service.config.strict:
            pytest.skip(f"not here: {service.strict_reason}")
        at_once = [Listening() for _ in requests]
        for request, listener in zip(requests, at_once, strict=True):
            service.submit(request, listener)
        for request, listener in zip(requests, at_once, strict=True):
            assert isinstance(listener.end, Finished)
            service.submit(request, alone := Listening())
            assert isinstance(alone.end, Finished)
            assert _tokens(alone) == _tokens(listener)


def _tokens(listener: Listening) -> list[TokenGenerated]:
    return [event for event in listener.events if isinstance(event, TokenGenerated)]
