"""Where a model's tensors lie in a GGUF file, and how to undo what llama.cpp's converter did to them."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ModelFileError
from penstock.models.gguf.config import TILED_VALUE_HEADS
from penstock.models.gguf.header import GgufTensor
from penstock.models.gguf.names import hugging_face_name, stacked_projections
from penstock.plan.model import DeltaNetConfig, ModelConfig

# A tensor in transformers' order -> parts of it, views whose elements lie in the file one after the other.
Order = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Place:
    """One tensor of the model in the file."""

    tensor: GgufTensor
    shape: tuple[int, ...]  # in transformers
    first: int = 0  # the element of the stored tensor that it begins with
    order: Order | None = None  # where the file's differs
    moves_columns: bool = False  # whether that is another order within rows
    restore: Callable[[Tensor], Tensor] | None = (
        None  # values as stored, in float32 -> as transformers has them
    )


def tensor_places(tensors: Mapping[str, GgufTensor], config: ModelConfig, origin: str) -> dict[str, Place]:
    """By names of transformers; tensors that the model has no use for, by their own."""
    places: dict[str, Place] = {}
    for tensor in tensors.values():
        for name, place in _places_in(tensor, config, origin):
            if name in places:
                both = f"{places[name].tensor.name} and {tensor.name}"
                raise ModelFileError(f"{origin} holds {name} twice, in {both}")
            places[name] = place
    return places


def _places_in(tensor: GgufTensor, config: ModelConfig, origin: str) -> Iterator[tuple[str, Place]]:
    if stack := stacked_projections(tensor.name, config):
        yield from _experts(tensor, *stack, config, origin)
    elif name := hugging_face_name(tensor.name, config):
        shape = _shape(name, tensor.shape)
        order = _order(name, config)
        moves_columns = order is not None and name.endswith(".out_proj.weight")
        yield name, Place(tensor, shape, 0, order, moves_columns, _restore(name, config, tensor))
    else:
        yield tensor.name, Place(tensor, tensor.shape)


def _experts(
    tensor: GgufTensor, prefix: str, projections: tuple[str, ...], config: ModelConfig, origin: str
) -> Iterator[tuple[str, Place]]:
    assert config.experts
    num_experts = config.experts.num_experts
    if len(tensor.shape) != 3 or tensor.shape[0] != num_experts or tensor.shape[1] % len(projections):
        raise ModelFileError(
            f"{origin}: tensor {tensor.name} has shape {list(tensor.shape)}, which is not that of "
            f"{' and '.join(projections)} of {num_experts} experts"
        )
    shape = (tensor.shape[1] // len(projections), tensor.shape[2])
    for expert in range(num_experts):
        for index, projection in enumerate(projections):
            first = (expert * len(projections) + index) * math.prod(shape)
            yield f"{prefix}.{expert}.{projection}.weight", Place(tensor, shape, first)


def _shape(name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
    """llama.cpp drops dimensions of 1."""
    if name.endswith(".linear_attn.conv1d.weight") and len(stored) == 2:
        return stored[0], 1, stored[1]
    if name.endswith(".mlp.shared_expert_gate.weight") and len(stored) == 1:
        return 1, stored[0]
    return stored


def _restore(name: str, config: ModelConfig, tensor: GgufTensor) -> Callable[[Tensor], Tensor] | None:
    def logarithm(values: Tensor) -> Tensor:
        """Stored is the decay itself, -exp(A_log)."""
        if not bool((values < 0).all()):
            raise ModelFileError(
                f"tensor {tensor.name} has values that are not below 0, which cannot be a decay"
            )
        return torch.log(-values)

    if name.endswith(".linear_attn.A_log"):
        return logarithm
    if config.zero_centred_norm and name.endswith("norm.weight") and ".linear_attn." not in name:
        return lambda values: values - 1  # stored is what the norm multiplies by
    return None


def _order(name: str, config: ModelConfig) -> Order | None:
    module, _, part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
    if config.family == "llama" and part in ("q_proj", "k_proj"):
        num_heads = config.num_heads if part == "q_proj" else config.num_kv_heads
        return _interleaved_halves(name, num_heads, config.head_dim)
    net = config.delta_net
    if (
        net is None
        or config.family not in TILED_VALUE_HEADS
        or net.num_key_heads == net.num_value_heads
        or not module.endswith(".linear_attn")
    ):
        return None
    if part in ("in_proj_qkv", "conv1d"):  # values come after queries and keys
        return _tiled_rows(name, net, 2 * net.key_size, net.value_head_dim)
    if part == "in_proj_z":
        return _tiled_rows(name, net, 0, net.value_head_dim)
    if part in ("in_proj_b", "in_proj_a", "dt_bias", "A_log"):
        return _tiled_rows(name, net, 0, 1)
    return _tiled_columns(name, net) if part == "out_proj" else None


def _interleaved_halves(name: str, num_heads: int, head_dim: int) -> Order:
    """The two halves of each head of Llama's queries and keys: (head, half, row) here, (head, row, half) there."""

    def order(out: Tensor) -> list[Tensor]:
        _require_heads(name, out.shape[0], num_heads, head_dim)
        return [out.view(num_heads, 2, head_dim // 2, *out.shape[1:]).transpose(1, 2)]

    return order


def _tiled_rows(name: str, net: DeltaNetConfig, start: int, head_dim: int) -> Order:
    """Value heads from row `start` on: (key head, value head of it) here, (value head of a key head, key head)
    there."""

    def order(out: Tensor) -> list[Tensor]:
        _require_heads(name, out.shape[0] - start, net.num_value_heads, head_dim)
        heads = out[start:].view(net.num_key_heads, -1, head_dim, *out.shape[1:])
        return [*([out[:start]] if start else []), heads.transpose(0, 1)]

    return order


def _tiled_columns(name: str, net: DeltaNetConfig) -> Order:
    def order(out: Tensor) -> list[Tensor]:
        _require_heads(name, out.shape[-1], net.num_value_heads, net.value_head_dim)
        heads = out.view(*out.shape[:-1], net.num_key_heads, -1, net.value_head_dim)
        return [heads.transpose(-3, -2)]

    return order


def _require_heads(name: str, size: int, num_heads: int, head_dim: int) -> None:
    if size != num_heads * head_dim:
        raise ModelFileError(
            f"tensor {name} has {size} rows or columns of heads, not {num_heads} of {head_dim}"
        )
