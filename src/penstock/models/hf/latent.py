"""Latent attention, as a config.json describes it."""

import math
from typing import Any

from penstock.models.reading import Fields, Most
from penstock.plan.model import LatentConfig


def latent_of(config: Fields, num_heads: int, num_kv_heads: int) -> LatentConfig:
    if num_kv_heads != num_heads:
        raise config.error("num_key_value_heads", num_kv_heads, f"as many as there are heads ({num_heads})")
    rotary_dim = config.size("qk_rope_head_dim", Most.WIDTH)
    if rotary_dim % 2:
        raise config.error("qk_rope_head_dim", rotary_dim, "an even number")
    if config.has("head_dim") and config.integer("head_dim") != rotary_dim:
        raise config.unsupported("head_dim", f"only {rotary_dim} is, as qk_rope_head_dim says")
    # A null means that queries are made of what enters the layer.
    rank = config.values.get("q_lora_rank", config.defaults["q_lora_rank"])
    return LatentConfig(
        rank=config.size("kv_lora_rank", Most.WIDTH),
        rotary_dim=rotary_dim,
        key_dim=config.size("qk_nope_head_dim", Most.WIDTH),
        value_dim=config.size("v_head_dim", Most.WIDTH),
        query_rank=0 if rank is None else config.size("q_lora_rank", Most.WIDTH),
    )


def latent_switches(config: Fields, latent: LatentConfig, rope: Fields) -> dict[str, Any]:
    """Fields of `ModelConfig` that such attention sets: what scales scores, and how files have rotated pairs."""
    scale = (latent.key_dim + latent.rotary_dim) ** -0.5
    has_scaling = rope.text("rope_type", rope.text("type", "default")) != "default"
    if has_scaling and rope.values.get("mscale_all_dim"):
        factor = rope.scale("factor")
        if factor > 1:
            scale *= (0.1 * rope.scale("mscale_all_dim") * math.log(factor) + 1.0) ** 2
    switches: dict[str, Any] = {"attention_scale": scale}
    if config.knows("rope_interleave"):
        switches["interleaved_rotary"] = config.boolean("rope_interleave")
    if not latent.query_rank and config.boolean("attention_bias"):
        raise config.unsupported("attention_bias", "with q_lora_rank null only false is")
    return switches
