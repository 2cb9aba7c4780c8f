"""Random models with the layers of published ones, a few of each: activations are a layer's, and each next layer uses
the memory of the one before again. Their weights are made in place and lie in no file."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from penstock.errors import SettingError
from penstock.kernels.quantised import Q4_K, Q4_Z, Q6_K, Q8_0, BlockForm
from penstock.models.hf.config import hf_model_config
from penstock.models.reading import Fields
from penstock.models.source import WeightSource
from penstock.models.weights import expected_shapes
from penstock.plan.model import ModelConfig

_RANDOM_NUMBERS, _SHIFTS = 1 << 20, 1 << 12


def _family(
    kind: str, vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, context: int
) -> dict[str, Any]:
    """What every model has, in transformers' own names."""
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }


def _experts(inner: int) -> dict[str, Any]:
    """Fewer of them than the published models have."""
    return {
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "moe_intermediate_size": inner,
    }


def _hybrid(value_heads: int) -> dict[str, Any]:
    """Every other layer is a gated delta net."""
    return {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }


# Fewer layers than the published models have.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": _family("llama", 49_152, 576, 1536, 4, 9, 3, 32_768),
    "llama-3.2-1b": _family("llama", 128_256, 2048, 8192, 2, 32, 8, 131_072) | {"head_dim": 64},
    "qwen3-0.6b": _family("qwen3", 151_936, 1024, 3072, 2, 16, 8, 40_960) | {"head_dim": 128},
    "qwen3-4b": _family("qwen3", 151_936, 2560, 9728, 2, 32, 8, 40_960) | {"head_dim": 128},
    "qwen3-30b-a3b": _family("qwen3_moe", 151_936, 2048, 6144, 2, 32, 4, 40_960)
    | {"head_dim": 128}
    | _experts(768),
    "qwen3.5-0.8b": _family("qwen3_5_text", 248_320, 1024, 3584, 4, 8, 2, 262_144) | _hybrid(16),
    "qwen3-next-80b": _family("qwen3_next", 151_936, 2048, 5632, 4, 16, 2, 262_144)
    | _hybrid(32)
    | _experts(512)
    | {"shared_expert_intermediate_size": 512},
}


class RandomWeights(WeightSource):
    """Random weights, in no file. The numbers are made once, on the weights' own device."""

    def __init__(self, name: str, settings: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
        """Settings in transformers' own names."""
        self.config = config_of(name, settings)
        self.settings = settings
        self._name = name
        self.shapes = expected_shapes(self.config)
        numbers = torch.randn(_RANDOM_NUMBERS + _SHIFTS, generator=torch.Generator().manual_seed(0)) * 0.02
        self._numbers = numbers.to(device)

    def load_into(self, name: str, out: torch.Tensor) -> None:
        """The same numbers over and over, each time shifted: drawing as many as a vocabulary has takes too long. Of a
        delta net's heads some remember a few tokens, some hundreds."""
        if out.dim() == 1:
            forgets = name.endswith(("A_log", "dt_bias"))
            out.copy_(torch.linspace(-4.0, 1.0, len(out))) if forgets else out.fill_(1.0)
            return
        rows = out.view(out.shape[0], -1) if out.is_contiguous() else out
        at_once = max(_RANDOM_NUMBERS // rows[0].numel(), 1)
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            shift = start // at_once * 977 % _SHIFTS
            part.copy_(self._numbers[shift : shift + part.numel()].view(part.shape))

    def describe(self) -> str:
        return f"{self._name} (random, {self.config.num_layers} layers)"


def _q4_k_m(name: str, num_layers: int) -> BlockForm:
    """As llama.cpp mixes them: 6 bits for the head, and for values and the last product in half of the layers."""
    if name == "lm_head.weight":
        return Q6_K
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    eighth, index, kind = num_layers // 8, int(layer[1]) if layer else 0, name.split(".")[-2]
    is_more = index < eighth or index >= 7 * eighth or (index - eighth) % 3 == 2
    return Q6_K if is_more and kind in ("v_proj", "down_proj") else Q4_K


def _q8_0(name: str, num_layers: int) -> BlockForm:
    return Q8_0


def _awq(name: str, num_layers: int) -> BlockForm | None:
    """All matrices of layers but routers."""
    return Q4_Z if name.startswith("model.layers.") and not name.endswith(".gate.weight") else None


Mixture = Callable[[str, int], BlockForm | None]
# Of the forms in a file, by a tensor's name and the number of layers.
MIXTURES: Mapping[str, Mixture] = {"Q4_K_M": _q4_k_m, "Q8_0": _q8_0, "AWQ": _awq}
# Scales in float16, and where they lie in a block, for values of about the size of the others.
_HALVES = {
    "Q4_K": (0, (1.4e-4, 1e-3)),
    "Q6_K": (208, (1.5e-5,)),
    "Q8_0": (0, (2.7e-4,)),
    "Q4_Z": (0, (4.3e-3, 7.5)),
}
_BLOCK_ROWS = 512


class RandomBlocks(RandomWeights):
    """The same in a file's blocks, whose quants are random."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        device: torch.device | str,
        mixture: Mixture,
    ) -> None:
        super().__init__(name, settings, device)
        self._mixture = mixture

    def block_form(self, name: str) -> BlockForm | None:
        shape = self.shapes[name]
        form = self._mixture(name, self.config.num_layers) if len(shape) == 2 else None
        return None if form is None or shape[1] % form.block_size else form

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        form, (height, width) = self.block_form(name), self.shapes[name]
        assert form is not None
        shape, device = (
            (min(height, _BLOCK_ROWS), width // form.block_size, form.block_bytes),
            self._numbers.device,
        )
        blocks = torch.randint(256, shape, dtype=torch.uint8, device=device)
        start, halves = _HALVES[form.name]
        scales = torch.tensor(halves, dtype=torch.float16).view(torch.uint8).to(device)
        blocks[..., start : start + len(scales)] = scales
        for first in range(0, height, len(blocks)):
            yield blocks.flatten(1)[: height - first]


def config_of(name: str, settings: Mapping[str, Any]) -> ModelConfig:
    return hf_model_config(Fields(name, dict(settings)), Fields(name, {}))


def family_config(name: str) -> ModelConfig:
    if name not in FAMILIES:
        raise SettingError("families", name, f"some of {', '.join(FAMILIES)}")
    return config_of(name, FAMILIES[name])
