"""A Hugging Face config.json as a model's configuration, with transformers' defaults for absent keys.

The defaults are those of transformers' own classes. Importing one takes a second, so they stand in `defaults.json`,
which `tests/models/hf_defaults.py` writes and a test compares. Beside them stands what transformers' models read and
Penstock does not: a file that has another value there is refused. A plain new family is a row of `FAMILIES` in
`families.py`, its own keys in that program's `DEFAULT_KEYS`, and a line that is written there.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.kernels.elementwise import ACTIVATIONS
from penstock.models.by_transformers.families import REASONS, TRIED
from penstock.models.hf.families import FAMILIES, FULL, MULTIMODAL, SLIDING, Family
from penstock.models.hf.mixers import (
    EXPERTS_BLOCK,
    FEEDING,
    latent_of,
    latent_switches,
    recurrent_parts,
    single_blocks,
)
from penstock.models.hf.quantised import method_of
from penstock.models.hf.rotary import growing, other_rotary_of, rope_of, rotary_dim_of, rotary_of
from penstock.models.reading import (
    Fields,
    Most,
    check_experts,
    check_heads,
    delta_net_of,
    recurrent_layers,
    shortened,
)
from penstock.plan.model import DeltaNetConfig, ExpertsConfig, ModelConfig, WindowConfig

_SHARED = "shared_expert_intermediate_size"
_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_scale": "logit_scale",
}
# Families that were tried with a window: by the kind of each layer, from a layer on, or in every layer.
_WINDOW_BY_KIND = ("qwen2", "qwen3", "qwen2_moe")
_WINDOW_FROM = ("qwen2", "qwen3")
WINDOW_EVERYWHERE = ("mistral", "ministral3", "mixtral", "phi3", "starcoder2", "qwen3_moe")
_LINEAR = "linear_attention"


def hf_model_config(file: Fields, generation: Fields) -> ModelConfig:
    """`file` is config.json, `generation` is generation_config.json (empty where there is none)."""
    name, config = text_model(file)
    family = FAMILIES.get(name)
    if family is None:
        supported = ", ".join((*FAMILIES, *MULTIMODAL, *sorted(TRIED - FAMILIES.keys())))
        why = REASONS.get(name)
        raise ModelError(
            f"{file.origin}: the model type {shortened(repr(name))} is not supported"
            + (f": {why}" if why else f"; supported are {supported}")
        )
    config = replace(config, defaults=family_defaults(name), keys=family.keys)
    for each in (file, config):
        if method_of(each) == "mxfp4" and not family.experts.get("interleaved"):
            raise each.unsupported("quantization_config", "mxfp4 is for gpt_oss alone")
    is_hybrid = config.knows("linear_num_key_heads")  # gates, norms around 1, a part of each head rotated
    has_blocks = config.knows("layers_block_type")  # each layer one
    is_silu = is_hybrid or (config.knows("mamba_n_heads") and not has_blocks)
    known = ["silu", "swish"] if is_silu else ACTIVATIONS
    activation = config.text("hidden_act") if config.knows("hidden_act") else "silu"
    if activation not in known:
        raise ModelError(
            f"{config.origin}: the activation {shortened(repr(activation))} is not supported, only "
            f"{', '.join(known)} are"
        )

    fixed = {**_table()[name]["fixed"], **family.only}
    for key, value in config.values.items():
        if key not in fixed:
            continue
        allowed = fixed[key] if isinstance(fixed[key], tuple) else (fixed[key],)
        if value is not None and value not in allowed:
            raise config.unsupported(key, f"only {' or '.join(map(json.dumps, allowed))} is")
    if config.knows("hidden_size_per_layer_input") and config.integer("hidden_size_per_layer_input"):
        raise ModelError(
            f"{config.origin}: embeddings of single layers (hidden_size_per_layer_input, as Gemma 4 E2B and E4B "
            "have them) are not supported"
        )

    defaults = config.defaults
    hidden = config.size("hidden_size", Most.WIDTH)
    kinds = single_blocks(config) if has_blocks else ()
    num_layers = len(kinds) or config.size("num_hidden_layers", Most.LAYERS)
    num_heads = config.size("num_attention_heads", Most.HEADS)
    # A null means as many as heads, whatever the family.
    kv_heads = None if "num_key_value_heads" in config.values else defaults["num_key_value_heads"]
    num_kv_heads = config.size("num_key_value_heads", Most.HEADS, kv_heads or num_heads)
    head_dim = config.size("head_dim", Most.WIDTH, defaults.get("head_dim") or hidden // num_heads)
    check_heads(config.origin, num_heads, num_kv_heads, head_dim)
    latent, rope = None, rope_of(config, family, FULL)
    if config.knows("kv_lora_rank"):
        latent = latent_of(config, rope, num_heads, num_kv_heads, whole_heads=family.whole_heads)
        head_dim = latent.rotary_dim
    max_position = config.size("max_position_embeddings", Most.POSITIONS)
    kinds = kinds or _layer_kinds(config, family, num_layers, is_hybrid=is_hybrid)
    has_experts = config.knows("num_experts")
    if config.knows("enable_moe_block"):
        has_experts = config.boolean("enable_moe_block")
    experts = _experts(config, family, num_layers, kinds) if has_experts else None
    full_heads = None
    if config.knows("attention_k_eq_v"):
        full_heads = _full_heads(config, kinds, num_heads, num_kv_heads, head_dim)
    if "intermediate_size" in defaults:
        intermediate = _dense_size(config, experts)
    else:
        assert experts is not None
        intermediate = experts.intermediate_size  # of no dense layer, since there is none
    if experts and activation == "xielu":
        raise ModelError(f"{config.origin}: the activation xielu is not supported for experts")

    def says(key: str) -> bool:
        """Whether the family has such a switch, and it is on."""
        return config.knows(key) and config.boolean(key)

    bias = says("attention_bias")
    other, other_layers = other_rotary_of(config, family, kinds, num_layers, max_position, head_dim)
    ends = config.token_ids("eos_token_id") + file.token_ids("eos_token_id")
    return ModelConfig(
        family=name,
        vocab_size=config.size("vocab_size", Most.VOCABULARY),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1 if latent else num_kv_heads,
        head_dim=latent.rank + head_dim if latent else head_dim,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps"),
        # A multimodal model ties its head by the outer key, and writes both. Some text models have none.
        tied_head=file.boolean(
            "tie_embedding"
            if config.knows("conv_L_cache") and file.has("tie_embedding")
            else "tie_word_embeddings",
            config.boolean("tie_word_embeddings", None if config.knows("tie_word_embeddings") else True),
        ),
        full_heads=full_heads,
        rotary=growing(family, rope, rotary_of(config, family, rope, max_position, head_dim)),
        rotary_dim=head_dim if latent else rotary_dim_of(config, rope, head_dim, family.partial_rotary),
        other_rotary=other,
        other_rotary_layers=other_layers,
        qkv_bias=bias or family.qkv_bias or says("qkv_bias"),
        out_bias=says("attention_out_bias")
        if config.knows("attention_out_bias")
        else bias and family.out_bias,
        mlp_bias=says("mlp_bias"),
        head_norm=family.head_norm or says("head_norm"),
        gated_attention=is_hybrid,
        delta_net=_delta_net(config, num_layers, kinds) if is_hybrid else None,
        experts=experts,
        window=_window(config, name, max_position, num_layers, kinds),
        latent=latent,
        feeding_layers=tuple(index for index, kind in enumerate(kinds) if kind in FEEDING)
        if has_blocks
        else None,
        activation=family.activation or {"swish": "silu"}.get(activation, activation),  # two names of one
        eos_token_ids=tuple(dict.fromkeys(ends + generation.token_ids("eos_token_id"))),
        **recurrent_parts(config, num_layers, hidden, kinds),
        **{
            "zero_centred_norm": is_hybrid,
            "values_are_keys": says("attention_k_eq_v"),
            **family.model,
            **_scales(config, family, hidden),
            **(latent_switches(config, latent, rope) if latent else {}),
        },
    )


def text_model(file: Fields) -> tuple[str, Fields]:
    """The type of the text model, and the part of config.json that describes it."""
    name, config = file.text("model_type"), file
    if name in MULTIMODAL:  # older files have the text model's keys beside the others
        config = file.nested("text_config") if file.has("text_config") else file
        name = config.text("model_type", MULTIMODAL[name])
        name = MULTIMODAL.get(name, name)
    return name, config


def family_defaults(name: str) -> Mapping[str, Any]:
    """Of the keys that a family's configuration has."""
    return _table()[name]["defaults"]


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]]
    found = json.loads(Path(__file__).with_name("defaults.json").read_text())
    return found


def _scales(config: Fields, family: Family, hidden: int) -> dict[str, float | None]:
    """What multiplies embeddings, attention's scores, what blocks add, and logits."""
    scales: dict[str, float | None] = {
        name: config.scale(key) for name, key in _MULTIPLIERS.items() if config.knows(key)
    }
    if family.embedding_is_scaled:
        scales["embedding_scale"] = math.sqrt(hidden)
    if config.knows("logits_scaling"):
        scales["logit_scale"] = 1.0 / config.scale("logits_scaling")
    if config.knows("query_pre_attn_scalar"):
        scales["attention_scale"] = config.scale("query_pre_attn_scalar") ** -0.5
    caps = {"logit_softcap": "final_logit_softcapping", "attention_softcap": "attn_logit_softcapping"}
    for name, key in caps.items():
        if config.or_default(key) is not None:
            scales[name] = config.scale(key)
    return scales


def _window(
    config: Fields, name: str, max_position: int, num_layers: int, kinds: tuple[str, ...]
) -> WindowConfig | None:
    """The layers with a sliding window, where that is shorter than the context."""
    if "sliding_window" not in config.defaults:
        return None
    if "use_sliding_window" in config.defaults and not config.boolean("use_sliding_window"):
        return None
    if config.or_default("sliding_window") is None:
        return None
    size = config.integer("sliding_window", low=1)
    if size >= max_position:
        return None
    layers = tuple(range(num_layers))
    if (name in _WINDOW_BY_KIND or FAMILIES[name].full_every) and kinds:
        layers = tuple(index for index in layers if kinds[index] == SLIDING)
    elif name in _WINDOW_FROM:
        layers = layers[config.integer("max_window_layers", low=0) :]
    elif name not in WINDOW_EVERYWHERE or kinds:
        raise ModelError(
            f"{config.origin}: a sliding window of {size} tokens is not supported for {name} "
            f"(the model's context is {max_position})"
        )
    return WindowConfig(size, len(layers), layers) if layers else None


# Layers


def _layer_kinds(config: Fields, family: Family, num_layers: int, *, is_hybrid: bool) -> tuple[str, ...]:
    """The attention of each layer, where the file or the family says it."""
    if not config.has("layer_types"):
        if not family.full_every:
            return ()
        every, key = family.full_every, family.pattern_key
        every = config.size(key, Most.LAYERS, every) if key else every
        windowed = windowed_layers(num_layers - family.last_is_full, every)
        return tuple(SLIDING if index in windowed else FULL for index in range(num_layers))
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers:
        raise config.error("layer_types", list(kinds), f"one entry for each of the {num_layers} layers")
    kinds = tuple(family.kinds.get(kind, kind) for kind in kinds)
    known = [FULL]
    if is_hybrid or family.kinds:
        known.append(_LINEAR)
    elif family.full_every or (
        config.knows("max_window_layers")
        and (not config.knows("use_sliding_window") or config.boolean("use_sliding_window"))
    ):
        known.append(SLIDING)  # whose window may be as long as the context
    for kind in kinds:
        if kind not in known:
            raise config.error("layer_types", kind, f"{' or '.join(known)} for each layer")
    return (*kinds[:-1], FULL) if family.last_is_full else kinds


def _full_heads(
    config: Fields, kinds: tuple[str, ...], num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int] | None:
    """KV heads and elements of a head in layers without a window, where those differ from the others'."""
    key, full = "per_layer_config", [str(index) for index, kind in enumerate(kinds) if kind == FULL]
    own = config.nested(key)
    if config.has(key):
        if not own.values:
            return None
        parts = [own.nested(index) for index in own.values]
        if sorted(own.values) != sorted(full) or any(part.values != parts[0].values for part in parts):
            raise config.error(key, list(own.values)[:8], "the same for each layer without a window")
        if not {*parts[0].values} <= {"head_dim", "num_key_value_heads"}:
            raise config.unsupported(key, "only head_dim and num_key_value_heads are")
        size = parts[0].size("head_dim", Most.WIDTH, head_dim)
        count = parts[0].size("num_key_value_heads", Most.HEADS, num_kv_heads)
    else:
        size, count = config.size("global_head_dim", Most.WIDTH, 512), num_kv_heads
        if config.boolean("attention_k_eq_v"):
            count = config.size("num_global_key_value_heads", Most.HEADS, num_kv_heads)
    check_heads(config.origin, num_heads, count, size)
    return None if (count, size) == (num_kv_heads, head_dim) else (count, size)


def _dense_size(config: Fields, experts: ExpertsConfig | None) -> int:
    """The inner size of feed-forward blocks that are no mixtures."""
    has_shared = config.knows("mamba_n_heads") and config.knows(_SHARED)
    if has_shared and experts is None and not config.knows("layers_block_type"):
        return config.size(_SHARED, Most.WIDTH)  # without experts, their shared one is left
    if not config.knows("block_auto_adjust_ff_dim"):
        return config.size("intermediate_size", Most.WIDTH)
    size = config.size("block_ff_dim", Most.WIDTH, config.size("intermediate_size", Most.WIDTH))
    if not config.boolean("block_auto_adjust_ff_dim"):
        return size
    multiple = config.size("block_multiple_of", Most.WIDTH)
    size = int(config.scale("block_ffn_dim_multiplier") * int(2 * size / 3))
    if not 0 < (size := -(-size // multiple) * multiple) <= Most.WIDTH:
        raise config.error("block_ffn_dim_multiplier", size, f"a product from 1 to {Most.WIDTH}")
    return size


def windowed_layers(num_layers: int, full_every: int) -> tuple[int, ...]:
    """The layers with a window, where one of so many has none: the last of them. 0: all."""
    return tuple(index for index in range(num_layers) if not full_every or (index + 1) % full_every)


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


def _experts(config: Fields, family: Family, num_layers: int, kinds: tuple[str, ...]) -> ExpertsConfig | None:
    """None where all layers have one dense feed-forward block."""
    least = 0 if config.knows("decoder_sparse_step") or config.knows("mamba_n_heads") else 1
    num_experts = config.integer("num_experts", low=least, high=Most.EXPERTS)
    if family.count_key:
        num_experts = config.integer(family.count_key, num_experts, low=least, high=Most.EXPERTS)
    layers = _expert_layers(config, num_layers, kinds)
    if not num_experts or not layers:
        return None
    own = config.knows("moe_intermediate_size")
    inner = config.size("moe_intermediate_size" if own else "intermediate_size", Most.WIDTH)
    shared = 0
    if config.knows("shared_expert_intermediate_size"):
        least = int(config.defaults[config.keys.get(_SHARED, _SHARED)] > 0)
        shared = config.integer(_SHARED, low=least, high=Most.WIDTH)
    elif config.knows("enable_moe_block"):
        shared = config.size("intermediate_size", Most.WIDTH)
    elif config.knows("n_shared_experts"):
        shared = inner * config.size("n_shared_experts", Most.EXPERTS)
    elif config.knows("moe_num_shared_experts"):
        shared = inner * config.integer("moe_num_shared_experts", high=Most.EXPERTS)
    normed, grouping = "norm_topk_prob", dict[str, Any]()
    if config.knows("topk_method") and config.text("topk_method") == "greedy":
        grouping = {"scale": config.number("routed_scaling_factor")}
    elif config.knows("n_group"):
        grouping = {
            "num_groups": config.size("n_group", Most.EXPERTS),
            "num_active_groups": config.size("topk_group", Most.EXPERTS),
            "scale": config.scale("routed_scaling_factor"),
        }
        if config.knows("topk_method"):
            if config.text("topk_method") != "group_limited_greedy":
                raise config.unsupported("topk_method", "greedy and group_limited_greedy are")
            grouping["group_best"] = 1
    elif config.knows("use_expert_bias"):
        grouping = {
            "choice_bias": config.boolean("use_expert_bias"),
            "scale": config.scale("routed_scaling_factor"),
        }
    if config.knows("expert_clamp"):
        grouping["clamp"] = config.number("expert_clamp")
    experts = ExpertsConfig(
        num_layers=len(layers),
        num_experts=num_experts,
        num_active=config.layers_size("num_experts_per_tok", Most.EXPERTS, num_layers),
        intermediate_size=inner,
        shared_intermediate_size=shared,
        layers=layers,
        **{"normalised": not config.knows(normed) or config.boolean(normed), **grouping, **family.experts},
    )
    check_experts(config.origin, experts)
    return experts


def _expert_layers(config: Fields, num_layers: int, kinds: tuple[str, ...]) -> tuple[int, ...]:
    """All, but for what some families say."""
    layers = tuple(range(num_layers))
    if config.knows("layers_block_type"):
        return tuple(index for index in layers if kinds[index] == EXPERTS_BLOCK)
    if config.knows("decoder_sparse_step"):
        step = config.integer("decoder_sparse_step", low=1)
        dense = set(config.integers("mlp_only_layers", high=Most.LAYERS))
        return tuple(index for index in layers if (index + 1) % step == 0 and index not in dense)
    if config.has("mlp_layer_types"):
        listed = config.texts("mlp_layer_types")
        if len(listed) != num_layers or not {*listed} <= {"dense", "sparse"}:
            raise config.error(
                "mlp_layer_types", list(listed), f"dense or sparse for each of {num_layers} layers"
            )
        return tuple(index for index in layers if listed[index] == "sparse")
    if config.knows("mlp_layer_types"):
        return layers[1:]
    if config.knows("first_k_dense_replace"):
        return layers[config.integer("first_k_dense_replace") :]
    if config.knows("moe_layer_interval"):
        interval, start = config.integer("moe_layer_interval", low=1), config.integer("moe_layer_start_index")
        end = config.integer("moe_layer_end_index", low=-1)
        return tuple(
            index for index in layers[start : None if end < 0 else end + 1] if (index + 1) % interval == 0
        )
    return layers


# Rotary embedding
