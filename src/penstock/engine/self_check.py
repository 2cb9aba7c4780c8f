"""A look at a model that other code runs, before its first answer: is a prompt in chunks the same as whole?"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine.run import Run
from penstock.engine.sampler import SamplingParams
from penstock.errors import ModelError
from penstock.kernels.probe import ProbeResult
from penstock.models.decoder import Decoder
from penstock.plan.chunks import ChunkedPrefillConfig
from penstock.plan.grids import RowLaw

NUM_TOKENS = 128
# Where chunks end, as parts of the prompt.
_ENDS: tuple[tuple[float, ...], ...] = ((1.0,), (0.375, 0.75, 1.0), (0.008, 0.055, 0.5, 0.51, 1.0))
# What rounding alone may come to, of the largest logit.
_MOST = {torch.float32: 1e-3}
_MOST_ELSE = 0.03


def check_chunks(model: Decoder, canon: RowLaw, found: ProbeResult) -> ProbeResult:
    """What was found, where chunks have the logits of the whole prompt; without the promise of the same bits, where
    they differ by rounding. ModelError where they differ by more."""
    num_tokens = min(NUM_TOKENS, model.config.max_position - 1)
    prompt = [(7919 * index + 13) % model.config.vocab_size for index in range(num_tokens)]
    whole, *others = (
        _logits(model, canon, prompt, [max(int(part * num_tokens), 1) for part in parts]) for parts in _ENDS
    )
    for chunked in others:
        if torch.equal(chunked, whole):
            continue
        error = float((chunked - whole).abs().max() / whole.abs().max())
        if not error <= _MOST.get(model.dtype, _MOST_ELSE):
            raise ModelError(
                f"{model.config.family} is not run by transformers' code: a prompt of {num_tokens} tokens in chunks "
                f"has other logits than whole, by {error:.0%} of the largest"
            )
        found = replace(found, passes_hold=False)
    return found


def _logits(model: Decoder, canon: RowLaw, prompt: list[int], ends: Sequence[int]) -> Tensor:
    run = Run(
        model,
        prompt,
        config=ChunkedPrefillConfig(0),
        canon=canon,
        max_tokens=1,
        sampling=SamplingParams(),
        chunk_ends=tuple(dict.fromkeys(ends)),
    )
    while run.logits is None:
        run.step()
    return run.logits
