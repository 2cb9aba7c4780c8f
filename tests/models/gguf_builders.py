"""Hybrids and mixtures of experts as GGUF files: what llama.cpp's converter does to a model of transformers."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from tests.models.builders import write_gguf

Array = np.ndarray[Any, Any]

ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_qkvz.weight": "ssm_in.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}


def write_hybrid_gguf(
    model: Any,
    path: Path,
    *,
    quantised: Collection[str] | Mapping[str, Kind] = (),
    fused_experts: bool = False,
    legacy: bool = False,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array] | None = None,
) -> Path:
    """Write a model of transformers as llama.cpp's converter would, in F32.

    `quantised` names tensors, without block and ending, that are Q8_0 instead, or says of which kind they are.
    `legacy` keeps Qwen3-Next's projections in one tensor, as the first files of it have them. `metadata` is added
    (without the architecture's prefix; None removes a key), as are `tensors`."""
    architecture = ARCHITECTURES[model.config.model_type]
    values: dict[str, Any] = hybrid_metadata(model.config)
    values |= {f"{architecture}.{key}": value for key, value in (metadata or {}).items()}
    data = hybrid_tensors(model, fused_experts=fused_experts, legacy=legacy) | dict(tensors or {})
    kinds = quantised if isinstance(quantised, Mapping) else dict.fromkeys(quantised, Kind.Q8_0)
    stored = {}
    for name, array in data.items():
        stem = name.removesuffix(".weight").rpartition(".")[2]
        kind = kinds.get(stem, Kind.F32)
        array = np.ascontiguousarray(array, dtype=np.float32)
        stored[name] = (array if kind is Kind.F32 else gguf.quants.quantize(array, kind), kind)
    kept = {key: value for key, value in values.items() if value is not None}
    return write_gguf(path, kept, stored, architecture)


def hybrid_metadata(config: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes for a configuration, without the tokenizer."""
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if hasattr(config, "num_experts"):
        values |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if hasattr(config, "shared_expert_intermediate_size"):
        values["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if hasattr(config, "linear_num_key_heads"):
        rotary_dim = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        values |= {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "full_attention_interval": config.layer_types.index("full_attention") + 1,
            "rope.dimension_count": rotary_dim,
        }
    if config.model_type.startswith("qwen3_5"):
        values["rope.dimension_sections"] = [11, 11, 10, 0]
    if "intermediate_size" in type(config).__dataclass_fields__:
        values["feed_forward_length"] = config.intermediate_size
    architecture = ARCHITECTURES[config.model_type]
    return {f"{architecture}.{key}": value for key, value in values.items()}


def hybrid_tensors(model: Any, *, fused_experts: bool = False, legacy: bool = False) -> dict[str, Array]:
    """A model's weights with the names, the order and the values that llama.cpp's converter gives them."""
    config = model.config
    is_hybrid = hasattr(config, "linear_num_key_heads")
    tensors: dict[str, Array] = {}
    for name, parameter in model.state_dict().items():
        data: Array = parameter.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if is_hybrid and name.endswith("norm.weight") and ".linear_attn." not in name:
            data = data + np.float32(1)
        if ".linear_attn." in name and config.model_type.startswith("qwen3_5"):
            data = _tiled(config, name, data)
        if name.endswith(".A_log"):
            data = -np.exp(data)
        for short, array in _split(config, name, data, fused_experts, legacy).items():
            tensors[short] = array.squeeze()
    return tensors


def _split(config: Any, name: str, data: Array, fused_experts: bool, legacy: bool) -> dict[str, Array]:
    """The tensors, most often one, that a parameter becomes."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    whole["lm_head.weight"] = "output.weight"
    if name in whole:
        return {whole[name]: data}
    _, _, index, rest = name.split(".", 3)
    if rest == "post_attention_layernorm.weight":
        is_hybrid = hasattr(config, "linear_num_key_heads")
        return {f"blk.{index}.{'post_attention_norm' if is_hybrid else 'ffn_norm'}.weight": data}
    if rest == "mlp.experts.gate_up_proj" and not fused_experts:
        gate, up = np.split(data, 2, axis=1)
        return {f"blk.{index}.ffn_gate_exps.weight": gate, f"blk.{index}.ffn_up_exps.weight": up}
    if rest == "linear_attn.in_proj_qkvz.weight" and not legacy:
        keys, size = config.linear_num_key_heads, config.linear_key_head_dim
        # (key head, its query, key, values and gates) -> all queries, all keys, all values; all gates
        heads = data.reshape(keys, -1, data.shape[-1])
        values = (heads.shape[1] - 2 * size) // 2
        parts = np.split(heads, [size, 2 * size, 2 * size + values], axis=1)
        query, key, value, gate = (part.reshape(-1, data.shape[-1]) for part in parts)
        return {
            f"blk.{index}.attn_qkv.weight": np.concatenate((query, key, value)),
            f"blk.{index}.attn_gate.weight": gate,
        }
    return {f"blk.{index}.{_NAMES[rest]}": data}


def _tiled(config: Any, name: str, data: Array) -> Array:
    """Value heads by their number within a key head first, where transformers has the key head first."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    per_key = config.linear_num_value_heads // keys

    def heads(rows: Array, head_dim: int) -> Array:
        return rows.reshape(keys, per_key, head_dim, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    part = name.split(".linear_attn.")[1].removesuffix(".weight")
    if part in ("in_proj_qkv", "conv1d"):
        start = 2 * keys * config.linear_key_head_dim
        return np.concatenate((data[:start], heads(data[start:], size)))
    if part == "in_proj_z":
        return heads(data, size)
    if part in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
        return heads(data, 1)
    return heads(data.T, size).T if part == "out_proj" else data
