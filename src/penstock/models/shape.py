"""A model's configuration as the sizes that its memory follows from."""

from penstock.models.config import ModelConfig
from penstock.plan import DeltaNetShape, ExpertsShape, ModelShape


def model_shape(config: ModelConfig) -> ModelShape:
    """What `penstock.plan.peak_memory_estimate` needs to know of a model."""
    net, experts = config.delta_net, config.experts
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        gated_attention=config.gated_attention,
        delta_net=DeltaNetShape(
            num_layers=len(net.layers),
            num_key_heads=net.num_key_heads,
            num_value_heads=net.num_value_heads,
            key_head_dim=net.key_head_dim,
            value_head_dim=net.value_head_dim,
            conv_kernel=net.conv_kernel,
        )
        if net and net.layers
        else None,
        experts=ExpertsShape(
            num_layers=len(experts.layers),
            num_experts=experts.num_experts,
            intermediate_size=experts.intermediate_size,
            shared_intermediate_size=experts.shared_intermediate_size,
        )
        if experts and experts.layers
        else None,
    )
