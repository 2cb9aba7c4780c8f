"""A configuration's shape gives the bytes that the caches of such a model take."""

from dataclasses import replace

import pytest
import torch

from penstock.cache.kv import KVSpec
from penstock.models.config import DeltaNetConfig, ExpertsConfig, ModelConfig
from penstock.models.shape import model_shape
from penstock.plan import (
    ChunkedPrefillConfig,
    DeltaNetShape,
    ExpertsShape,
    ModelShape,
    peak_memory_estimate,
)

LLAMA = ModelConfig(
    family="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=160,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=4096,
    norm_eps=1e-6,
    tied_head=False,
)
NET = DeltaNetConfig(
    num_key_heads=2,
    num_value_heads=4,
    key_head_dim=16,
    value_head_dim=32,
    conv_kernel=4,
    layers=(0, 1, 2, 4, 5, 6),
)
EXPERTS = ExpertsConfig(
    num_experts=16,
    num_active=2,
    intermediate_size=48,
    shared_intermediate_size=96,
    normalised=True,
    layers=tuple(range(8)),
)
HYBRID = replace(LLAMA, family="qwen3_5_text", gated_attention=True, delta_net=NET)
MOE = replace(LLAMA, family="qwen3_moe", experts=replace(EXPERTS, shared_intermediate_size=0, layers=(1, 3)))
HYBRID_MOE = replace(HYBRID, family="qwen3_next", experts=EXPERTS)
CHUNKS = ChunkedPrefillConfig(chunk_size=64)


def test_a_plain_model() -> None:
    assert model_shape(LLAMA) == ModelShape(8, 64, 160, 4, 2, 16, 1000)


def test_a_hybrid() -> None:
    shape = model_shape(HYBRID)
    assert shape == ModelShape(8, 64, 160, 4, 2, 16, 1000, True, DeltaNetShape(6, 2, 4, 16, 32, 4))
    assert shape.num_attention_layers == len(HYBRID.attention_layers) == 2
    assert shape.delta_net is not None
    assert (shape.delta_net.conv_size, shape.delta_net.value_size) == (NET.conv_size, NET.value_size)


def test_experts_in_some_layers_and_in_all() -> None:
    some, every = model_shape(MOE), model_shape(HYBRID_MOE)
    assert some.experts == ExpertsShape(2, 16, 48, 0)
    assert (some.delta_net, some.num_dense_layers, some.num_attention_layers) == (None, 6, 8)
    assert every.experts == ExpertsShape(8, 16, 48, 96)
    assert (every.num_dense_layers, every.num_attention_layers) == (0, 2)


def test_kinds_of_layers_that_no_layer_is_of_are_left_out() -> None:
    none = replace(LLAMA, delta_net=replace(NET, layers=()), experts=replace(EXPERTS, layers=()))
    assert model_shape(none) == model_shape(LLAMA)


@pytest.mark.parametrize("config", [LLAMA, HYBRID, MOE, HYBRID_MOE], ids=lambda config: config.family)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_estimate_has_the_bytes_of_the_caches(config: ModelConfig, dtype: torch.dtype) -> None:
    estimate = peak_memory_estimate(model_shape(config), 1000, CHUNKS, dtype_bytes=dtype.itemsize)
    spec = KVSpec(len(config.attention_layers), config.num_kv_heads, config.head_dim, dtype)
    assert estimate.chunked.kv_cache_bytes == estimate.full.kv_cache_bytes == spec.bytes_per_token * 1000
    slot = 0
    for _ in config.delta_net.layers if config.delta_net else ():
        tail = torch.empty(NET.conv_kernel - 1, NET.conv_size, dtype=dtype)
        matrix = torch.empty(NET.num_value_heads, NET.key_head_dim, NET.value_head_dim)
        slot += tail.nbytes + matrix.nbytes
    assert estimate.chunked.recurrent_bytes == estimate.full.recurrent_bytes == 2 * slot
