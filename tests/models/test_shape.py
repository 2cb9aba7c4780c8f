"""A configuration's shape gives the bytes that the caches of such a model take."""

from dataclasses import replace

import pytest
import torch

from penstock.cache.tensors import KVSpec
from penstock.plan import (
    ChunkedPrefillConfig,
    peak_memory_estimate,
)
from penstock.plan.model import DeltaNetConfig, ExpertsConfig, ModelConfig

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
    num_layers=6,
    num_key_heads=2,
    num_value_heads=4,
    key_head_dim=16,
    value_head_dim=32,
    conv_kernel=4,
    layers=(0, 1, 2, 4, 5, 6),
)
EXPERTS = ExpertsConfig(
    num_layers=8,
    num_experts=16,
    num_active=2,
    intermediate_size=48,
    shared_intermediate_size=96,
    normalised=True,
    layers=tuple(range(8)),
)
SOME = replace(EXPERTS, num_layers=2, shared_intermediate_size=0, layers=(1, 3))
HYBRID = replace(LLAMA, family="qwen3_5_text", gated_attention=True, delta_net=NET)
MOE = replace(
    LLAMA,
    family="qwen3_moe",
    experts=SOME,
)
HYBRID_MOE = replace(HYBRID, family="qwen3_next", experts=EXPERTS)
CHUNKS = ChunkedPrefillConfig(chunk_size=64)


def test_layers_of_each_kind_are_counted() -> None:
    assert HYBRID.num_attention_layers == len(HYBRID.attention_layers) == 2
    assert (MOE.num_dense_layers, MOE.num_attention_layers) == (6, 8)
    assert (HYBRID_MOE.num_dense_layers, HYBRID_MOE.num_attention_layers) == (0, 2)


def test_some_layers_are_a_model_of_their_own() -> None:
    assert HYBRID_MOE.of_layers(0, 8) is HYBRID_MOE
    part = replace(HYBRID, experts=MOE.experts).of_layers(2, 5)
    assert (part.num_layers, part.attention_layers) == (3, (1,))
    assert part.delta_net == replace(NET, num_layers=2, layers=(0, 2))
    assert part.experts == replace(SOME, num_layers=1, layers=(1,))
    plain = part.of_layers(1, 2)
    assert (plain.delta_net, plain.experts) == (None, replace(SOME, num_layers=1, layers=(0,)))
    assert part.of_layers(2, 3).experts is None


@pytest.mark.parametrize("config", [LLAMA, HYBRID, MOE, HYBRID_MOE], ids=lambda config: config.family)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_estimate_has_the_bytes_of_the_caches(config: ModelConfig, dtype: torch.dtype) -> None:
    estimate = peak_memory_estimate(config, 1000, CHUNKS, dtype_bytes=dtype.itemsize)
    spec = KVSpec(len(config.attention_layers), config.num_kv_heads, config.head_dim, dtype)
    assert estimate.chunked.kv_cache_bytes == estimate.full.kv_cache_bytes == spec.bytes_per_token * 1000
    slot = 0
    for _ in config.delta_net.layers if config.delta_net else ():
        tail = torch.empty(NET.conv_kernel - 1, NET.conv_size, dtype=dtype)
        matrix = torch.empty(NET.num_value_heads, NET.key_head_dim, NET.value_head_dim)
        slot += tail.nbytes + matrix.nbytes
    assert estimate.chunked.recurrent_bytes == estimate.full.recurrent_bytes == 2 * slot
