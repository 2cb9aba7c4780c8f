"""The delta-net layers and the experts that a GGUF file's metadata describes."""

import numpy as np

from penstock.errors import ModelError
from penstock.models.fields import Fields
from penstock.models.limits import (
    MAX_CONV_KERNEL,
    MAX_DELTA_HEAD,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    check_experts,
    delta_net_of,
)
from penstock.plan.model import DeltaNetConfig, ExpertsConfig


def gguf_delta_net(fields: Fields, num_layers: int, num_blocks: int, tiled: bool) -> DeltaNetConfig | None:
    """None where all layers have full attention. `num_blocks` counts the blocks after the model's own layers too.
    `tiled`: files of the architecture hold the value heads of one key head apart, not side by side."""
    layers = _recurrent_layers(fields, num_layers, num_blocks)
    if len(layers) == num_layers:
        raise ModelError(
            f"{fields.origin}: none of the {num_layers} layers has full attention; "
            "models of linear attention alone are not supported"
        )
    if not layers:
        return None
    value_heads = fields.integer("ssm.time_step_rank", low=1, high=MAX_HEADS)
    value_size = fields.integer("ssm.inner_size", low=1, high=MAX_WIDTH)
    if value_size % value_heads or value_size // value_heads > MAX_DELTA_HEAD:
        raise fields.error(
            "ssm.inner_size", value_size, f"{value_heads} heads of a size from 1 to {MAX_DELTA_HEAD}"
        )
    net = delta_net_of(
        fields.origin,
        layers,
        num_key_heads=fields.integer("ssm.group_count", low=1, high=MAX_HEADS),
        num_value_heads=value_heads,
        key_head_dim=fields.integer("ssm.state_size", low=1, high=MAX_DELTA_HEAD),
        value_head_dim=value_size // value_heads,
        conv_kernel=fields.integer("ssm.conv_kernel", low=2, high=MAX_CONV_KERNEL),
    )
    # llama.cpp leaves this key out; another program writes it, and has files in either order.
    if value_heads != net.num_key_heads and fields.boolean("ssm.v_head_reordered", tiled) != tiled:
        raise ModelError(
            f"{fields.origin} has its value heads in another order than llama.cpp's converter gives them; "
            "convert the model with llama.cpp"
        )
    return net


def _recurrent_layers(fields: Fields, num_layers: int, num_blocks: int) -> tuple[int, ...]:
    key = "attention.recurrent_layers"
    if not fields.has(key):
        interval = fields.integer("full_attention_interval", 4, low=1, high=MAX_LAYERS)
        return tuple(index for index in range(num_layers) if (index + 1) % interval)
    flags = fields.values[key]
    if not isinstance(flags, np.ndarray) or flags.dtype != np.bool_ or len(flags) != num_blocks:
        raise fields.error(key, flags, f"an array of {num_blocks} truth values")
    return tuple(index for index in range(num_layers) if flags[index])


def check_rotary_sections(fields: Fields, num_pairs: int) -> None:
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
        or not 0 <= int(sections.min()) <= int(sections.max()) <= MAX_WIDTH
    ):
        raise fields.error(key, sections, "an array of 3 or 4 integers")
    claimed: list[int] = sections.tolist()
    if sum(claimed) < num_pairs or any(pair >= 3 * claimed[pair % 3] for pair in range(num_pairs)):
        raise ModelError(
            f"{fields.origin}: {key} is {claimed}, which leaves some of the {num_pairs} pairs of a head unrotated; "
            "that is not supported"
        )


def gguf_experts(fields: Fields, num_layers: int, shared: bool) -> ExpertsConfig:
    # Of other architectures: groups of experts, a factor on their output, weights that are no softmax.
    for key in ("expert_group_count", "expert_weights_scale", "expert_gating_func"):
        if (value := fields.number(key, 1.0, above=-1.0)) not in (0.0, 1.0):
            raise ModelError(f"{fields.origin}: {key} is {value:g}, which is not supported; only 1 is")
    shared_size = 0
    if shared:
        shared_size = fields.integer("expert_shared_feed_forward_length", low=1, high=MAX_WIDTH)
    experts = ExpertsConfig(
        num_layers=num_layers,
        num_experts=fields.integer("expert_count", low=1, high=MAX_EXPERTS),
        num_active=fields.integer("expert_used_count", low=1, high=MAX_EXPERTS),
        intermediate_size=fields.integer("expert_feed_forward_length", low=1, high=MAX_WIDTH),
        shared_intermediate_size=shared_size,
        # llama.cpp's converter does not write it for these architectures, and llama.cpp normalises.
        normalised=fields.boolean("expert_weights_norm", True),
        layers=tuple(range(num_layers)),
    )
    check_experts(fields.origin, experts)
    return experts
