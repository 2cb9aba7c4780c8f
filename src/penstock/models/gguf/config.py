"""A GGUF file's metadata as a model's configuration."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ModelError
from penstock.models.fields import Fields
from penstock.models.gguf.blocks import check_rotary_sections, gguf_delta_net, gguf_experts
from penstock.models.gguf.header import GgufHeader
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
from penstock.plan.model import ModelConfig, RotaryConfig


@dataclass(frozen=True)
class _Architecture:
    """What an architecture's name says beyond the metadata."""

    family: str  # transformers' model_type
    qkv_bias: bool = False
    head_norm: bool = False
    experts: bool = False  # in every layer
    hybrid: bool = (
        False  # delta-net layers, gated attention, zero-centred norms, a shared expert beside experts
    )


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

    num_blocks = fields.integer("block_count", low=1, high=MAX_LAYERS)
    # Blocks that predict tokens further ahead come after the model's layers.
    num_layers = num_blocks - fields.integer("nextn_predict_layers", 0, high=num_blocks - 1)
    hidden = fields.integer("embedding_length", low=1, high=MAX_WIDTH)
    num_heads = fields.integer("attention.head_count", low=1, high=MAX_HEADS)
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads, low=1, high=MAX_HEADS)
    head_dim = fields.integer("attention.key_length", hidden // num_heads, low=2, high=MAX_WIDTH)
    max_position = fields.integer("context_length", low=1, high=MAX_POSITIONS)
    check_heads(origin, num_heads, num_kv_heads, head_dim)
    if fields.integer("attention.value_length", head_dim, high=MAX_WIDTH) != head_dim:
        raise ModelError(f"{origin} has values of another size than keys, which is not supported")
    rotary_dim = fields.integer("rope.dimension_count", head_dim, high=MAX_WIDTH)
    if rotary_dim != head_dim and not architecture.hybrid:
        raise ModelError(f"{origin} rotates only a part of each head, which is not supported for {name}")
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise fields.error("rope.dimension_count", rotary_dim, f"an even number from 2 to {head_dim}")
    window = fields.integer("attention.sliding_window", 0)
    if 0 < window < max_position:
        raise ModelError(f"{origin} has a sliding window of {window} tokens, which is not supported")

    delta_net, experts = None, None
    if architecture.hybrid:
        delta_net = gguf_delta_net(fields, num_layers, num_blocks, family in TILED_VALUE_HEADS)
        check_rotary_sections(fields, rotary_dim // 2)
    if architecture.experts:
        experts = gguf_experts(fields, num_layers, shared=architecture.hybrid)
    recurrent = delta_net.layers if delta_net else ()
    attention = next(f"blk.{index}" for index in range(num_layers) if index not in recurrent)

    embedding = tensors.get("token_embd.weight")
    vocab_size = fields.integer(
        "vocab_size", embedding.shape[0] if embedding else None, low=1, high=MAX_VOCABULARY
    )
    ends = [token for key in END_KEYS if (token := token_id(tokens, key)) is not None]
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer(
            "feed_forward_length", experts.intermediate_size if experts else None, low=1, high=MAX_WIDTH
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
    theta = fields.number("rope.freq_base", 10_000.0, above=MIN_THETA, high=MAX_THETA)
    if divisors is not None and (
        len(divisors) != rotary_dim // 2 or not all(MIN_SCALE < value <= MAX_SCALE for value in divisors)
    ):
        raise fields.error(
            "rope_freqs.weight",
            divisors,
            f"a row of {rotary_dim // 2} numbers above {MIN_SCALE:g} and up to {MAX_SCALE:g}",
        )

    def scale(key: str, default: float) -> float:
        return fields.number(key, default, above=MIN_SCALE, high=MAX_SCALE)

    # llama.cpp takes a factor without a type as linear, and has an older name for it.
    kind = fields.text("rope.scaling.type", "linear")
    factor = scale("rope.scaling.factor", scale("rope.scale_linear", 1.0))
    gain = scale("rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        return RotaryConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=fields.integer(
                "rope.scaling.original_context_length", max_position, low=1, high=MAX_POSITIONS
            ),
            beta_fast=scale("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=scale("rope.scaling.yarn_beta_slow", 1.0),
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


def _without_prefix(metadata: Mapping[str, object], prefix: str) -> dict[str, object]:
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
