"""Small random models on the GPU, of the head sizes that published ones have, and transformers' answers to them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from penstock.kernels.interface import select_kernels
from penstock.kernels.probe import ProbeResult, measure
from penstock.models.decoder import Decoder
from penstock.models.hf.folder import HfFolder
from penstock.models.loading import load_decoder
from penstock.plan.grids import RowLaw
from penstock.plan.weight_settings import WeightsName
from tests.oracle import Oracle, make_oracle

_DELTA_NET = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 64}),
    "mistral": ("mistral", {"head_dim": 128}),
    "qwen2": ("qwen2", {"hidden_size": 384, "head_dim": 64}),
    "qwen3": ("qwen3", {"head_dim": 128, "num_attention_heads": 8}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 64}),
    "qwen3_next": ("qwen3_next", _DELTA_NET),
    "qwen3_5_text": ("qwen3_5_text", _DELTA_NET),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _DELTA_NET),
    "qwen3_5_text, odd sizes": ("qwen3_5_text", {}),
    "glm4_moe": ("glm4_moe", {"head_dim": 64}),
    "ernie4_5_moe": ("ernie4_5_moe", {"head_dim": 64}),
    "mistral, window": ("mistral", {"head_dim": 128, "sliding_window": 300}),
    "gemma2": ("gemma2", {"head_dim": 256, "sliding_window": 300, "num_hidden_layers": 4}),
    "gemma3_text": ("gemma3_text", {"head_dim": 256, "sliding_window": 200}),
    "gpt_oss": ("gpt_oss", {"head_dim": 64, "sliding_window": 128}),
    "bamba": ("bamba", {}),
    "lfm2": ("lfm2", {}),
    "deepseek_v3": ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}),
    "deepseek_v3, small latents": ("deepseek_v3", {}),
}
# A model of each kind: attention, experts, recurrent state, both; windows with a soft cap, with rotary embeddings of
# their own, with sinks; other states, latents.
KINDS = (
    *("llama", "qwen3_moe", "qwen3_5_text", "qwen3_next", "gemma2", "gemma3_text", "gpt_oss"),
    *("bamba", "deepseek_v3"),
)


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@cache
def oracle_of(name: str) -> Oracle:
    """In float32, on the CPU."""
    family, overrides = MODELS[name]
    with _without_fla():
        return make_oracle(family, **overrides)


@contextmanager
def _without_fla() -> Iterator[None]:
    """transformers, which looks for flash-linear-attention when it makes its first model of a kind, takes its own
    code instead: that runs on the CPU, too."""
    found = sys.modules.get("fla")
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["fla"]
        if found is not None:
            sys.modules["fla"] = found


@cache
def model_of(
    name: str, dtype: torch.dtype, *, can_record: bool = True, weights: WeightsName = "auto"
) -> Decoder:
    kernels = select_kernels(gpu())
    kernels.can_capture = kernels.can_capture and can_record
    return load_decoder(HfFolder(oracle_of(name).folder), kernels, dtype, gpu(), weights)


@cache
def probed(model: Decoder) -> ProbeResult:
    return measure(model.kernels, model.probe_shapes, model.dtype, model.device)


@cache
def canon_of(model: Decoder) -> RowLaw:
    """Whether or not its laws hold: answers must be right in any case."""
    return probed(model).bind(model.kernels)
