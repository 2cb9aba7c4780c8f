"""A Hugging Face config.json as a model's configuration, with transformers' defaults for absent keys.

The defaults are those of transformers' own classes. Importing one takes a second, so they stand in `defaults.json`,
which `tests/models/hf_defaults.py` writes and a test compares. Beside them stands what transformers' models read and
Penstock does not: a file that has another value there is refused. A plain new family is a row of `FAMILIES`, and a
line that is written there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import ModelError, ModelFileError
from penstock.models.reading import Fields, Most, check_experts, check_heads, delta_net_of, recurrent_layers
from penstock.plan.model import DeltaNetConfig, ExpertsConfig, ModelConfig, RotaryConfig


@dataclass(frozen=True)
class _Family:
    """What a family has beyond what its configuration says; which keys that has, its defaults tell."""

    qkv_bias: bool = False
    head_norm: bool = False
    count_key: str = "num_experts"  # the key that wins where both this and num_experts are given


FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(head_norm=True),
    "qwen3_moe": _Family(head_norm=True, count_key="num_local_experts"),
    "qwen3_next": _Family(head_norm=True),
    "qwen3_5_text": _Family(head_norm=True),
    "qwen3_5_moe_text": _Family(head_norm=True),
}
DEFAULT_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
    *("rms_norm_eps", "tie_word_embeddings", "eos_token_id", "hidden_act"),
    *("use_sliding_window", "sliding_window", "max_window_layers"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
)
_KINDS = ("default", "linear", "llama3", "yarn")
_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"


# Models of text and pictures, whose text model is described under `text_config`.
_MULTIMODAL = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def hf_model_config(file: Fields, generation: Fields) -> ModelConfig:
    """`file` is config.json, `generation` is generation_config.json (empty where there is none)."""
    name, config = file.text("model_type"), file
    if name in _MULTIMODAL:
        name, config = _MULTIMODAL[name], file.nested("text_config")
    family = FAMILIES.get(name)
    if family is None:
        supported = ", ".join((*FAMILIES, *_MULTIMODAL))
        raise ModelError(
            f"{file.origin}: the model type {name!r} is not supported; supported are {supported}"
        )
    config = replace(config, defaults=_table()[name]["defaults"])
    if file.has("quantization_config") or config.has("quantization_config"):
        raise ModelError(
            f"{file.origin}: quantised safetensors are not supported; use the original weights or a GGUF file"
        )
    if (activation := config.text("hidden_act")) not in ("silu", "swish"):  # two names of one function
        raise ModelError(f"{config.origin}: the activation {activation!r} is not supported, only silu is")

    fixed = _table()[name]["fixed"]
    for key, value in config.values.items():
        if key in fixed and value not in (None, fixed[key]):
            raise config.unsupported(key, f"only {json.dumps(fixed[key])} is")

    defaults = config.defaults
    is_hybrid = "linear_num_key_heads" in defaults  # gates, norms around 1, a part of each head rotated
    hidden = config.size("hidden_size", Most.WIDTH)
    num_layers = config.size("num_hidden_layers", Most.LAYERS)
    num_heads = config.size("num_attention_heads", Most.HEADS)
    # A null means as many as heads, whatever the family.
    kv_heads = None if "num_key_value_heads" in config.values else defaults["num_key_value_heads"]
    num_kv_heads = config.size("num_key_value_heads", Most.HEADS, kv_heads or num_heads)
    head_dim = config.size("head_dim", Most.WIDTH, defaults.get("head_dim") or hidden // num_heads)
    check_heads(config.origin, num_heads, num_kv_heads, head_dim)
    max_position = config.size("max_position_embeddings", Most.POSITIONS)
    kinds = _layer_kinds(config, num_layers, is_hybrid=is_hybrid)
    _refuse_sliding_window(config, max_position, num_layers, kinds)

    experts = _experts(config, family.count_key, num_layers) if "num_experts" in defaults else None
    if "intermediate_size" in defaults:
        intermediate = config.size("intermediate_size", Most.WIDTH)
    else:
        assert experts is not None
        intermediate = experts.intermediate_size  # of no dense layer, since there is none
    bias = "attention_bias" in defaults and config.boolean("attention_bias")
    ends = config.token_ids("eos_token_id") + file.token_ids("eos_token_id")
    return ModelConfig(
        family=name,
        vocab_size=config.size("vocab_size", Most.VOCABULARY),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps"),
        # A multimodal model ties its head by the outer key, and writes both.
        tied_head=file.boolean("tie_word_embeddings", config.boolean("tie_word_embeddings")),
        rotary=_rotary(config, max_position),
        rotary_dim=_rotary_dim(config, head_dim, 0.25 if is_hybrid else None),
        qkv_bias=bias or family.qkv_bias,
        out_bias=bias,
        mlp_bias="mlp_bias" in defaults and config.boolean("mlp_bias"),
        head_norm=family.head_norm,
        gated_attention=is_hybrid,
        zero_centred_norm=is_hybrid,
        delta_net=_delta_net(config, num_layers, kinds) if is_hybrid else None,
        experts=experts,
        eos_token_ids=tuple(dict.fromkeys(ends + generation.token_ids("eos_token_id"))),
    )


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]]
    found = json.loads(Path(__file__).with_name("defaults.json").read_text())
    return found


def _refuse_sliding_window(
    config: Fields, max_position: int, num_layers: int, kinds: tuple[str, ...]
) -> None:
    if "sliding_window" not in config.defaults:
        return
    slides = "use_sliding_window" not in config.defaults or config.boolean("use_sliding_window")
    if slides and "max_window_layers" in config.defaults:  # else a window is every layer's
        slides = _SLIDING in kinds if kinds else config.integer("max_window_layers") < num_layers
    window = config.values.get("sliding_window", config.defaults["sliding_window"])
    if slides and window is not None and config.integer("sliding_window") < max_position:
        raise ModelError(
            f"{config.origin}: a sliding window of {window} tokens is not supported "
            f"(the model's context is {max_position})"
        )


# Layers


def _layer_kinds(config: Fields, num_layers: int, *, is_hybrid: bool) -> tuple[str, ...]:
    """The attention of each layer, where the file says it."""
    if not config.has("layer_types"):
        return ()
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers:
        raise config.error("layer_types", list(kinds), f"one entry for each of the {num_layers} layers")
    known = [_FULL]
    if is_hybrid:
        known.append(_LINEAR)
    elif "max_window_layers" in config.defaults and config.boolean("use_sliding_window"):
        known.append(_SLIDING)  # with a window as long as the context
    for kind in kinds:
        if kind not in known:
            raise config.error("layer_types", kind, f"{' or '.join(known)} for each layer")
    return kinds


def _delta_net(config: Fields, num_layers: int, kinds: tuple[str, ...]) -> DeltaNetConfig | None:
    """None where all layers have full attention."""
    layers = recurrent_layers(config, [kind == _LINEAR for kind in kinds], num_layers)
    if not layers:
        return None
    return delta_net_of(
        config.origin,
        layers,
        num_key_heads=config.size("linear_num_key_heads", Most.HEADS),
        num_value_heads=config.size("linear_num_value_heads", Most.HEADS),
        key_head_dim=config.size("linear_key_head_dim", Most.DELTA_HEAD),
        value_head_dim=config.size("linear_value_head_dim", Most.DELTA_HEAD),
        conv_kernel=config.integer("linear_conv_kernel_dim", low=2, high=Most.CONV_KERNEL),
    )


def _experts(config: Fields, count_key: str, num_layers: int) -> ExpertsConfig | None:
    """None where all layers have one dense feed-forward block."""
    defaults = config.defaults
    # Some families say which layers have experts, and whether their weights are normalised.
    has_options = "decoder_sparse_step" in defaults
    num_experts = config.integer("num_experts", low=0 if has_options else 1, high=Most.EXPERTS)
    num_experts = config.integer(count_key, num_experts, low=0 if has_options else 1, high=Most.EXPERTS)
    layers, normalised = tuple(range(num_layers)), True
    if has_options:
        step = config.integer("decoder_sparse_step", low=1)
        dense = set(config.integers("mlp_only_layers", high=Most.LAYERS))
        layers = tuple(index for index in layers if (index + 1) % step == 0 and index not in dense)
        normalised = config.boolean("norm_topk_prob")
    if not num_experts or not layers:
        return None
    shared = 0
    if "shared_expert_intermediate_size" in defaults:
        shared = config.size("shared_expert_intermediate_size", Most.WIDTH)
    experts = ExpertsConfig(
        num_layers=len(layers),
        num_experts=num_experts,
        num_active=config.size("num_experts_per_tok", Most.EXPERTS),
        intermediate_size=config.size("moe_intermediate_size", Most.WIDTH),
        shared_intermediate_size=shared,
        normalised=normalised,
        layers=layers,
    )
    check_experts(config.origin, experts)
    return experts


# Rotary embedding


def _rotary_dim(config: Fields, head_dim: int, default_factor: float | None) -> int | None:
    """The rotated elements of each head, None for all. `default_factor` is the family's part of a head where the
    file is silent, None for a family that always rotates whole heads."""
    rope = _rope(config)
    # transformers takes a null beside the other keys as a whole head, whatever the family.
    absent = "partial_rotary_factor" not in config.values
    default = default_factor if absent and default_factor is not None else 1.0
    default = config.number("partial_rotary_factor", default, high=1.0)
    factor = rope.number("partial_rotary_factor", default, high=1.0)
    if default_factor is None:
        if factor != 1.0:
            raise ModelError(f"{rope.origin}: rotating only a part of each head is not supported")
        return None
    rotated = int(head_dim * factor)
    if rotated < 2 or rotated % 2:
        raise ModelFileError(
            f"{rope.origin}: a partial_rotary_factor of {factor:g} leaves {rotated} of a head's {head_dim} "
            "elements to be rotated in pairs"
        )
    return rotated if rotated < head_dim else None


def _rotary(config: Fields, max_position: int) -> RotaryConfig:
    """From `rope_parameters`, or `rope_scaling` and `rope_theta` as older files have them.

    A multimodal model's `mrope_section` is of no consequence: it divides the angles among three grids of
    positions, and in text a token has the same position in all three."""
    rope = _rope(config)

    def optional_scale(key: str) -> float | None:
        return rope.scale(key) if rope.has(key) else None

    theta = rope.theta("rope_theta", config.theta("rope_theta", 10_000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _KINDS:
        raise ModelError(
            f"{rope.origin}: the rope type {kind!r} is not supported; supported are {', '.join(_KINDS)}"
        )
    if kind == "default":
        return RotaryConfig(theta=theta)
    if kind == "linear":
        return RotaryConfig(theta=theta, kind=kind, factor=rope.scale("factor"))
    original = config.size(
        "original_max_position_embeddings",
        Most.POSITIONS,
        rope.size("original_max_position_embeddings", Most.POSITIONS, max_position),
    )
    if kind == "llama3":
        low, high = rope.scale("low_freq_factor"), rope.scale("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", high, f"more than low_freq_factor ({low:g})")
        return RotaryConfig(
            theta=theta,
            kind=kind,
            factor=rope.scale("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RotaryConfig(
        theta=theta,
        kind=kind,
        factor=rope.scale("factor", max_position / original),
        original_max_position=original,
        beta_fast=rope.scale("beta_fast", 32.0),
        beta_slow=rope.scale("beta_slow", 1.0),
        attention_factor=optional_scale("attention_factor"),
        mscale=optional_scale("mscale"),
        mscale_all_dim=optional_scale("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def _rope(config: Fields) -> Fields:
    scaling = config.nested("rope_scaling")
    rope = scaling if scaling.values else config.nested("rope_parameters")
    for key, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.unsupported(key, "one rotary embedding for all layers is")
    return rope
