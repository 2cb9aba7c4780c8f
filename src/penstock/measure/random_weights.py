"""Random models with the layers of published ones, a few of each: activations are a layer's, and each next layer uses
the memory of the one before again. Their weights are made in place and lie in no file."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from penstock.errors import SettingError
from penstock.models.fields import Fields
from penstock.models.hf.config import hf_model_config
from penstock.models.weights import expected_shapes
from penstock.plan.model import ModelConfig

_RANDOM_NUMBERS = 1 << 20
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
_HYBRID_LAYERS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": _HYBRID_LAYERS,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True}
# In transformers' own names; fewer layers, and fewer experts, than the published models have.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 32_768,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "qwen3-4b": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": _QWEN3
    | _EXPERTS
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "qwen3.5-0.8b": _HYBRID
    | {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "linear_num_value_heads": 16,
    },
    "qwen3-next-80b": _HYBRID
    | _EXPERTS
    | {
        "model_type": "qwen3_next",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
    },
}


class RandomWeights:
    """A `WeightSource` of random weights for a configuration, in no file. The numbers are made once, and lie on the
    device that the weights go to."""

    def __init__(self, name: str, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        self._name = name
        self._config = config
        self._shapes = expected_shapes(config)
        numbers = torch.randn(_RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0)) * 0.02
        self._numbers = numbers.to(device)

    @property
    def config(self) -> ModelConfig:
        return self._config

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load_into(self, name: str, out: torch.Tensor) -> None:
        """The same numbers over and over, row by row: drawing as many as a vocabulary has takes too long."""
        if out.dim() == 1:
            out.fill_(1.0)
            return
        rows = out.view(out.shape[0], -1) if out.is_contiguous() else out
        at_once = max(_RANDOM_NUMBERS // rows[0].numel(), 1)
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            part.copy_(self._numbers[: part.numel()].view(part.shape))

    def block_form(self, name: str) -> None:
        return None

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        raise NotImplementedError(f"{name} is not quantised")

    def describe(self) -> str:
        return f"{self._name} (random, {self._config.num_layers} layers)"

    def close(self) -> None:
        pass


def family_config(name: str) -> ModelConfig:
    """The configuration of a random model."""
    if name not in FAMILIES:
        raise SettingError("families", name, f"some of {', '.join(FAMILIES)}")
    return hf_model_config(Fields(name, dict(FAMILIES[name])), Fields(name, {}))
