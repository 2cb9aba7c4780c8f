"""The weights that Penstock runs, in transformers' own model."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from penstock.errors import ModelError
from penstock.layers.rotary import rotary_frequencies
from penstock.models.config import ModelConfig
from penstock.models.expected import expected_shapes
from penstock.models.source import WeightSource


def load_transformers(source: WeightSource, dtype: torch.dtype) -> Any:
    """A causal language model of transformers with `sdpa` attention, filled one tensor at a time."""
    config = source.config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            transformers_config(config), dtype=dtype, attn_implementation="sdpa"
        )
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()
    parameters = dict(model.named_parameters())
    if {name: tuple(each.shape) for name, each in parameters.items()} != expected_shapes(config):
        raise ModelError(
            f"{source.describe()}: transformers' {config.family} model has other tensors, "
            "so there is nothing to compare with"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            source.load_into(name, parameter)
    _fill_rotary(model.model.rotary_emb, config)
    return model


def transformers_config(config: ModelConfig) -> PreTrainedConfig:
    """transformers' configuration of the same model. Rotary scaling is left out: see `_fill_rotary`."""
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary.theta},
        # Nothing ends an answer early, so that all systems generate the same number of tokens.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    match config.family:
        case "llama":
            return LlamaConfig(**common, attention_bias=config.qkv_bias, mlp_bias=config.mlp_bias)
        case "mistral":
            return MistralConfig(**common, sliding_window=None)
        case "qwen2":
            return Qwen2Config(**common)
        case "qwen3":
            return Qwen3Config(**common, attention_bias=config.qkv_bias)
    raise ModelError(f"transformers' model of the family {config.family!r} is not known to the benchmark")


def _fill_rotary(rotary: Any, config: ModelConfig) -> None:
    """The frequencies are no parameters: they are set to Penstock's, which knows what each file asks for."""
    frequencies, scale = rotary_frequencies(config.rotary, config.head_dim, config.max_position)
    with torch.no_grad():
        for buffer in rotary.buffers():
            buffer.copy_(frequencies)
    rotary.attention_scaling = scale
