"""A GGUF file's metadata as a model's configuration."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.errors import ModelError
from penstock.models.gguf.header import GgufHeader
from penstock.models.reading import (
    MAX_SCALE,
    MIN_SCALE,
    Fields,
    Most,
    check_experts,
    check_heads,
    delta_net_of,
    recurrent_layers,
)
from penstock.plan.model import DeltaNetConfig, ExpertsConfig, ModelConfig, RotaryConfig


@dataclass(frozen=True)
class _Architecture:
    """What an architecture's name says beyond the metadata."""

    family: str  # transformers' model_type
    qkv_bias: bool = False
    head_norm: bool = False
    experts: bool = False  # in every layer
    # Delta-net layers, gated attention, zero-centred norms, a shared expert beside experts.
    hybrid: bool = False


_ARCHITECTURES = {
    "llama": _Architecture("llama"),
    "qwen2": _Architecture("qwen2", qkv_bias=True),
    "qwen3": _Architecture("qwen3", head_norm=True),
    "qwen3moe": _Architecture("qwen3_moe", head_norm=True, experts=True),
    "qwen3next": _Architecture("qwen3_next", head_norm=True, experts=True, hybrid=True),
    "qwen35": _Architecture("qwen3_5_text", head_norm=True, hybrid=True),
    "qwen35moe": _Architecture("qwen3_5_moe_text", head_norm=True, experts=True, hybrid=True),
}
# Families whose files hold value heads as (value head of a key head, key head), where transformers has
# (key head, value head of it).
TILED_VALUE_HEADS = ("qwen3_5_text", "qwen3_5_moe_text")

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_model_config(
    header: GgufHeader, origin: str, frequency_divisors: tuple[float, ...] | None
) -> ModelConfig:
    """`frequency_divisors` are the contents of rope_freqs.weight, where the file has it."""
    metadata, tensors = header.metadata, header.tensors
    name = Fields(origin, metadata).text("general.architecture")
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        raise ModelError(
            f"{origin} has the architecture {name!r}; supported in GGUF are {', '.join(_ARCHITECTURES)}"
        )
    family = architecture.family
    fields = Fields(origin, _without_prefix(metadata, f"{name}."))
    tokens = Fields(origin, _without_prefix(metadata, "tokenizer.ggml."))
    if not architecture.experts and fields.integer("expert_count", 0) > 0:
        raise ModelError(f"{origin} is a mixture of experts, which is not supported for {name}")

    num_blocks = fields.size("block_count", Most.LAYERS)
    # Blocks that predict tokens further ahead come after the model's layers.
    num_layers = num_blocks - fields.integer("nextn_predict_layers", 0, high=num_blocks - 1)
    hidden = fields.size("embedding_length", Most.WIDTH)
    num_heads = fields.size("attention.head_count", Most.HEADS)
    num_kv_heads = fields.size("attention.head_count_kv", Most.HEADS, num_heads)
    head_dim = fields.integer("attention.key_length", hidden // num_heads, low=2, high=Most.WIDTH)
    max_position = fields.size("context_length", Most.POSITIONS)
    check_heads(origin, num_heads, num_kv_heads, head_dim)
    if fields.integer("attention.value_length", head_dim, high=Most.WIDTH) != head_dim:
        raise ModelError(f"{origin} has values of another size than keys, which is not supported")
    rotary_dim = fields.integer("rope.dimension_count", head_dim, high=Most.WIDTH)
    if rotary_dim != head_dim and not architecture.hybrid:
        raise ModelError(f"{origin} rotates only a part of each head, which is not supported for {name}")
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise fields.error("rope.dimension_count", rotary_dim, f"an even number from 2 to {head_dim}")
    window = fields.integer("attention.sliding_window", 0)
    if 0 < window < max_position:
        raise ModelError(f"{origin} has a sliding window of {window} tokens, which is not supported")
    if not fields.boolean("attention.causal", True):
        raise fields.unsupported("attention.causal", "only true is")

    delta_net, experts = None, None
    if architecture.hybrid:
        delta_net = _delta_net(fields, num_layers, num_blocks, family in TILED_VALUE_HEADS)
        _check_rotary_sections(fields, rotary_dim // 2)
    if architecture.experts:
        experts = _experts(fields, num_layers, shared=architecture.hybrid)
    recurrent = delta_net.layers if delta_net else ()
    attention = next(f"blk.{index}" for index in range(num_layers) if index not in recurrent)

    embedding = tensors.get("token_embd.weight")
    vocab_size = fields.size("vocab_size", Most.VOCABULARY, embedding.shape[0] if embedding else None)
    ends = [token for key in END_KEYS if (token := token_id(tokens, key)) is not None]
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.size(
            "feed_forward_length", Most.WIDTH, experts.intermediate_size if experts else None
        ),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tied_head="output.weight" not in tensors,
        rotary=_rotary(fields, max_position, rotary_dim, frequency_divisors),
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        qkv_bias=architecture.qkv_bias or f"{attention}.attn_q.bias" in tensors,
        out_bias=f"{attention}.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        head_norm=architecture.head_norm,
        gated_attention=architecture.hybrid,
        zero_centred_norm=architecture.hybrid,
        delta_net=delta_net,
        experts=experts,
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )


def token_id(fields: Fields, key: str) -> int | None:
    """The id under a key. Some files write -1, or its unsigned twin, for none."""
    value = fields.values.get(key)
    if value is None or (isinstance(value, int) and value in (-1, 0xFFFFFFFF)):
        return None
    return fields.integer(key)


def _rotary(
    fields: Fields, max_position: int, rotary_dim: int, divisors: tuple[float, ...] | None
) -> RotaryConfig:
    theta = fields.theta("rope.freq_base", 10_000.0)
    if divisors is not None and (
        len(divisors) != rotary_dim // 2 or not all(MIN_SCALE < value <= MAX_SCALE for value in divisors)
    ):
        raise fields.error(
            "rope_freqs.weight",
            divisors,
            f"a row of {rotary_dim // 2} numbers above {MIN_SCALE:g} and up to {MAX_SCALE:g}",
        )

    # llama.cpp takes a factor without a type as linear, and has an older name for it.
    kind = fields.text("rope.scaling.type", "linear")
    factor = fields.scale("rope.scaling.factor", fields.scale("rope.scale_linear", 1.0))
    gain = fields.scale("rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        return RotaryConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=fields.size(
                "rope.scaling.original_context_length", Most.POSITIONS, max_position
            ),
            beta_fast=fields.scale("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.scale("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=None if gain == 1.0 else gain * (0.1 * math.log(max(factor, 1.0)) + 1.0),
            frequency_divisors=divisors,
        )
    if kind not in ("none", "linear") or gain != 1.0:
        raise ModelError(
            f"{fields.origin} scales its rotary embedding by {kind!r} with an attention factor of {gain:g}; "
            "supported in GGUF are linear and yarn"
        )
    if kind == "none" or factor == 1.0:
        return RotaryConfig(theta=theta, frequency_divisors=divisors)
    return RotaryConfig(theta=theta, kind="linear", factor=factor, frequency_divisors=divisors)


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


def _experts(fields: Fields, num_layers: int, shared: bool) -> ExpertsConfig:
    # Of other architectures: groups of experts, a factor on their output, weights that are no softmax.
    for key in ("expert_group_count", "expert_weights_scale", "expert_gating_func"):
        if (value := fields.number(key, 1.0, above=-1.0)) not in (0.0, 1.0):
            raise ModelError(f"{fields.origin}: {key} is {value:g}, which is not supported; only 1 is")
    shared_size = 0
    if shared:
        shared_size = fields.size("expert_shared_feed_forward_length", Most.WIDTH)
    experts = ExpertsConfig(
        num_layers=num_layers,
        num_experts=fields.size("expert_count", Most.EXPERTS),
        num_active=fields.size("expert_used_count", Most.EXPERTS),
        intermediate_size=fields.size("expert_feed_forward_length", Most.WIDTH),
        shared_intermediate_size=shared_size,
        # llama.cpp's converter does not write it for these architectures, and llama.cpp normalises.
        normalised=fields.boolean("expert_weights_norm", True),
        layers=tuple(range(num_layers)),
    )
    check_experts(fields.origin, experts)
    return experts


def _without_prefix(metadata: Mapping[str, object], prefix: str) -> dict[str, object]:
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
