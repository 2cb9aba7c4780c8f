"""A model's tensors in a GGUF file: their names, where they lie, and how to undo what llama.cpp's converter did."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ModelFileError
from penstock.models.gguf.config import TILED_VALUE_HEADS
from penstock.models.gguf.header import GgufTensor
from penstock.models.weights import EXPERTS_ENTRY, EXPERTS_EXIT, MIXER_EXIT, MLP_EXIT, SHARED_EXIT
from penstock.plan.model import DeltaNetConfig, ModelConfig

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
# Families whose rows of queries and keys llama.cpp's converter permutes, so that rotated pairs lie side by side.
_PERMUTED = (
    *("llama", "mistral", "ministral3", "mixtral", "smollm3", "granite", "granitemoeshared"),
    *("granitemoehybrid", "arcee"),
)
# Gate and up as one.
_FUSED = ("phi3", "glm", "glm4")
# Files of these name the norm before the feed-forward block for where it is, not for what it serves.
_NORMED_AFTER_ATTENTION = ("qwen3_next", *TILED_VALUE_HEADS, "seed_oss", "glm4_moe", "gpt_oss")
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Of Gemma 4, with their endings.
_APART = {
    "pre_ffw_norm_2.weight": f"{EXPERTS_ENTRY}.weight",
    "post_ffw_norm_1.weight": f"{SHARED_EXIT}.weight",
    "post_ffw_norm_2.weight": f"{EXPERTS_EXIT}.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
}
# With their endings, which not all of them have.
_DELTA_NET = {
    "attn_qkv.weight": "in_proj_qkv.weight",
    "attn_gate.weight": "in_proj_z.weight",
    "ssm_in.weight": "in_proj_qkvz.weight",
    "ssm_ba.weight": "in_proj_ba.weight",
    "ssm_beta.weight": "in_proj_b.weight",
    "ssm_alpha.weight": "in_proj_a.weight",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_dt.bias": "dt_bias",
    "ssm_dt": "dt_bias",
    "ssm_a": "A_log",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
}
_MAMBA = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_in.bias": "in_proj.bias",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
    "ssm_out.bias": "out_proj.bias",
}
_SHORT_CONV = {
    f"shortconv.{name}.{ending}": f"{ours}.{ending}"
    for name, ours in (("conv", "conv1d"), ("in_proj", "in_proj"), ("out_proj", "out_proj"))
    for ending in ("weight", "bias")
}
# Tensors [experts, out, in] that hold one projection of every expert, or two: the second's rows after the first's.
_STACKS = {
    "ffn_gate_exps.weight": ("gate_proj",),
    "ffn_up_exps.weight": ("up_proj",),
    "ffn_down_exps.weight": ("down_proj",),
    "ffn_gate_up_exps.weight": ("gate_proj", "up_proj"),
    # [experts, out]
    "ffn_gate_exps.bias": ("gate_proj",),
    "ffn_up_exps.bias": ("up_proj",),
    "ffn_down_exps.bias": ("down_proj",),
}
# A tensor that others are to be multiplied with.
SCALE = re.compile(r"blk\.[0-9]{1,6}\..+\.(?:input_)?scale")
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")

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
    # Values as stored, in float32 -> as transformers has them.
    restore: Callable[[Tensor], Tensor] | None = None


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
    ending = tensor.name.rpartition(".")[2]
    num_dims = 2 if ending == "bias" else 3
    if len(tensor.shape) != num_dims or tensor.shape[0] != num_experts or tensor.shape[1] % len(projections):
        raise ModelFileError(
            f"{origin}: tensor {tensor.name} has shape {list(tensor.shape)}, which is not that of "
            f"{' and '.join(projections)} of {num_experts} experts"
        )
    shape = (tensor.shape[1] // len(projections), *tensor.shape[2:])
    for expert in range(num_experts):
        for index, projection in enumerate(projections):
            first = (expert * len(projections) + index) * math.prod(shape)
            yield f"{prefix}.{expert}.{projection}.{ending}", Place(tensor, shape, first)


def _shape(name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
    """llama.cpp drops dimensions of 1."""
    if name.endswith(".linear_attn.conv1d.weight") and len(stored) == 2:
        return stored[0], 1, stored[1]
    if ".linear_attn." in name and name.endswith((".A_log", ".D", ".norm.weight")):
        return (math.prod(stored),)
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
    if config.family in _PERMUTED and part in ("q_proj", "k_proj"):
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


# Names


def hugging_face_name(name: str, config: ModelConfig) -> str | None:
    """The tensor's name in transformers, where the model has a use for it and it is no stack of experts."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        return _with_ending(name, _GLOBAL | ({"token_embd_norm": "model.norm"} if config.short_conv else {}))
    index, rest = int(block[1]), "ffn_norm.weight" if block[2] == "ffn_norm" else block[2]  # Falcon-H1's
    if index >= config.num_layers:
        return None
    prefix = f"model.layers.{index}."
    states = _DELTA_NET if config.delta_net else _MAMBA if config.mamba else _SHORT_CONV
    if (net := config.recurrent) and index in net.layers and rest in states:
        return f"{prefix}linear_attn.{states[rest]}"
    if config.layer_scale and rest in _APART:
        return prefix + _APART[rest]
    is_after = config.family in _NORMED_AFTER_ATTENTION
    names = _LAYER | {"post_attention_norm" if is_after else "ffn_norm": "post_attention_layernorm"}
    if config.post_norm:
        names |= {"post_attention_norm": MIXER_EXIT, "post_ffw_norm": MLP_EXIT}
    if config.family in _FUSED:
        names |= {"ffn_up": "mlp.gate_up_proj"}
    if config.latent:
        names |= _LATENT
    if config.experts:
        names |= _EXPERTS
        if rest == "attn_sinks.weight":
            return f"{prefix}self_attn.sinks"
        if rest == "exp_probs_b.bias":
            return f"{prefix}mlp.gate.e_score_correction_bias"
    found = _with_ending(rest, names)
    return prefix + found if found else None


def stacked_projections(name: str, config: ModelConfig) -> tuple[str, tuple[str, ...]] | None:
    """Of a stack of experts: what their names in transformers begin with, and the projections it holds."""
    block = _BLOCK.fullmatch(name)
    if (
        block is None
        or block[2] not in _STACKS
        or not config.experts
        or int(block[1]) not in config.experts.layers
    ):
        return None
    return f"model.layers.{block[1]}.mlp.experts", _STACKS[block[2]]


def _with_ending(name: str, names: dict[str, str]) -> str | None:
    stem, _, ending = name.rpartition(".")
    return f"{names[stem]}.{ending}" if stem in names and ending in ("weight", "bias") else None
