"""Latent attention, Mamba-2 and short convolutions, as a GGUF file's metadata describes them."""

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from penstock.errors import ModelError
from penstock.models.hf.config import family_defaults
from penstock.models.reading import MAX_SCALE, Fields, Most, check_state
from penstock.plan.model import LatentConfig, MambaConfig, ShortConvConfig


def by_layer(fields: Fields, key: str, num_blocks: int, default: int | None = None) -> tuple[int, ...]:
    """A number up to `Most.WIDTH` for each block, which a file may have once for all."""
    value = fields.values.get(key)
    if not isinstance(value, np.ndarray):
        return (fields.size(key, Most.WIDTH, default),) * num_blocks
    is_sound = value.dtype.kind in "iu" and len(value) == num_blocks and 0 <= value.min() <= value.max()
    if not is_sound or not 0 < value.max() <= Most.WIDTH:
        raise fields.error(key, value, f"a number, or {num_blocks} of them")
    return tuple(value.tolist())


def state_parts(
    fields: Fields,
    family: str,
    hidden: int,
    num_kv_heads: tuple[int, ...],
    widths: tuple[int, ...],
    tensors: Collection[str],
) -> dict[str, Any]:
    """The fields of `ModelConfig` for layers with states, of the KV heads of each layer and the width of its
    feed-forward block: layers without the first have no attention."""
    layers = tuple(index for index, heads in enumerate(num_kv_heads) if not heads)
    if len(layers) == len(num_kv_heads):
        raise ModelError(
            f"{fields.origin}: none of the {len(layers)} layers has attention; that is not supported"
        )
    if family in ("lfm2", "lfm2_moe"):
        if not layers:
            return {}
        taps = fields.integer("shortconv.l_cache", low=1, high=Most.CONV_KERNEL)
        bias = f"blk.{layers[0]}.shortconv.conv.bias" in tensors
        return {"short_conv": ShortConvConfig(len(layers), hidden, taps, bias, layers)}
    switches: dict[str, Any] = {}
    if family == "falcon_h1":
        layers = tuple(range(len(num_kv_heads)))
        if "output.weight" not in tensors:  # what scales the logits is in that
            raise ModelError(f"{fields.origin} has no output.weight, which is not supported for {family}")
    if family == "nemotron_h":
        feeding = tuple(index for index in layers if widths[index])
        layers = tuple(index for index in layers if not widths[index])
        switches = {"feeding_layers": feeding}
    return {**switches, "mamba": _mamba(fields, family, layers, tensors) if layers else None}


def _mamba(fields: Fields, family: str, layers: tuple[int, ...], tensors: Collection[str]) -> MambaConfig:
    num_heads, inner = (
        fields.size("ssm.time_step_rank", Most.HEADS),
        fields.size("ssm.inner_size", Most.WIDTH),
    )
    if inner % num_heads or inner // num_heads > Most.DELTA_HEAD:
        raise fields.error(
            "ssm.inner_size", inner, f"{num_heads} heads of a size from 1 to {Most.DELTA_HEAD}"
        )
    sizes: dict[str, Any] = {
        "num_key_heads": fields.size("ssm.group_count", Most.HEADS),
        "num_value_heads": num_heads,
        "key_head_dim": fields.size("ssm.state_size", Most.DELTA_HEAD),
        "value_head_dim": inner // num_heads,
        "conv_kernel": fields.integer("ssm.conv_kernel", low=2, high=Most.CONV_KERNEL),
    }
    check_state(fields.origin, "a Mamba layer", **sizes)
    num_groups, first = sizes["num_key_heads"], f"blk.{layers[0]}"
    if family == "granitemoehybrid" and num_groups > 1:
        raise ModelError(
            f"{fields.origin}: ssm.group_count of {num_groups} is not supported, only 1 is: llama.cpp norms each "
            "group, the model all of them"
        )
    return MambaConfig(
        num_layers=len(layers),
        layers=layers,
        **sizes,
        conv_bias=f"{first}.ssm_conv1d.bias" in tensors,
        bias=f"{first}.ssm_in.bias" in tensors,
        norm_groups=num_groups if f"{first}.ssm_norm.weight" in tensors else 0,
        beside_attention=family == "falcon_h1",
        least_step=family_defaults(family).get("time_step_min", 0.0),
    )


def latent_parts(fields: Fields, rotary_dim: int) -> dict[str, Any]:
    """The fields of `ModelConfig` for latent attention. Pairs lie side by side in all such files."""
    # Older files have the sizes of a head without a latent, and attn_kv_b as one.
    is_older = not fields.has("attention.key_length_mla")
    key = fields.size("attention.key_length" if is_older else "attention.key_length_mla", Most.WIDTH)
    if not 2 <= rotary_dim < key or rotary_dim % 2:
        raise fields.error("rope.dimension_count", rotary_dim, f"an even number below {key}")
    latent = LatentConfig(
        rank=fields.size("attention.kv_lora_rank", Most.WIDTH),
        rotary_dim=rotary_dim,
        key_dim=key - rotary_dim,
        value_dim=fields.size(
            "attention.value_length" if is_older else "attention.value_length_mla", Most.WIDTH
        ),
        query_rank=fields.integer("attention.q_lora_rank", 0, high=Most.WIDTH),
    )
    return {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.rank + rotary_dim,
        "rotary_dim": rotary_dim,
        "interleaved_rotary": True,
        "attention_scale": key**-0.5 * _magnitude(fields) ** 2,
    }


def _magnitude(fields: Fields) -> float:
    """What scores are multiplied with, twice, where contexts are stretched. Files have a tenth of the model's."""
    growth = fields.number("rope.scaling.yarn_log_multiplier", 0.0, above=-1.0, high=MAX_SCALE)
    factor = fields.scale("rope.scaling.factor", 1.0)
    return growth * math.log(factor) + 1.0 if factor > 1 else 1.0
