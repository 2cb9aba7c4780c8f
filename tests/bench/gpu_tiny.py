"""The measurements on a GPU, of models and prompts so small that a processor does them in seconds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.bench.gpu_device import Card
from penstock.bench.gpu_job import GpuJob
from penstock.bench.gpu_results import GpuResults, Ledger
from penstock.bench.gpu_workload import PLAN, BitsCase, DecodeCase, GpuModel, MixedCase, PrefillCase, Section
from tests.bench.made_up import MACHINE

CARD = Card("A card", 140 * 2**30, "570.1", "12.8", 91002, "3.6.0", None)
_SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def _shrunk(model: GpuModel, **changes: Any) -> dict[str, Any]:
    return {**PLAN.models[model], **_SMALL, **changes}


TINY = replace(
    PLAN,
    models={
        GpuModel.LARGE: _shrunk(GpuModel.LARGE),
        GpuModel.SMALL: _shrunk(GpuModel.SMALL, hidden_size=32),
        GpuModel.HYBRID: _shrunk(GpuModel.HYBRID, **_DELTA_NET),
    },
    prefills={
        Section.LARGE: (
            PrefillCase(GpuModel.LARGE, 200, 64),
            PrefillCase(GpuModel.LARGE, 200, 0),
            PrefillCase(GpuModel.LARGE, 400, 128),
        ),
        Section.SMALL: (PrefillCase(GpuModel.SMALL, 200, 64),),
        Section.HYBRID: (PrefillCase(GpuModel.HYBRID, 200, 64),),
    },
    decodes=(
        DecodeCase(GpuModel.LARGE, 1, 20),
        DecodeCase(GpuModel.LARGE, 5, 20),
        DecodeCase(GpuModel.SMALL, 3, 20),
    ),
    decode_steps=4,
    profiles=(PrefillCase(GpuModel.LARGE, 200, 64), PrefillCase(GpuModel.LARGE, 200, 0)),
    mixed=MixedCase(GpuModel.LARGE, 64, 128, num_decodes=3, decode_past=20),
    memory=PrefillCase(GpuModel.LARGE, 200, 64),
    bits=BitsCase(4, 200, (64, 128), (50,), num_decodes=2, decode_past=10),
    tiles=PrefillCase(GpuModel.LARGE, 200, 64),
    sweeps=(
        PrefillCase(GpuModel.LARGE, 200, 32),
        PrefillCase(GpuModel.LARGE, 200, 128),
        PrefillCase(GpuModel.HYBRID, 200, 128),
    ),
    swept_peer_chunks=(128,),
)


def tiny_job(path: Path | None = None, said: list[str] | None = None, **changes: Any) -> GpuJob:
    """On a processor, with one repeat."""
    results = GpuResults(MACHINE, CARD, 1)
    ledger = Ledger(results, path, (said if said is not None else []).append)
    settings: dict[str, Any] = {"repeats": 1, "peer_limit": 300, **changes}
    return GpuJob(TINY, torch.device("cpu"), ledger, **settings)
