"""A model's configuration as what its memory follows from: its sizes, and how its steps are computed."""

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from penstock.models.config import ModelConfig
from penstock.models.source import WeightSource
from penstock.plan import DeltaNetShape, ExpertsShape, ModelShape
from penstock.plan.memory import WeightBits
from penstock.plan.step_shape import Workspace

if TYPE_CHECKING:  # a decoder imports this file
    from penstock.models.decoder import Decoder


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


def stored_bits(source: WeightSource, plain_bits: int) -> WeightBits:
    """What a file's weights take where they are kept as it has them, the others having `plain_bits`."""
    embedding = "model.embed_tokens.weight"
    sizes: dict[str, float] = {}
    bits: dict[str, float] = {}
    for name in source.names():
        shape = source.shape(name)
        if len(shape) == 2:
            form = source.block_form(name)
            sizes[name] = math.prod(shape)
            bits[name] = plain_bits if form is None else form.resident_bits
    matrices = [name for name in sizes if name not in (embedding, "lm_head.weight")]
    total = sum(sizes[name] for name in matrices)
    return WeightBits(
        matrices=sum(sizes[name] * bits[name] for name in matrices) / total,
        vocabulary=bits[embedding],
        is_tied=source.config.tied_head and source.block_form(embedding) is not None,
    )


def workspace_for(config: ModelConfig, workspace: Workspace) -> Workspace:
    """The work space of such a model, on kernels that are known from elsewhere."""
    return replace(
        workspace,
        head_norm=config.head_norm,
        float32_norm=config.zero_centred_norm,
        rotary_dim=config.rotary_dim or 0,
        num_active_experts=config.experts.num_active if config.experts else 0,
    )


def workspace_of(model: "Decoder") -> Workspace:
    """The work space of a loaded model, on its own kernels as they are set up."""
    import torch

    from penstock.kernels.device import device_kind

    kernels = model.kernels
    workspace = Workspace(
        kernels.memory_kind(model.dtype, model.config.head_dim),
        num_threads=torch.get_num_threads(),
        head_rows=kernels.head_rows,
        feed_rows=kernels.feed_rows,
        library_bytes=device_kind(model.device).library_bytes,
        **asdict(kernels.law),
    )
    return workspace_for(model.config, workspace)
