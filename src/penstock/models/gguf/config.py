"""A GGUF file's metadata as a model's configuration."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.errors import ModelError
from penstock.models.gguf.header import GgufHeader, GgufTensor
from penstock.models.gguf.mixers import by_layer, latent_parts, state_parts
from penstock.models.hf.config import WINDOW_EVERYWHERE, family_defaults, windowed_layers
from penstock.models.hf.families import FAMILIES
from penstock.models.reading import (
    MAX_SCALE,
    MIN_SCALE,
    Fields,
    Most,
    check_experts,
    check_heads,
    delta_net_of,
    recurrent_layers,
    shortened,
)
from penstock.plan.model import DeltaNetConfig, ExpertsConfig, ModelConfig, RotaryConfig, WindowConfig


@dataclass(frozen=True)
class _Architecture:
    """What an architecture's name says beyond the metadata, and beyond what its family has (`hf/families.py`)."""

    family: str  # transformers' model_type
    experts: bool = False
    normalised: bool = True  # the weights of active experts, where a file is silent
    # Delta-net layers, gated attention, zero-centred norms, a shared expert beside experts.
    hybrid: bool = False
    unrotated_step: int = 0  # every so many layers one has no rotary embedding
    states: bool = False  # Mamba-2 or short convolutions
    latent: bool = False
    # Scores are scaled by the size of a head, but by hidden size and heads where there are so many layers.
    wide_layers: int = 0


ARCHITECTURES = {
    "llama": _Architecture("llama"),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "qwen3moe": _Architecture("qwen3_moe", experts=True),
    "qwen3next": _Architecture("qwen3_next", experts=True, hybrid=True),
    "qwen35": _Architecture("qwen3_5_text", hybrid=True),
    "qwen35moe": _Architecture("qwen3_5_moe_text", experts=True, hybrid=True),
    "qwen2moe": _Architecture("qwen2_moe", experts=True, normalised=False),
    "qwen2vl": _Architecture("qwen2_5_vl_text"),
    "qwen3vl": _Architecture("qwen3_vl_text"),
    "qwen3vlmoe": _Architecture("qwen3_vl_moe_text", experts=True),
    "phi3": _Architecture("phi3"),
    "smollm3": _Architecture("smollm3", unrotated_step=4),
    "olmo2": _Architecture("olmo2"),
    "olmoe": _Architecture("olmoe", experts=True, normalised=False),
    "granite": _Architecture("granite"),
    "granitemoe": _Architecture("granitemoeshared", experts=True),
    "chatglm": _Architecture("glm"),
    "glm4": _Architecture("glm4"),
    "glm4moe": _Architecture("glm4_moe", experts=True),
    "dots1": _Architecture("dots1", experts=True),
    "starcoder2": _Architecture("starcoder2"),
    "seed_oss": _Architecture("seed_oss"),
    "ernie4_5": _Architecture("ernie4_5"),
    "ernie4_5-moe": _Architecture("ernie4_5_moe", experts=True),
    "hunyuan-dense": _Architecture("hunyuan_v1_dense"),
    "hunyuan-moe": _Architecture("hunyuan_v1_moe", experts=True),
    "arcee": _Architecture("arcee"),
    "gemma": _Architecture("gemma"),
    "gemma2": _Architecture("gemma2", wide_layers=46),
    "gemma3": _Architecture("gemma3_text", wide_layers=62),
    "gemma4": _Architecture("gemma4_text"),
    "gpt-oss": _Architecture("gpt_oss", experts=True),
    "cohere2": _Architecture("cohere2"),
    "exaone4": _Architecture("exaone4"),
    "command-r": _Architecture("cohere"),
    "nemotron": _Architecture("nemotron"),
    "stablelm": _Architecture("stablelm"),
    "mistral3": _Architecture("ministral3"),
    "deepseek2": _Architecture("deepseek_v2", experts=True, normalised=False, latent=True),
    "mistral4": _Architecture("mistral4", experts=True, normalised=False, latent=True),
    "lfm2": _Architecture("lfm2", states=True),
    "lfm2moe": _Architecture("lfm2_moe", experts=True, states=True),
    "granitehybrid": _Architecture("granitemoehybrid", states=True),
    "falcon-h1": _Architecture("falcon_h1", states=True),
    "nemotron_h": _Architecture("nemotron_h", states=True),
    "nemotron_h_moe": _Architecture("nemotron_h", experts=True, states=True),
}
_MIXTRAL = _Architecture("mixtral", experts=True)  # is called llama, too
_OLMO3 = _Architecture("olmo3")  # is called olmo2, too
_MISTRAL = _Architecture("mistral")  # is called mistral3, too
_DEEPSEEK_V3 = replace(ARCHITECTURES["deepseek2"], family="deepseek_v3")  # is called deepseek2, too
_WITH_OR_WITHOUT_EXPERTS = ("granitehybrid", "gemma4")
_GRANITE = ("granite", "granitemoeshared", "granitemoehybrid")
_GROWTH = "attention.temperature_scale"
_ROTATED = "rope.scaling.finetuned"  # as files of Granite's hybrids have it
_UNROTATED = 1e20  # a divisor of frequencies
_SIGMOID = 2  # of `expert_gating_func`
_WINDOW = "attention.sliding_window"
# What a model of another kind has, and nothing here reads.
_UNREAD = (
    *("embedding_length_per_layer_input", "attention.shared_kv_layers", "moe_latent_size"),
    *("attention.clamp_kqv", "attention.max_alibi_bias"),
)
# Families whose files hold value heads as (value head of a key head, key head), where transformers has
# (key head, value head of it).
TILED_VALUE_HEADS = ("qwen3_5_text", "qwen3_5_moe_text")

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


# Tensors that are a part of the configuration: divisors of the inverse frequencies, of all requests, or of those up
# to the original context and of longer ones.
DIVISORS, SHORT_FACTORS, LONG_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)


def gguf_model_config(
    header: GgufHeader, origin: str, divisors: Mapping[str, tuple[float, ...]]
) -> ModelConfig:
    """`divisors` are the contents of rope_freqs.weight and the like, where the file has them."""
    metadata, tensors = header.metadata, header.tensors
    name = Fields(origin, metadata).text("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise ModelError(
            f"{origin} has the architecture {shortened(repr(name))}; supported in GGUF are {', '.join(ARCHITECTURES)}"
        )
    fields = Fields(origin, _without_prefix(metadata, f"{name}."))
    if name == "llama" and fields.integer("expert_count", 0) > 0:
        architecture = _MIXTRAL
    if name == "olmo2" and fields.integer(_WINDOW, 0) > 0:
        architecture = _OLMO3
    is_biased = any(each.endswith(".exp_probs_b.bias") for each in tensors)
    if name == "deepseek2" and fields.integer("expert_gating_func", 1 + is_biased) == _SIGMOID:
        architecture = _DEEPSEEK_V3
    if name == "mistral3" and not fields.has(_GROWTH):
        architecture = _MISTRAL
    if name in _WITH_OR_WITHOUT_EXPERTS and fields.integer("expert_count", 0) > 0:
        architecture = replace(architecture, experts=True)
    family, row = architecture.family, FAMILIES[architecture.family]
    tokens = Fields(origin, _without_prefix(metadata, "tokenizer.ggml."))
    if not architecture.experts and fields.integer("expert_count", 0) > 0:
        raise ModelError(f"{origin} is a mixture of experts, which is not supported for {name}")

    for key in (*_UNREAD, *(() if row.growth_key or name == "mistral3" else (_GROWTH,))):
        if np.asarray(value := fields.values.get(key, 0)).any():
            raise fields.error(key, value, "0, since what it is for is not supported,")

    num_blocks = fields.size("block_count", Most.LAYERS)
    # Blocks that predict tokens further ahead come after the model's layers.
    num_layers = num_blocks - fields.integer("nextn_predict_layers", 0, high=num_blocks - 1)
    hidden = fields.size("embedding_length", Most.WIDTH)
    num_heads = fields.size("attention.head_count", Most.HEADS)
    kv_heads = by_layer(fields, "attention.head_count_kv", num_blocks, num_heads)[:num_layers]
    max_position = fields.size("context_length", Most.POSITIONS)
    defaults = family_defaults(family) if family == "gemma2" else {}
    window = fields.integer(_WINDOW, defaults.get("sliding_window", 0))
    windowed = _windowed(fields, num_layers, row.full_every) if window else ()
    full_heads: tuple[int, int] | None = None
    suffix = ""
    if fields.has("attention.key_length_swa"):
        full_heads, kv_heads = _full_heads(fields, num_heads, kv_heads, windowed)
        suffix = "_swa"
    num_kv_heads = max(kv_heads)
    if {*kv_heads} - ({0} if architecture.states else set()) != {num_kv_heads}:
        raise ModelError(
            f"{origin}: attention.head_count_kv differs from layer to layer, which is not supported for {name}"
        )
    head_dim = fields.integer(f"attention.key_length{suffix}", hidden // num_heads, low=2, high=Most.WIDTH)
    check_heads(origin, num_heads, num_kv_heads, head_dim)
    is_latent = architecture.latent
    value_length = f"attention.value_length{suffix}"
    if not is_latent and fields.integer(value_length, head_dim, high=Most.WIDTH) != head_dim:
        raise ModelError(f"{origin} has values of another size than keys, which is not supported")
    rotary_dim = fields.integer(f"rope.dimension_count{suffix}", head_dim, high=Most.WIDTH)
    if rotary_dim != head_dim and row.partial_rotary is None and not is_latent:
        raise ModelError(f"{origin} rotates only a part of each head, which is not supported for {name}")
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise fields.error("rope.dimension_count", rotary_dim, f"an even number from 2 to {head_dim}")
    if 0 < window < max_position and not row.full_every and family not in WINDOW_EVERYWHERE:
        raise ModelError(
            f"{origin} has a sliding window of {window} tokens, which is not supported for {name}"
        )
    if LONG_FACTORS in divisors and "longrope" not in row.rope_kinds.values():
        raise ModelError(
            f"{origin} has rotary factors for long and short prompts, which are not supported for {name}"
        )
    if not fields.boolean("attention.causal", True):
        raise fields.unsupported("attention.causal", "only true is")

    delta_net, experts = None, None
    if architecture.hybrid:
        delta_net = _delta_net(fields, num_layers, num_blocks, family in TILED_VALUE_HEADS)
        _check_rotary_sections(fields, rotary_dim // 2)
    widths = by_layer(fields, "feed_forward_length", num_blocks, 1 if architecture.experts else None)[
        :num_layers
    ]
    own: dict[str, Any] = latent_parts(fields, rotary_dim) if is_latent else {}
    if architecture.states:
        own = state_parts(fields, family, hidden, kv_heads, widths, tensors.keys())
    feeding = own.get("feeding_layers")
    if architecture.experts:
        experts = _experts(fields, architecture, num_layers, tensors, feeding)
    recurrent = delta_net.layers if delta_net else ()
    attention = next(
        f"blk.{index}" for index in range(num_layers) if index not in recurrent and kv_heads[index]
    )

    embedding = tensors.get("token_embd.weight")
    vocab_size = fields.size("vocab_size", Most.VOCABULARY, embedding.shape[0] if embedding else None)
    ends = [token for key in END_KEYS if (token := token_id(tokens, key)) is not None]
    step = architecture.unrotated_step or num_layers + 1
    if full_heads and DIVISORS in divisors:
        rotary = _proportional(fields, divisors[DIVISORS], full_heads[1])
    else:
        rotary = _rotary(fields, max_position, rotary_dim, divisors)
    other, other_layers = RotaryConfig(kind="none"), tuple(range(step - 1, num_layers, step))
    if row.rotary_by_kind:
        theta = fields.theta("rope.freq_base_swa", 10_000.0 if name in ("gemma3", "gemma4") else rotary.theta)
        other, other_layers = RotaryConfig(theta=theta), windowed
    elif row.rotated_in_windows and window:
        other_layers = tuple(index for index in range(num_layers) if index not in windowed)
    if family == "nemotron_h" or (family == "granitemoehybrid" and not fields.boolean(_ROTATED, True)):
        rotary = RotaryConfig(kind="none")
    if architecture.latent:  # the model's two figures cancel
        rotary = replace(rotary, attention_factor=1.0 if rotary.kind == "yarn" else None)
    if row.growth_key:
        known = (
            row.rope[row.growth_key] if name == "mistral4" else None
        )  # which llama.cpp's converter leaves out
        growth = fields.number(_GROWTH, known, above=-MAX_SCALE, high=MAX_SCALE)
        log = fields.number("rope.scaling.yarn_log_multiplier", 0.0, above=-1.0, high=MAX_SCALE)
        rotary = replace(rotary, query_growth=growth, mscale=1.0, mscale_all_dim=log)
    if name == "gpt-oss":
        rotary = replace(rotary, truncate=False)
    intermediate = max(widths)
    if experts and not fields.has("feed_forward_length"):
        intermediate = experts.intermediate_size
    elif family == "granitemoehybrid" and not experts:  # whose dense blocks are its shared experts
        intermediate = fields.size("expert_shared_feed_forward_length", Most.WIDTH, intermediate)
    full = next((index for index in range(num_layers) if index not in windowed), 0)
    is_wide = num_layers == architecture.wide_layers
    switches = {"zero_centred_norm": architecture.hybrid, **row.model}
    if family == "glm4" and _has_sections(
        fields
    ):  # the vision model's text: the converter parts rotated pairs
        switches["interleaved_rotary"] = False
    eps = "attention.layer_norm_epsilon" if switches.get("layer_norm") else "attention.layer_norm_rms_epsilon"
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=num_heads,
        max_position=max_position,
        norm_eps=fields.number(eps),
        tied_head="output.weight" not in tensors,
        rotary=rotary,
        other_rotary=other if other_layers else None,
        other_rotary_layers=other_layers,
        qkv_bias=row.qkv_bias or f"{attention}.attn_q.bias" in tensors,
        out_bias=f"{attention}.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        head_norm=row.head_norm or f"{attention}.attn_q_norm.weight" in tensors,
        gated_attention=architecture.hybrid,
        full_heads=full_heads,
        values_are_keys=name == "gemma4" and f"blk.{full}.attn_v.weight" not in tensors,
        activation=row.activation
        or family_defaults(family).get(row.keys.get("hidden_act", "hidden_act"), "silu"),
        window=WindowConfig(window, len(windowed), windowed)
        if windowed and 0 < window < max_position
        else None,
        delta_net=delta_net,
        experts=experts,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        **{
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
            **switches,
            **own,
            **_scales(fields, family, hidden),
            **({"attention_scale": (hidden / num_heads) ** -0.5} if is_wide else {}),
        },
    )


def _full_heads(
    fields: Fields, num_heads: int, kv_heads: tuple[int, ...], windowed: tuple[int, ...]
) -> tuple[tuple[int, int], tuple[int, ...]]:
    """KV heads and elements of a head in layers without a window, and the KV heads of each of the others."""
    full = {heads for index, heads in enumerate(kv_heads) if index not in windowed}
    sizes = [fields.size(f"attention.{name}_length", Most.WIDTH) for name in ("key", "value")]
    if len(full) > 1 or len({*sizes}) > 1 or fields.integer("rope.dimension_count", sizes[0]) != sizes[0]:
        raise fields.unsupported("attention.key_length_swa", "beside layers without a window that are alike")
    others = tuple(kv_heads[index] for index in windowed)
    if not full or not others:
        raise fields.unsupported("attention.key_length_swa", "in some layers")
    heads = (max(full), sizes[0])
    check_heads(fields.origin, num_heads, *heads)
    return heads, others


def _windowed(fields: Fields, num_layers: int, full_every: int) -> tuple[int, ...]:
    """The layers with a window, where files may say which, or after how many one has none."""
    key = "attention.sliding_window_pattern"
    flags = fields.values.get(key)
    if not isinstance(flags, np.ndarray):
        return windowed_layers(num_layers, fields.integer(key, full_every, high=Most.LAYERS))
    if flags.dtype != np.bool_ or len(flags) < num_layers:
        raise fields.error(key, flags, f"an array of {num_layers} truth values")
    return tuple(index for index in range(num_layers) if flags[index])


def _scales(fields: Fields, family: str, hidden: int) -> dict[str, float]:
    """What multiplies embeddings, attention's scores, what blocks add, and logits."""
    if FAMILIES[family].embedding_is_scaled:
        caps = {"logit_softcap": "final_logit_softcapping", "attention_softcap": "attn_logit_softcapping"}
        found = {name: fields.scale(key) for name, key in caps.items() if fields.has(key)}
        if family == "gemma2":  # of which files without them are known
            found = {name: family_defaults(family)[key] for name, key in caps.items()} | found
        return {"embedding_scale": math.sqrt(hidden), **found}
    if family in ("cohere", "cohere2"):
        return {"logit_scale": fields.scale("logit_scale")}
    if family not in _GRANITE:
        return {}
    keys = {"embedding_scale": "embedding_scale", "residual_scale": "residual_scale"}
    keys["attention_scale"] = "attention.scale"
    found = {name: fields.scale(key) for name, key in keys.items() if fields.has(key)}
    return {**found, "logit_scale": 1.0 / fields.scale("logit_scale", 1.0)}


def token_id(fields: Fields, key: str) -> int | None:
    """The id under a key. Some files write -1, or its unsigned twin, for none."""
    value = fields.values.get(key)
    if value is None or (isinstance(value, int) and value in (-1, 0xFFFFFFFF)):
        return None
    return fields.integer(key)


def _rotary(
    fields: Fields, max_position: int, rotary_dim: int, tensors: Mapping[str, tuple[float, ...]]
) -> RotaryConfig:
    theta = fields.theta("rope.freq_base", 10_000.0)
    for name, values in tensors.items():
        if len(values) != rotary_dim // 2 or not all(MIN_SCALE < value <= MAX_SCALE for value in values):
            raise fields.error(
                name,
                values,
                f"a row of {rotary_dim // 2} numbers above {MIN_SCALE:g} and up to {MAX_SCALE:g}",
            )
    divisors = tensors.get(DIVISORS)

    # llama.cpp takes a factor without a type as linear, and has an older name for it.
    kind = fields.text("rope.scaling.type", "linear")
    factor = fields.scale("rope.scaling.factor", fields.scale("rope.scale_linear", 1.0))
    gain = fields.scale("rope.scaling.attn_factor", 1.0)
    original = fields.size("rope.scaling.original_context_length", Most.POSITIONS, max_position)
    if LONG_FACTORS in tensors and SHORT_FACTORS in tensors:
        return RotaryConfig(
            theta=theta,
            kind="longrope",
            factor=max_position / original,
            original_max_position=original,
            attention_factor=gain if fields.has("rope.scaling.attn_factor") else None,
            short_factors=tensors[SHORT_FACTORS],
            long_factors=tensors[LONG_FACTORS],
        )
    if kind == "yarn":
        own = "rope.scaling.yarn_attn_factor"  # of the whole, not on top of what follows from the factor
        whole = fields.scale(own) if fields.has(own) else None
        return RotaryConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=fields.scale("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.scale("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=whole if gain == 1.0 else gain * (0.1 * math.log(max(factor, 1.0)) + 1.0),
            frequency_divisors=divisors,
        )
    if kind not in ("none", "linear") or gain != 1.0:
        raise ModelError(
            f"{fields.origin} scales its rotary embedding by {shortened(repr(kind))} with an attention factor of "
            f"{gain:g}; supported in GGUF are linear and yarn"
        )
    if kind == "none" or factor == 1.0:
        return RotaryConfig(theta=theta, frequency_divisors=divisors)
    return RotaryConfig(theta=theta, kind="linear", factor=factor, frequency_divisors=divisors)


def _proportional(fields: Fields, divisors: tuple[float, ...], head_dim: int) -> RotaryConfig:
    """Where the last pairs of a head are divided by so much that they are not rotated."""
    rotated = divisors.count(1.0)
    if len(divisors) != head_dim // 2 or any(value < _UNROTATED for value in divisors[rotated:]):
        raise fields.error(
            DIVISORS, divisors, f"ones, then {_UNROTATED:g} or more, for {head_dim // 2} pairs"
        )
    share = rotated / len(divisors)
    return RotaryConfig(theta=fields.theta("rope.freq_base", 10_000.0), kind="proportional", share=share)


def _delta_net(fields: Fields, num_layers: int, num_blocks: int, tiled: bool) -> DeltaNetConfig | None:
    """None where all layers have full attention. `num_blocks` counts the blocks after the model's own layers too.
    `tiled`: files of the architecture hold the value heads of one key head apart, not side by side."""
    layers = recurrent_layers(fields, _listed_layers(fields, num_blocks), num_layers)
    if not layers:
        return None
    value_heads = fields.size("ssm.time_step_rank", Most.HEADS)
    value_size = fields.size("ssm.inner_size", Most.WIDTH)
    if value_size % value_heads or value_size // value_heads > Most.DELTA_HEAD:
        raise fields.error(
            "ssm.inner_size", value_size, f"{value_heads} heads of a size from 1 to {Most.DELTA_HEAD}"
        )
    net = delta_net_of(
        fields.origin,
        layers,
        num_key_heads=fields.size("ssm.group_count", Most.HEADS),
        num_value_heads=value_heads,
        key_head_dim=fields.size("ssm.state_size", Most.DELTA_HEAD),
        value_head_dim=value_size // value_heads,
        conv_kernel=fields.integer("ssm.conv_kernel", low=2, high=Most.CONV_KERNEL),
    )
    # llama.cpp leaves this key out; another program writes it, and has files in either order.
    if value_heads != net.num_key_heads and fields.boolean("ssm.v_head_reordered", tiled) != tiled:
        raise ModelError(
            f"{fields.origin} has its value heads in another order than llama.cpp's converter gives them; "
            "convert the model with llama.cpp"
        )
    return net


def _listed_layers(fields: Fields, num_blocks: int) -> list[bool]:
    """Whether each block has a recurrent layer, where the file says it."""
    key = "attention.recurrent_layers"
    if not fields.has(key):
        return []
    flags = fields.values[key]
    if not isinstance(flags, np.ndarray) or flags.dtype != np.bool_ or len(flags) != num_blocks:
        raise fields.error(key, flags, f"an array of {num_blocks} truth values")
    return list(flags.tolist())


def _has_sections(fields: Fields) -> bool:
    """Whether pairs are turned by several positions of a token, as in models of images."""
    sections = np.asarray(fields.values.get("rope.dimension_sections", ()))
    if sections.size > 3 and sections[3]:
        raise fields.error("rope.dimension_sections", sections, "three sections alone")
    return bool(sections[:2].all() and sections.size)


def _check_rotary_sections(fields: Fields, num_pairs: int) -> None:
    """Raise unless each pair of a head is turned by one of a token's three positions, which are the same in text.
    llama.cpp turns the pairs that no section claims by a fourth one, which is always 0 there."""
    key = "rope.dimension_sections"
    if not fields.has(key):
        return
    sections = fields.values[key]
    if (
        not isinstance(sections, np.ndarray)
        or sections.dtype.kind not in "iu"
        or len(sections) not in (3, 4)
        or not 0 <= int(sections.min()) <= int(sections.max()) <= Most.WIDTH
    ):
        raise fields.error(key, sections, "an array of 3 or 4 integers")
    claimed: list[int] = sections.tolist()
    if sum(claimed) < num_pairs or any(pair >= 3 * claimed[pair % 3] for pair in range(num_pairs)):
        raise ModelError(
            f"{fields.origin}: {key} is {claimed}, which leaves some of the {num_pairs} pairs of a head unrotated; "
            "that is not supported"
        )


def _experts(
    fields: Fields,
    architecture: _Architecture,
    num_layers: int,
    tensors: Mapping[str, GgufTensor],
    feeding: tuple[int, ...] | None = None,
) -> ExpertsConfig:
    """`feeding` are the layers with a feed-forward block, where not all have one."""
    row = FAMILIES[architecture.family]
    has_groups = "n_group" in family_defaults(architecture.family)
    # Of other architectures: groups of experts, a factor on their output, other weights.
    gating = float(_SIGMOID) if row.experts.get("scores") == "sigmoid" else 1.0
    others = {} if has_groups else {"expert_group_count": 1.0, "expert_weights_scale": 1.0}
    for key, only in {**others, "expert_gating_func": gating}.items():
        if (value := fields.number(key, only, above=-1.0)) not in (0.0, only):
            raise ModelError(f"{fields.origin}: {key} is {value:g}, which is not supported; only {only:g} is")
    first = fields.integer("leading_dense_block_count", 0, high=num_layers)
    step = fields.size("interleave_moe_layer_step", Most.LAYERS, 1)
    layers = tuple(index for index in range(first, num_layers) if (index + 1) % step == 0)
    layers = layers if feeding is None else feeding
    if not layers:
        raise ModelError(f"{fields.origin} has no layer with experts, which is not supported")
    shared = tensors.get(f"blk.{layers[0]}.ffn_up_shexp.weight")
    shared_key = "expert_shared_feed_forward_length"
    size = shared.shape[0] if shared is not None else 0
    if row.experts.get("normed_apart"):
        size = fields.size("feed_forward_length", Most.WIDTH)
    experts = ExpertsConfig(
        num_layers=len(layers),
        num_experts=fields.size("expert_count", Most.EXPERTS),
        num_active=fields.size("expert_used_count", Most.EXPERTS),
        intermediate_size=fields.size(
            "expert_feed_forward_length"
            if fields.has("expert_feed_forward_length")
            else "feed_forward_length",
            Most.WIDTH,
        ),
        shared_intermediate_size=fields.size(shared_key, Most.WIDTH) if architecture.hybrid else size,
        layers=layers,
        **{
            "normalised": fields.boolean("expert_weights_norm", architecture.normalised),
            "choice_bias": f"blk.{layers[0]}.exp_probs_b.bias" in tensors,
            "num_groups": fields.integer("expert_group_count", 1, high=Most.EXPERTS) or 1,
            "num_active_groups": fields.integer("expert_group_used_count", 1, high=Most.EXPERTS) or 1,
            "scale": fields.number("expert_weights_scale", 1.0, above=-1.0) or 1.0,
            **({"group_best": 1} if architecture.family == "deepseek_v2" else {}),
            "clamp": family_defaults(architecture.family).get("swiglu_limit", 0.0),
            **row.experts,
        },
    )
    check_experts(fields.origin, experts)
    return experts


def _without_prefix(metadata: Mapping[str, object], prefix: str) -> dict[str, object]:
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
