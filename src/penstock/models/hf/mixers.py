"""Latent attention, Mamba-2 and short convolutions, as a config.json describes them."""

import math
from typing import Any

import torch

from penstock.errors import ModelError
from penstock.models.reading import MAX_SCALE, Fields, Most, check_state
from penstock.plan.model import LatentConfig, MambaConfig, ModelConfig, ShortConvConfig


def latent_of(
    config: Fields, rope: Fields, num_heads: int, num_kv_heads: int, *, whole_heads: bool
) -> LatentConfig:
    if num_kv_heads != num_heads:
        raise config.error("num_key_value_heads", num_kv_heads, f"as many as there are heads ({num_heads})")
    rotary_dim = config.size("qk_rope_head_dim", Most.WIDTH)
    if rotary_dim % 2:
        raise config.error("qk_rope_head_dim", rotary_dim, "an even number")
    head_dim = rotary_dim + whole_heads * config.size("qk_nope_head_dim", Most.WIDTH)
    if config.has("head_dim") and config.integer("head_dim") != head_dim:
        raise config.unsupported("head_dim", f"only {head_dim} is, as qk_rope_head_dim says")
    key = "partial_rotary_factor"
    if rope.has(key) and int(rope.number(key) * head_dim) != rotary_dim:
        raise rope.unsupported(key, f"only {rotary_dim / head_dim:g} is, as qk_rope_head_dim says")
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


def recurrent_parts(config: Fields, num_layers: int, hidden: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """The fields of `ModelConfig` for layers with states."""
    if config.knows("ssm_multipliers"):
        if config.has("quantization_config"):  # blocks cannot be multiplied
            raise config.unsupported("quantization_config", "only original weights are")
        net = _mamba(config, tuple(range(num_layers)), hidden)
        return {"mamba": net, "weight_scales": _weight_scales(config)}
    if config.knows("mamba_n_heads"):
        return {"mamba": _mamba(config, _layers(config, num_layers, kinds), hidden)}
    if config.knows("conv_L_cache"):
        return {"short_conv": _short_conv(config, _layers(config, num_layers, kinds), hidden)}
    return {}


# Kinds of layers that have one block each, by what older files write for them.
_BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
EXPERTS_BLOCK = "moe"
FEEDING = (EXPERTS_BLOCK, "mlp")


def single_blocks(config: Fields) -> tuple[str, ...]:
    """The kind of each layer, in a family whose layers are one block each."""
    key, pattern = "layer_types", "hybrid_override_pattern"
    if config.has(key):
        kinds = tuple(_OLD_NAMES.get(kind, kind) for kind in config.texts(key))
    elif config.has(pattern):
        kinds = tuple(_BLOCKS.get(letter, letter) for letter in config.text(pattern))
        key = pattern
    else:
        kinds = ("linear_attention", "moe", "full_attention", "mlp")
    if not 1 <= len(kinds) <= Most.LAYERS or not {*kinds} <= {*_BLOCKS.values()}:
        raise config.error(key, list(kinds)[:8], f"one of {', '.join(_BLOCKS.values())} for each layer")
    return kinds


def _layers(config: Fields, num_layers: int, kinds: tuple[str, ...]) -> tuple[int, ...]:
    """Those without attention."""
    every = range(num_layers)
    if config.knows("attn_layer_indices"):
        attending = set(config.integers("attn_layer_indices", high=Most.LAYERS))
    elif kinds:
        attending = {index for index in every if kinds[index] == "full_attention"}
    elif config.has("full_attn_idxs"):
        attending = set(config.integers("full_attn_idxs", high=Most.LAYERS))
    else:
        attending = set() if config.knows("mamba_n_heads") else set(every)
    is_single = config.knows("layers_block_type")
    layers = tuple(
        index for index in every if index not in attending and not (is_single and kinds[index] in FEEDING)
    )
    if not attending & {*every}:
        raise ModelError(
            f"{config.origin}: none of the {num_layers} layers has full attention, which is not supported"
        )
    return layers


def _mamba(config: Fields, layers: tuple[int, ...], hidden: int) -> MambaConfig | None:
    """None where no layer is one."""
    if not layers:
        return None
    num_heads = config.size("mamba_n_heads", Most.HEADS)
    inner = config.size("mamba_expand", Most.WIDTH) * hidden
    if config.knows("mamba_d_ssm") and config.values.get("mamba_d_ssm", config.defaults["mamba_d_ssm"]):
        inner = config.size("mamba_d_ssm", Most.WIDTH)
    head_dim = config.values.get(config.keys.get("mamba_d_head", "mamba_d_head"))
    if head_dim is None or head_dim == "auto":
        head_dim, rest = divmod(inner, num_heads)
        if rest or not 1 <= head_dim <= Most.DELTA_HEAD:
            raise config.error("mamba_n_heads", num_heads, f"heads of 1 to {Most.DELTA_HEAD} elements")
    else:
        head_dim = config.size("mamba_d_head", Most.DELTA_HEAD)
    least, most = _step_limits(config)
    own: dict[str, Any] = {}
    if config.knows("time_step_min"):  # whatever the file says of limits
        least, most = config.number("time_step_min", above=-1.0), math.inf
        own = {"norm_groups": config.size("mamba_n_groups", Most.HEADS)}
    if config.knows("ssm_multipliers"):
        own = _beside_attention(config, config.size("mamba_n_groups", Most.HEADS))
    sizes: dict[str, Any] = {
        "num_key_heads": config.size("mamba_n_groups", Most.HEADS),
        "num_value_heads": num_heads,
        "key_head_dim": config.size("mamba_d_state", Most.DELTA_HEAD),
        "value_head_dim": head_dim,
        "conv_kernel": config.integer("mamba_d_conv", low=2, high=Most.CONV_KERNEL),
    }
    check_state(config.origin, "a Mamba layer", **sizes)
    return MambaConfig(
        num_layers=len(layers),
        layers=layers,
        **sizes,
        conv_bias=config.boolean("mamba_conv_bias"),
        bias=config.boolean("mamba_proj_bias"),
        least_step=least,
        most_step=most,
        **own,
    )


def _beside_attention(config: Fields, num_groups: int) -> dict[str, Any]:
    """What Falcon-H1's Mamba layers have besides."""
    scales = _numbers(config, "ssm_multipliers", 5)
    entry = config.number("ssm_in_multiplier")
    return {
        "beside_attention": True,
        "norm_groups": num_groups if config.boolean("mamba_rms_norm") else 0,
        "gates_first": not config.boolean("mamba_norm_before_gate"),
        "input_scales": tuple(scale * entry for scale in scales),
    }


def _weight_scales(config: Fields) -> tuple[tuple[str, float], ...]:
    entry, (gate, down) = config.number("attention_in_multiplier"), _numbers(config, "mlp_multipliers", 2)
    return (
        ("self_attn.q_proj", entry),
        ("self_attn.k_proj", entry * config.number("key_multiplier")),
        ("self_attn.v_proj", entry),
        ("self_attn.o_proj", config.number("attention_out_multiplier")),
        ("linear_attn.out_proj", config.number("ssm_out_multiplier")),
        ("mlp.gate_proj", gate),
        ("mlp.down_proj", down),
    )


def _numbers(config: Fields, key: str, count: int) -> tuple[float, ...]:
    """A list of so many numbers; ones where there is none."""
    values = config.values.get(key)
    if values is None:
        return (1.0,) * count
    found = [_number(each) for each in values] if isinstance(values, list) else []
    numbers = tuple(each for each in found if each is not None and math.isfinite(each))
    if len(numbers) != count or len(found) != count:
        raise config.error(key, values, f"a list of {count} numbers")
    return numbers


def scale_weight(name: str, weight: torch.Tensor, config: ModelConfig) -> None:
    """Multiply a tensor of a file by what a model of its kind multiplies the product with it by."""
    stem = name.removesuffix(".weight")
    for ending, scale in config.weight_scales:
        if stem.endswith(ending):
            weight.mul_(scale)
    if (net := config.mamba) and net.input_scales and stem.endswith("linear_attn.in_proj"):
        sizes = [net.value_size, net.value_size, net.key_size, net.key_size, net.num_value_heads]
        for part, scale in zip(torch.split(weight, sizes), net.input_scales, strict=True):
            part.mul_(scale)


def _short_conv(config: Fields, layers: tuple[int, ...], hidden: int) -> ShortConvConfig | None:
    """None where no layer is one."""
    if not layers:
        return None
    taps = config.integer("conv_L_cache", low=1, high=Most.CONV_KERNEL)
    return ShortConvConfig(len(layers), hidden, taps, config.boolean("conv_bias"), layers)


def _step_limits(config: Fields) -> tuple[float, float]:
    """Between which a token's step lies. transformers writes an infinite number as an object."""
    limits = config.values.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    is_pair = isinstance(limits, list) and len(limits) == 2
    found = [_number(each) for each in limits] if isinstance(limits, list) and is_pair else [None]
    numbers = [each for each in found if each is not None]
    if len(numbers) < 2 or numbers[0] > numbers[1]:
        raise config.error("time_step_limit", limits, "two numbers from 0 on, the smaller one first")
    return numbers[0], numbers[1]


def _number(value: object) -> float | None:
    if value in (math.inf, {"__float__": "Infinity"}):
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= MAX_SCALE else None
