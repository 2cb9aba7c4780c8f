"""The systems of a sweep: each engine's weights are loaded once, whatever the number of its configurations."""

from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.bench.sweep_llama import LlamaSystem
from penstock.bench.sweep_workload import AUTO, Configuration
from penstock.bench.systems import (
    OnToken,
    PenstockSystem,
    System,
    SystemName,
    TransformersSystem,
    finish_run,
)
from penstock.engine.capacity import free_memory_bytes
from penstock.engine.llm import LLM, Dtype
from penstock.engine.run import Run
from penstock.kernels.device import chosen_device
from penstock.measure.transformers_model import load_transformers
from penstock.models.opened import open_weights
from penstock.plan import ChunkedPrefillConfig, ChunkSizer


class AutoSystem:
    """An `LLM` that chooses its chunks itself, and learns from one prompt to the next, as a user's does."""

    name = SystemName.PENSTOCK_AUTO

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> int:
        llm = self._llm
        run = Run(
            llm.model,
            prompt,
            config=ChunkedPrefillConfig(llm.chunk.effective),
            canon=llm.canon,
            max_tokens=num_tokens,
            sizer=ChunkSizer(
                llm.size_rules(free_memory_bytes(llm.model.device)), llm.times, llm.activations.step_bytes
            ),
        )
        return finish_run(run, on_token)


def load_sweep_systems(
    wanted: Sequence[Configuration], path: Path, dtype: Dtype, most_tokens: int
) -> dict[Configuration, System]:
    """`most_tokens` is the longest prompt with what is generated after it."""
    systems: dict[Configuration, System] = {}
    ours = [configuration for configuration in wanted if configuration.is_ours]
    if ours:
        llm = LLM(path, dtype=dtype, chunk=AUTO)
        for each in ours:
            systems[each] = (
                AutoSystem(llm)
                if each.system is SystemName.PENSTOCK_AUTO
                else PenstockSystem(each.system, llm.model, llm.canon, each.chunk)
            )
    theirs = [each for each in wanted if each.system.startswith("transformers")]
    if theirs:
        source = open_weights(path)
        try:
            reference = load_transformers(source, getattr(torch, dtype), chosen_device())
        finally:
            source.close()
        for each in theirs:
            systems[each] = TransformersSystem(each.system, reference, each.chunk or None)
    for each in wanted:
        if each.system is SystemName.LLAMA_CPP:
            systems[each] = LlamaSystem(path, each.chunk, most_tokens)
    return {each: systems[each] for each in wanted}
