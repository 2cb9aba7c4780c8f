"""The answer on a GPU is transformers' answer, whatever the family and the chunks."""

from functools import cache

import torch

from tests.gpu.cases import over
from tests.gpu.models import MODELS, canon_of, model_of, oracle_of
from tests.oracle import random_prompt, run_prompt

SHORT, LONG = 40, 2100
# Of the long prompt; 0 is all at once.
CHUNK_SIZES = (7, 64, 512, 2048, 0)
NUM_TOKENS = 8


@cache
def expected_logits(name: str, num_tokens: int) -> torch.Tensor:
    return oracle_of(name).logits(random_prompt(num_tokens))


@cache
def expected_tokens(name: str, num_tokens: int) -> list[int]:
    return oracle_of(name).greedy(random_prompt(num_tokens), NUM_TOKENS)


def error_of(name: str, dtype: torch.dtype, num_tokens: int, chunk_size: int) -> float:
    """Of the logits after the prompt, relative to the largest."""
    model = model_of(name, dtype)
    run = run_prompt(model, random_prompt(num_tokens), chunk_size=chunk_size, canon=canon_of(model))
    assert run.logits is not None
    theirs = expected_logits(name, num_tokens)
    return float((run.logits.cpu() - theirs).abs().max() / theirs.abs().max())


@over(MODELS)
def test_logits_in_float32(case: str) -> None:
    errors = {size: error_of(case, torch.float32, LONG, size) for size in CHUNK_SIZES}
    errors[1] = error_of(case, torch.float32, SHORT, 1)
    assert max(errors.values()) < 1e-4, f"relative errors by chunk size: {errors}"


@over(MODELS)
def test_greedy_tokens_in_float32(case: str) -> None:
    model = model_of(case, torch.float32)
    for num_tokens, chunk_size in ((SHORT, 1), (LONG, 64), (LONG, 512), (LONG, 0)):
        run = run_prompt(
            model,
            random_prompt(num_tokens),
            chunk_size=chunk_size,
            num_tokens=NUM_TOKENS,
            canon=canon_of(model),
        )
        assert run.generated == expected_tokens(case, num_tokens), f"{num_tokens} tokens, chunk {chunk_size}"


@over(MODELS)
def test_logits_in_bfloat16(case: str) -> None:
    errors = {size: error_of(case, torch.bfloat16, LONG, size) for size in (64, 512, 0)}
    errors[1] = error_of(case, torch.bfloat16, SHORT, 1)
    assert max(errors.values()) < 0.03, f"relative errors by chunk size: {errors}"
