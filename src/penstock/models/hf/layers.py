"""The layers of a Hugging Face config.json that are a delta net or a mixture of experts."""

from dataclasses import dataclass

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

_LINEAR, _FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class ExpertDefaults:
    """What a family's configuration class assumes of its experts where config.json is silent."""

    num_experts: int
    num_active: int
    intermediate_size: int
    shared_intermediate_size: int = 0  # 0: the family has no shared expert
    normalised: bool = True
    has_options: bool = True  # of which layers have experts, and whether their weights are normalised
    count_key: str = "num_experts"  # the key that wins where both this and num_experts are given


def hf_delta_net(config: Fields, num_layers: int) -> DeltaNetConfig | None:
    """None where all layers have full attention."""
    layers = _linear_layers(config, num_layers)
    if len(layers) == num_layers:
        raise ModelError(
            f"{config.origin}: none of the {num_layers} layers has full attention; "
            "models of linear attention alone are not supported"
        )
    if not layers:
        return None
    return delta_net_of(
        config.origin,
        layers,
        num_key_heads=config.integer("linear_num_key_heads", 16, low=1, high=MAX_HEADS),
        num_value_heads=config.integer("linear_num_value_heads", 32, low=1, high=MAX_HEADS),
        key_head_dim=config.integer("linear_key_head_dim", 128, low=1, high=MAX_DELTA_HEAD),
        value_head_dim=config.integer("linear_value_head_dim", 128, low=1, high=MAX_DELTA_HEAD),
        conv_kernel=config.integer("linear_conv_kernel_dim", 4, low=2, high=MAX_CONV_KERNEL),
    )


def _linear_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    if not config.has("layer_types"):
        interval = config.integer("full_attention_interval", 4, low=1, high=MAX_LAYERS)
        return tuple(index for index in range(num_layers) if (index + 1) % interval)
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers:
        raise config.error("layer_types", list(kinds), f"one entry for each of the {num_layers} layers")
    for kind in kinds:
        if kind not in (_LINEAR, _FULL):
            raise config.error("layer_types", kind, f"{_FULL} or {_LINEAR} for each layer")
    return tuple(index for index, kind in enumerate(kinds) if kind == _LINEAR)


def hf_experts(config: Fields, defaults: ExpertDefaults, num_layers: int) -> ExpertsConfig | None:
    """None where all layers have one dense feed-forward block."""
    lowest = 0 if defaults.has_options else 1
    num_experts = config.integer("num_experts", defaults.num_experts, low=lowest, high=MAX_EXPERTS)
    num_experts = config.integer(defaults.count_key, num_experts, low=lowest, high=MAX_EXPERTS)
    layers, normalised = tuple(range(num_layers)), defaults.normalised
    if defaults.has_options:
        step = config.integer("decoder_sparse_step", 1, low=1)
        dense = set(config.integers("mlp_only_layers", high=MAX_LAYERS))
        layers = tuple(index for index in layers if (index + 1) % step == 0 and index not in dense)
        normalised = config.boolean("norm_topk_prob", defaults.normalised)
    if not num_experts or not layers:
        return None
    shared = 0
    if default_shared := defaults.shared_intermediate_size:
        shared = config.integer("shared_expert_intermediate_size", default_shared, low=1, high=MAX_WIDTH)
    experts = ExpertsConfig(
        num_layers=len(layers),
        num_experts=num_experts,
        num_active=config.integer("num_experts_per_tok", defaults.num_active, low=1, high=MAX_EXPERTS),
        intermediate_size=config.integer(
            "moe_intermediate_size", defaults.intermediate_size, low=1, high=MAX_WIDTH
        ),
        shared_intermediate_size=shared,
        normalised=normalised,
        layers=layers,
    )
    check_experts(config.origin, experts)
    return experts
