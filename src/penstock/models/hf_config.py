"""A Hugging Face config.json as a model's configuration, with transformers' defaults for absent keys."""

from dataclasses import dataclass

from penstock.errors import ModelError
from penstock.models.config import ModelConfig, RotaryConfig
from penstock.models.fields import Fields
from penstock.models.limits import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_SCALE,
    MAX_THETA,
    MAX_VOCABULARY,
    MAX_WIDTH,
    MIN_SCALE,
    MIN_THETA,
    check_heads,
)


@dataclass(frozen=True)
class _Family:
    """What transformers' configuration class of a family assumes where config.json is silent."""

    vocab_size: int
    intermediate_size: int
    max_position: int
    num_kv_heads: int | None = None  # as many as heads
    head_dim: int | None = None  # hidden size over heads
    eos: int | None = None
    attention_bias: bool = False
    has_bias_options: bool = False
    head_norm: bool = False


_FAMILIES = {
    "llama": _Family(32000, 11008, 2048, eos=2, has_bias_options=True),
    "mistral": _Family(32000, 14336, 4096 * 32, num_kv_heads=8, eos=2),
    "qwen2": _Family(151936, 22016, 32768, num_kv_heads=32, attention_bias=True),
    "qwen3": _Family(
        151936, 22016, 32768, num_kv_heads=32, head_dim=128, has_bias_options=True, head_norm=True
    ),
}

_ROTARY_KINDS = ("default", "linear", "llama3", "yarn")


def hf_model_config(config: Fields, generation: Fields) -> ModelConfig:
    """`config` is config.json, `generation` is generation_config.json (empty where there is none)."""
    name = config.text("model_type")
    family = _FAMILIES.get(name)
    if family is None:
        raise ModelError(
            f"{config.origin}: the model type {name!r} is not supported; supported are {', '.join(_FAMILIES)}"
        )
    if config.has("quantization_config"):
        raise ModelError(
            f"{config.origin}: quantised safetensors are not supported; "
            "use the original weights or a GGUF file"
        )
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise ModelError(f"{config.origin}: the activation {activation!r} is not supported, only silu is")

    hidden = config.integer("hidden_size", 4096, low=1, high=MAX_WIDTH)
    num_layers = config.integer("num_hidden_layers", 32, low=1, high=MAX_LAYERS)
    num_heads = config.integer("num_attention_heads", 32, low=1, high=MAX_HEADS)
    default_kv_heads = num_heads
    if family.num_kv_heads is not None and "num_key_value_heads" not in config.values:
        default_kv_heads = family.num_kv_heads
    num_kv_heads = config.integer("num_key_value_heads", default_kv_heads, low=1, high=MAX_HEADS)
    default_head_dim = family.head_dim or hidden // num_heads
    head_dim = config.integer("head_dim", default_head_dim, low=1, high=MAX_WIDTH)
    check_heads(config.origin, num_heads, num_kv_heads, head_dim)
    max_position = config.integer("max_position_embeddings", family.max_position, low=1, high=MAX_POSITIONS)
    _refuse_sliding_window(config, name, max_position, num_layers)

    bias = family.has_bias_options and config.boolean("attention_bias", False)
    ends = config.token_ids("eos_token_id", family.eos) + generation.token_ids("eos_token_id")
    return ModelConfig(
        family=name,
        vocab_size=config.integer("vocab_size", family.vocab_size, low=1, high=MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=config.integer(
            "intermediate_size", family.intermediate_size, low=1, high=MAX_WIDTH
        ),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tied_head=config.boolean("tie_word_embeddings", False),
        rotary=_rotary(config, max_position),
        qkv_bias=bias or family.attention_bias,
        out_bias=bias,
        mlp_bias=name == "llama" and config.boolean("mlp_bias", False),
        head_norm=family.head_norm,
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )


def _refuse_sliding_window(config: Fields, family: str, max_position: int, num_layers: int) -> None:
    if family == "llama":
        return
    if family == "mistral":
        slides = True
    else:
        slides = config.boolean("use_sliding_window", False)
        layer_types = config.values.get("layer_types")
        if isinstance(layer_types, list):
            slides = slides and "sliding_attention" in layer_types
        else:
            slides = slides and config.integer("max_window_layers", 28) < num_layers
    window = config.values.get("sliding_window", 4096)
    if slides and window is not None and config.integer("sliding_window", 4096) < max_position:
        raise ModelError(
            f"{config.origin}: a sliding window of {window} tokens is not supported "
            f"(the model's context is {max_position})"
        )


def _rotary(config: Fields, max_position: int) -> RotaryConfig:
    """From `rope_parameters`, or `rope_scaling` and `rope_theta` as older files have them."""
    rope = config.nested("rope_scaling")
    if not rope.values:
        rope = config.nested("rope_parameters")

    def scale(key: str, default: float | None = None) -> float:
        return rope.number(key, default, above=MIN_SCALE, high=MAX_SCALE)

    def optional_scale(key: str) -> float | None:
        return scale(key) if rope.has(key) else None

    theta = config.number("rope_theta", 10_000.0, above=MIN_THETA, high=MAX_THETA)
    theta = rope.number("rope_theta", theta, above=MIN_THETA, high=MAX_THETA)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _ROTARY_KINDS:
        raise ModelError(
            f"{rope.origin}: the rope type {kind!r} is not supported; "
            f"supported are {', '.join(_ROTARY_KINDS)}"
        )
    if rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{rope.origin}: rotating only a part of each head is not supported")
    if kind == "default":
        return RotaryConfig(theta=theta)
    if kind == "linear":
        return RotaryConfig(theta=theta, kind=kind, factor=scale("factor"))
    original = config.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", max_position, low=1, high=MAX_POSITIONS),
        low=1,
        high=MAX_POSITIONS,
    )
    if kind == "llama3":
        low, high = scale("low_freq_factor"), scale("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", high, f"more than low_freq_factor ({low:g})")
        return RotaryConfig(
            theta=theta,
            kind=kind,
            factor=scale("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RotaryConfig(
        theta=theta,
        kind=kind,
        factor=scale("factor", max_position / original),
        original_max_position=original,
        beta_fast=scale("beta_fast", 32.0),
        beta_slow=scale("beta_slow", 1.0),
        attention_factor=optional_scale("attention_factor"),
        mscale=optional_scale("mscale"),
        mscale_all_dim=optional_scale("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )
