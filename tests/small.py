"""Small configurations of every decoder of text that transformers has, and random models of them."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from tests.oracle import Oracle

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 48,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Experts, by all their names.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"), 3),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 40),
    "shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    # Latent attention.
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    # Names of older families.
    "n_embd": 96,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 512,
    "n_inner": 136,
    "ffn_dim": 136,
    "word_embed_proj_dim": 96,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
# What a family needs beside these.
_WINDOWED = (
    *(
        "afmoe",
        "cohere2",
        "cohere2_moe",
        "exaone4",
        "exaone_moe",
        "flint",
        "gemma3_text",
        "kolibri1",
        "laguna",
    ),
    *("mellum", "olmo3"),
)
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 24}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_SHORT_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
    "llama_4_scaling_beta": 0.3,
}
OWN: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 6} for name in _LATENT},
    **{
        name: {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        for name in _WINDOWED
    },
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA_NET),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _SHORT_CONV),
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 192},
    "granitemoehybrid": {**_MAMBA, "layer_types": _DELTA_NET["layer_types"]},
    "nemotron_h": {
        "sliding_window": None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 24,
        "moe_shared_expert_intermediate_size": 40,
    },
    "dots1": {"sliding_window": None},
    "ministral3": {"rope_parameters": _GROWING},
    "mimo_v2_flash": {"num_attention_heads": 8},
    "gemma4_text": {
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "modernbert-decoder": {
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
        "local_attention": 48,
    },
    "cwm": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}


def small_config(name: str, **changes: Any) -> PreTrainedConfig:
    """Of a family: what it knows of the sizes above, and what differs."""
    config_class = transformers.CONFIG_MAPPING[name]
    known = {key for base in config_class.__mro__ for key in getattr(base, "__annotations__", {})}
    renamed = getattr(config_class, "attribute_map", {})
    settings = {key: value for key, value in SIZES.items() if key in known and key not in renamed}
    return config_class(**{**settings, **OWN.get(name, {}), **changes})


@cache
def small_model(name: str) -> Oracle:
    """A random model of a family, as it is."""
    return make_model(small_config(name), Path(mkdtemp(prefix="penstock-small-")))


def make_model(config: PreTrainedConfig, folder: Path) -> Oracle:
    """A random model whose attention, norms and routers all matter, in that folder."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    return _saved(model, folder)


def make_multimodal(outer: str, folder: Path) -> Oracle:
    """A random model of text and pictures, in that folder."""
    torch.manual_seed(7)
    config_class = transformers.CONFIG_MAPPING[outer]
    usual = config_class()
    parts = {"text_config": small_config(usual.text_config.model_type, pad_token_id=0).to_dict()}
    vision = {key: value for key, value in _VISION.items() if hasattr(usual.vision_config, key)}
    parts["vision_config"] = {"model_type": usual.vision_config.model_type, **vision}
    model = AutoModelForImageTextToText.from_config(config_class(**parts), dtype=torch.float32).eval()
    return _saved(model, folder)


def _saved(model: Any, folder: Path) -> Oracle:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        model.get_input_embeddings().weight.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(folder)
    return Oracle(model, folder)
