"""Which prefills the memory is measured of: models, chunk sizes and prompt lengths."""

import argparse
from dataclasses import dataclass

import torch

from penstock.errors import SettingError
from penstock.kernels.device import chosen_device
from penstock.measure.random_weights import FAMILIES, family_config
from penstock.models.hub import resolve_model
from penstock.models.opened import open_weights

# Chunk and prompt: every size on a prompt of a few chunks, and a long one.
CASES = ((128, 1024), (512, 2048), (2048, 4352), (4096, 4352), (2048, 16_384))
CHUNKS, PROMPTS = (128, 512, 2048, 4096), (4352, 16_384)  # of a full run, each with each
QUICK_CHUNK, QUICK_PROMPT = 128, 1024
# The largest takes as long as all others together, and has the layers of another.
_FULL_ONLY = frozenset({"qwen3-4b"})


@dataclass(frozen=True)
class MemoryJob:
    """What a fresh process measures."""

    model: str  # a path, or a name among FAMILIES
    is_random: bool
    dtype: str
    kernels: str  # auto, or a name
    num_threads: int
    chunk: int
    prompt_tokens: int
    device: str = "cpu"


def plan_jobs(options: argparse.Namespace) -> list[MemoryJob]:
    """The usual cases, or chunk sizes and prompts each with each; none with a chunk longer than the prompt."""
    device = str(chosen_device(options.device))

    def job(model: str, is_random: bool, chunk: int, prompt_tokens: int) -> MemoryJob:
        threads = options.threads or torch.get_num_threads()
        return MemoryJob(
            model, is_random, options.dtype, options.kernels, threads, chunk, prompt_tokens, device
        )

    if options.model is not None:
        if options.families is not None:
            raise SettingError("--families contradicts --model: leave one of them out")
        path = resolve_model(options.model)
        source = open_weights(path)
        context = source.config.max_position
        source.close()
        names, is_random = [str(path)], False
    else:
        default = [name for name in FAMILIES if options.full or name not in _FULL_ONLY]
        names, is_random = list(options.families or default), True
        context = min(family_config(name).max_position for name in names)
    if options.quick:
        return [job(name, is_random, QUICK_CHUNK, min(QUICK_PROMPT, context - 1)) for name in names]
    too_long = [length for length in options.prompts or () if length >= context]
    if too_long:
        raise SettingError(
            f"--prompts {too_long[0]} is not accepted: the model's context is {context} tokens, one of them for "
            f"the answer; give at most {context - 1}"
        )
    if options.full or options.chunks or options.prompts:
        wanted = [
            (chunk, length) for length in options.prompts or PROMPTS for chunk in options.chunks or CHUNKS
        ]
    else:
        wanted = list(CASES)
    cases = dict.fromkeys((chunk, min(length, context - 1)) for chunk, length in wanted)
    return [
        job(name, is_random, chunk, length) for name in names for chunk, length in cases if chunk <= length
    ]
