"""A Hugging Face config.json as a model's configuration, with transformers' defaults for absent keys."""

from dataclasses import dataclass

from penstock.errors import ModelError
from penstock.models.fields import Fields
from penstock.models.hf.layers import ExpertDefaults, hf_delta_net, hf_experts
from penstock.models.hf.rotary import hf_rotary, hf_rotary_dim
from penstock.models.limits import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    check_heads,
)
from penstock.plan.model import ModelConfig


@dataclass(frozen=True)
class _Family:
    """What transformers' configuration class of a family assumes where config.json is silent."""

    vocab_size: int
    intermediate_size: int | None  # None: the family has no dense feed-forward block
    max_position: int
    hidden_size: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int | None = None  # as many as heads
    head_dim: int | None = None  # hidden size over heads
    eos: int | None = None
    attention_bias: bool = False
    has_bias_options: bool = False
    head_norm: bool = False
    is_hybrid: bool = False  # delta-net layers, gated attention, a part of each head rotated, norms around 1
    experts: ExpertDefaults | None = None


_FAMILIES = {
    "llama": _Family(32000, 11008, 2048, eos=2, has_bias_options=True),
    "mistral": _Family(32000, 14336, 4096 * 32, num_kv_heads=8, eos=2),
    "qwen2": _Family(151936, 22016, 32768, num_kv_heads=32, attention_bias=True),
    "qwen3": _Family(
        151936, 22016, 32768, num_kv_heads=32, head_dim=128, has_bias_options=True, head_norm=True
    ),
    "qwen3_moe": _Family(
        151936,
        6144,
        32768,
        hidden_size=2048,
        num_layers=24,
        num_kv_heads=4,
        has_bias_options=True,
        head_norm=True,
        experts=ExpertDefaults(128, 8, 768, normalised=False, count_key="num_local_experts"),
    ),
    "qwen3_next": _Family(
        151936,
        5632,
        32768,
        hidden_size=2048,
        num_layers=48,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        has_bias_options=True,
        head_norm=True,
        is_hybrid=True,
        experts=ExpertDefaults(512, 10, 512, shared_intermediate_size=512),
    ),
    "qwen3_5_text": _Family(
        248320,
        12288,
        32768,
        num_heads=16,
        num_kv_heads=4,
        head_dim=256,
        has_bias_options=True,
        head_norm=True,
        is_hybrid=True,
    ),
    "qwen3_5_moe_text": _Family(
        248320,
        None,
        32768,
        hidden_size=2048,
        num_layers=40,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        has_bias_options=True,
        head_norm=True,
        is_hybrid=True,
        experts=ExpertDefaults(256, 8, 512, shared_intermediate_size=512, has_options=False),
    ),
}

# Models of text and pictures, whose text model is described under `text_config`.
_MULTIMODAL = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def hf_model_config(file: Fields, generation: Fields) -> ModelConfig:
    """`file` is config.json, `generation` is generation_config.json (empty where there is none)."""
    name, config = file.text("model_type"), file
    if name in _MULTIMODAL:
        name, config = _MULTIMODAL[name], file.nested("text_config")
    family = _FAMILIES.get(name)
    if family is None:
        supported = ", ".join((*_FAMILIES, *_MULTIMODAL))
        raise ModelError(
            f"{file.origin}: the model type {name!r} is not supported; supported are {supported}"
        )
    if file.has("quantization_config") or config.has("quantization_config"):
        raise ModelError(
            f"{file.origin}: quantised safetensors are not supported; use the original weights or a GGUF file"
        )
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise ModelError(f"{config.origin}: the activation {activation!r} is not supported, only silu is")

    hidden = config.integer("hidden_size", family.hidden_size, low=1, high=MAX_WIDTH)
    num_layers = config.integer("num_hidden_layers", family.num_layers, low=1, high=MAX_LAYERS)
    num_heads = config.integer("num_attention_heads", family.num_heads, low=1, high=MAX_HEADS)
    default_kv_heads = num_heads
    if family.num_kv_heads is not None and "num_key_value_heads" not in config.values:
        default_kv_heads = family.num_kv_heads
    num_kv_heads = config.integer("num_key_value_heads", default_kv_heads, low=1, high=MAX_HEADS)
    default_head_dim = family.head_dim or hidden // num_heads
    head_dim = config.integer("head_dim", default_head_dim, low=1, high=MAX_WIDTH)
    check_heads(config.origin, num_heads, num_kv_heads, head_dim)
    max_position = config.integer("max_position_embeddings", family.max_position, low=1, high=MAX_POSITIONS)
    _refuse_sliding_window(config, name, max_position, num_layers)

    experts = hf_experts(config, family.experts, num_layers) if family.experts else None
    if family.intermediate_size is not None:
        intermediate = config.integer("intermediate_size", family.intermediate_size, low=1, high=MAX_WIDTH)
    else:
        assert experts is not None
        intermediate = experts.intermediate_size  # of no dense layer, since there is none
    bias = family.has_bias_options and config.boolean("attention_bias", False)
    ends = config.token_ids("eos_token_id", family.eos) + file.token_ids("eos_token_id")
    return ModelConfig(
        family=name,
        vocab_size=config.integer("vocab_size", family.vocab_size, low=1, high=MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        # A multimodal model ties its head by the outer key, and writes both.
        tied_head=file.boolean("tie_word_embeddings", config.boolean("tie_word_embeddings", False)),
        rotary=hf_rotary(config, max_position),
        rotary_dim=hf_rotary_dim(config, head_dim, 0.25 if family.is_hybrid else None),
        qkv_bias=bias or family.attention_bias,
        out_bias=bias,
        mlp_bias=name == "llama" and config.boolean("mlp_bias", False),
        head_norm=family.head_norm,
        gated_attention=family.is_hybrid,
        zero_centred_norm=family.is_hybrid,
        delta_net=hf_delta_net(config, num_layers) if family.is_hybrid else None,
        experts=experts,
        eos_token_ids=tuple(dict.fromkeys(ends + generation.token_ids("eos_token_id"))),
    )


def _refuse_sliding_window(config: Fields, family: str, max_position: int, num_layers: int) -> None:
    if family == "llama" or _FAMILIES[family].is_hybrid:
        return
    if family == "mistral":
        slides = True
    else:
        slides = config.boolean("use_sliding_window", False)
        layer_types = config.values.get("layer_types")
        if family == "qwen3_moe":
            pass  # a window is every layer's
        elif isinstance(layer_types, list):
            slides = slides and "sliding_attention" in layer_types
        else:
            slides = slides and config.integer("max_window_layers", 28) < num_layers
    window = config.values.get("sliding_window", 4096)
    if slides and window is not None and config.integer("sliding_window", 4096) < max_position:
        raise ModelError(
            f"{config.origin}: a sliding window of {window} tokens is not supported "
            f"(the model's context is {max_position})"
        )
