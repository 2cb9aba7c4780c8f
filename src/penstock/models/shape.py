"""A model's configuration as what its memory follows from: its sizes, and how its steps are computed."""

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from penstock.models.weights import WeightSource
from penstock.plan.memory import ActivationModel, WeightBits
from penstock.plan.model import ModelConfig
from penstock.plan.step import Workspace

if TYPE_CHECKING:  # a decoder imports this file
    from penstock.models.decoder import Decoder


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


def activation_model(model: "Decoder", *, joins_past: bool = False) -> ActivationModel:
    """What the steps of a loaded model need, by arithmetic. `joins_past` says that a sequence may lie in several
    places of the cache, as those of a service do."""
    workspace = replace(workspace_of(model), joins_past=joins_past)
    return ActivationModel(model.part, model.dtype.itemsize, workspace)
