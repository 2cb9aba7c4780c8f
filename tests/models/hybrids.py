"""Small random hybrids and mixtures of experts, made and saved by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
}
MULTIMODAL: dict[str, tuple[Any, Any]] = {
    "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration),
}
HYBRIDS = tuple(family for family in CLASSES if family != "qwen3_moe")
MIXTURES = tuple(family for family in CLASSES if family != "qwen3_5_text")
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {"shared_expert_intermediate_size": 20}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def hybrid_settings(family: str, **changes: Any) -> dict[str, Any]:
    """The keys of a small configuration, as config.json has them."""
    settings: dict[str, Any] = dict(SHAPE)
    if family in MIXTURES:
        settings |= _EXPERTS
    if family in HYBRIDS:
        settings |= _DELTA_NET
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        settings |= _SHARED
    return settings | changes


def hybrid_model(family: str, **changes: Any) -> Any:
    model_class = CLASSES[family][1]
    return randomised(model_class(CLASSES[family][0](**hybrid_settings(family, **changes))))


def multimodal_model(family: str, **changes: Any) -> Any:
    """A model of text and pictures; `changes` are of its outer configuration."""
    config_class, model_class = MULTIMODAL[family]
    text = hybrid_settings(f"{family}_text")
    return randomised(model_class(config_class(text_config=text, vision_config=dict(_VISION), **changes)))


def randomised(model: Any) -> Any:
    """Weights that are all different, and wide enough that each of them matters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(-0.5, 0.5) if "layernorm" in name else parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


def rewrite_weights(folder: Path, change: Any) -> None:
    """Replace a folder's tensors by `change(tensors)`."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in change(load_file(file)).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of each layer as one, as some published files have them."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    blocks = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for block in blocks:
        names = [name for name in tensors if name.startswith(f"{block}.experts.")]
        num_experts = len(names) // 3

        def stack(projection: str, block: str = block, num_experts: int = num_experts) -> torch.Tensor:
            return torch.stack(
                [tensors[f"{block}.experts.{index}.{projection}.weight"] for index in range(num_experts)]
            )

        fused[f"{block}.experts.gate_up_proj"] = torch.cat((stack("gate_proj"), stack("up_proj")), dim=1)
        fused[f"{block}.experts.down_proj"] = stack("down_proj")
    return fused
