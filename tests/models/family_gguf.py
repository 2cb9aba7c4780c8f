"""Models of transformers as GGUF files: names are the `gguf` package's own, the rest is what llama.cpp's converter
does."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from safetensors.numpy import load_file

from tests.models.builders import permute, write_gguf

Array = np.ndarray[Any, Any]

# By transformers' names: llama.cpp's.
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "glm": "chatglm",
    "glm4": "glm4",
    "glm4v": "glm4",
    "glm4_moe": "glm4moe",
    "dots1": "dots1",
    "starcoder2": "starcoder2",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "arcee": "arcee",
    "gemma": "gemma",
    "cohere": "command-r",
    "nemotron": "nemotron",
    "stablelm": "stablelm",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "cohere2": "cohere2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "mistral4": "mistral4",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h_moe",
}
_PERMUTED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid", "arcee")
_ZERO_CENTRED = ("gemma", "nemotron", "gemma2", "gemma3_text")
_LFM2_EXPERTS = {
    f"{theirs}.weight": f"{ours}_proj.weight"
    for theirs, ours in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
}
_GEMMA4 = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def write_family_gguf(model: Any, folder: Path, path: Path, experts: Kind = Kind.F32, **changes: Any) -> Path:
    """A model that was saved to a folder, in F32; its experts quantised. `changes` are of its metadata, None what it
    has not."""
    architecture = ARCHITECTURES[model.config.model_type]
    config = getattr(model.config, "text_config", model.config)
    if architecture == "gemma4":  # transformers' object refuses what differs from layer to layer
        config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    stored, saved = {}, load_file(folder / "model.safetensors")
    values = _metadata(config) | changes
    is_older = values.get("attention.key_length_mla") is None
    for name, data in _tensors(saved, config, architecture, is_older=is_older).items():
        _, _, index, own = name.split(".", 3) if name.count(".") > 2 else ("", "", "", "")
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        short = f"blk.{index}.{_GEMMA4[own]}" if own in _GEMMA4 else short
        assert short is not None, name
        kind = experts if short.endswith("_exps.weight") else Kind.F32
        data = np.ascontiguousarray(data, dtype=np.float32)
        stored[short] = (data if kind is Kind.F32 else quantize(data, kind), kind)
    if _rope(config).get("rope_type") == "longrope":
        for name in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{name}_factor"], dtype=np.float32)
            stored[f"rope_factors_{name}.weight"] = (factors, Kind.F32)
    if architecture == "gemma4":
        index = config.layer_types.index("full_attention")
        size = len(saved[f"model.layers.{index}.self_attn.k_norm.weight"])
        values |= _by_window(
            config, len(saved[f"model.layers.{index}.self_attn.k_proj.weight"]) // size, size
        )
        share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
        divisors = np.where(np.arange(size // 2) < int(share * size / 2), 1, 1e30)
        stored["rope_freqs.weight"] = (divisors.astype(np.float32), Kind.F32)
    values = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    return write_gguf(path, values, stored, architecture)


def _tensors(saved: dict[str, Array], config: Any, architecture: str, *, is_older: bool) -> dict[str, Array]:
    """`is_older`: what makes keys and values of a latent is one."""
    tensors: dict[str, Array] = {}
    stacks: dict[str, dict[int, Array]] = {}
    for name, data in saved.items():
        name = name.replace("model.language_model.", "model.").replace("language_model.", "")
        if "visual" in name:
            continue
        if expert := _EXPERT.fullmatch(name):
            stem = re.sub(r"^(?:backbone|model)(.*)\.(?:mixer|feed_forward)\.", r"model\1.mlp.", expert[1])
            projection = _LFM2_EXPERTS[expert[3]] if "feed_forward" in name else expert[3]
            stacks.setdefault(f"{stem}.{projection}", {})[int(expert[2])] = data
            continue
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        name, data = _of_states(name, data, config)
        if part == "kv_b_proj" and not is_older:
            heads = data.reshape(config.num_attention_heads, -1, data.shape[1])
            keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
            tensors[name.replace("kv_b_proj", "k_b_proj")] = keys.swapaxes(1, 2)
            tensors[name.replace("kv_b_proj", "v_b_proj")] = values
            continue
        if architecture in _PERMUTED and part in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
            data = permute(data, heads)
        if config.model_type == "glm4v_text" and part in ("q_proj", "k_proj"):
            rotated = int(config.rope_parameters["partial_rotary_factor"] * 16)
            heads = data.reshape(-1, 16, *data.shape[1:])
            parted = (heads[:, :rotated:2], heads[:, 1:rotated:2], heads[:, rotated:])
            data = np.concatenate(parted, axis=1).reshape(data.shape)
        if config.model_type in _ZERO_CENTRED and name.endswith("norm.weight"):
            data = data + np.float32(1)
        if name.endswith("e_score_correction_bias"):
            name, data = name.removesuffix("_correction_bias") + "_correction.bias", data.reshape(-1)
        if config.model_type == "gpt_oss" and ".experts." in name:
            stem, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
            ending, data = (".bias", data) if is_bias else (".weight", data.swapaxes(1, 2))
            if stem.endswith(".gate_up_proj"):  # row by row
                stem = stem.removesuffix("gate_up_proj")
                tensors |= {f"{stem}gate_proj{ending}": data[:, ::2], f"{stem}up_proj{ending}": data[:, 1::2]}
            else:
                tensors[stem + ending] = data
            continue
        if architecture == "gemma4" and name.endswith((".gate_up_proj", ".layer_scalar")):
            name += ".weight"
        if part == "input_linear" or name.endswith(
            ".experts.gate_up_proj"
        ):  # gates and what they gate, as one
            gate, up = np.split(data, 2, axis=-2)
            index, is_shared = name.split(".")[2], "shared_mlp" in name
            stem = f"model.layers.{index}." + ("mlp.shared_experts." if is_shared else "mlp.experts.")
            tensors |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
            continue
        is_bare = name.endswith((".experts.down_proj", ".sinks"))
        tensors[name + ".weight" if is_bare else name] = data
    tensors |= {
        name: np.stack([experts[index] for index in sorted(experts)]) for name, experts in stacks.items()
    }
    return tensors


def _of_states(name: str, data: Array, config: Any) -> tuple[str, Array]:
    """Tensors of recurrent layers, and Falcon-H1's, which are multiplied with what its model multiplies by."""
    if name.endswith(".dt_bias"):
        name = name.removesuffix("dt_bias") + "dt_proj.bias"
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        data = data[:, 0]
    if name.endswith(".A_log"):
        data = -np.exp(data)
    if name.endswith((".A_log", ".D")):
        data = data.reshape(-1, 1)
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        data = data.reshape(getattr(config, "n_groups", None) or config.mamba_n_groups, -1)
    if name.endswith(".expert_bias"):
        name += ".bias"
    if config.model_type == "falcon_h1":
        gate, down = config.mlp_multipliers
        scales = {
            "embed_tokens": config.embedding_multiplier,
            "lm_head": config.lm_head_multiplier,
            "gate_proj": gate,
            "down_proj": down,
            "q_proj": config.attention_in_multiplier,
            "k_proj": config.attention_in_multiplier * config.key_multiplier,
            "v_proj": config.attention_in_multiplier,
            "o_proj": config.attention_out_multiplier,
            "out_proj": config.ssm_out_multiplier,
        }
        data = data * np.float32(scales.get(name.split(".")[-2], 1.0))
        if name.endswith("mamba.in_proj.weight"):
            inner, keys = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
            sizes = (inner, inner, keys, keys, config.mamba_n_heads)
            factors = np.repeat(config.ssm_multipliers, sizes)[:, None] * config.ssm_in_multiplier
            data = data * factors.astype(np.float32)
    return name, data


def _rope(config: Any) -> dict[str, Any]:
    """None in a model that rotates nothing."""
    return getattr(config, "rope_parameters", None) or {}


def _kinds(config: Any) -> dict[str, Any]:
    """What a file has for each layer, and of those with states."""
    if config.model_type not in ("lfm2", "lfm2_moe", "granitemoehybrid", "falcon_h1", "nemotron_h"):
        return {}
    kinds = [] if config.model_type == "falcon_h1" else config.layer_types
    attends = [kind in ("full_attention", "attention") for kind in kinds]
    values: dict[str, Any] = {"rope.scaling.finetuned": False}
    if kinds:
        values["attention.head_count_kv"] = [config.num_key_value_heads * each for each in attends]
    if config.model_type == "nemotron_h":
        values["feed_forward_length"] = [config.moe_intermediate_size * (kind == "moe") for kind in kinds]
        values["attention.layer_norm_rms_epsilon"] = config.layer_norm_epsilon
    if config.model_type.startswith("lfm2"):
        width = config.intermediate_size
        if getattr(config, "block_auto_adjust_ff_dim", False):
            width = int(config.block_ffn_dim_multiplier * int(2 * width / 3))
            width = -(-width // config.block_multiple_of) * config.block_multiple_of
        eps = {"attention.layer_norm_rms_epsilon": config.norm_eps}
        return values | {"shortconv.l_cache": config.conv_L_cache, "feed_forward_length": width, **eps}

    def key(*names: str) -> Any:
        return next(getattr(config, name) for name in names if hasattr(config, name))

    num_heads, size = key("mamba_n_heads", "mamba_num_heads"), key("mamba_d_head", "mamba_head_dim")
    return values | {
        "ssm.conv_kernel": key("mamba_d_conv", "conv_kernel"),
        "ssm.state_size": key("mamba_d_state", "ssm_state_size"),
        "ssm.group_count": key("mamba_n_groups", "n_groups"),
        "ssm.time_step_rank": num_heads,
        "ssm.inner_size": num_heads * size,
    }


def _latent(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    if not getattr(config, "kv_lora_rank", None):
        return {}
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    return {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]
        if "mscale_all_dim" in rope
        else None,
    }


def _metadata(config: Any) -> dict[str, Any]:
    def key(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    rope = _rope(config).get("full_attention", _rope(config))
    factor, original = rope.get("factor"), key("original_max_position_embeddings")
    head_dim = key("head_dim") or config.hidden_size // config.num_attention_heads
    is_sigmoid = config.model_type in ("glm4_moe", "dots1", "deepseek_v3", "nemotron_h", "lfm2_moe")
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": key("rms_norm_eps"),
        "attention.layer_norm_epsilon": key("layer_norm_eps", "norm_epsilon", "norm_eps"),
        "rope.freq_base": rope.get("rope_theta"),
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
        "rope.scaling.type": rope["rope_type"] if factor else None,
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings", original),
        "attention.sliding_window": key("sliding_window"),
        "attn_logit_softcapping": key("attn_logit_softcapping"),
        "final_logit_softcapping": key("final_logit_softcapping"),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]
        if key("sliding_window") and key("layer_types")
        else None,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.dimension_sections": [*rope["mrope_section"], 0] if "mrope_section" in rope else None,
        "attention.scale": key("attention_multiplier"),
        "embedding_scale": key("embedding_multiplier"),
        "residual_scale": key("residual_multiplier"),
        "logit_scale": key("logits_scaling", "logit_scale"),
    }
    if num_experts := key("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts"):
        values |= {
            "expert_count": num_experts,
            "expert_used_count": key("num_experts_per_tok", "moe_k", "moe_topk"),
            "expert_feed_forward_length": key("moe_intermediate_size"),
            "expert_shared_feed_forward_length": key("shared_expert_intermediate_size"),
            "leading_dense_block_count": key(
                "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"
            ),
            "interleave_moe_layer_step": key("moe_layer_interval"),
            "expert_weights_scale": key("routed_scaling_factor"),
            "expert_weights_norm": key("norm_topk_prob")
            if is_sigmoid or config.model_type == "mistral4"
            else None,
            "expert_gating_func": 2 if is_sigmoid else None,
            "expert_group_count": key("n_group"),
            "expert_group_used_count": key("topk_group"),
        }
    return values | _latent(config, rope) | _kinds(config)


def _by_window(config: Any, full_heads: int, full_size: int) -> dict[str, Any]:
    """Of Gemma 4, whose layers without a window have other heads."""
    counts = {"sliding_attention": config.num_key_value_heads, "full_attention": full_heads}
    sizes = {"": full_size, "_swa": config.head_dim}
    return {
        "attention.head_count_kv": [counts[kind] for kind in config.layer_types],
        **{f"attention.key_length{end}": size for end, size in sizes.items()},
        **{f"attention.value_length{end}": size for end, size in sizes.items()},
        **{f"rope.dimension_count{end}": size for end, size in sizes.items()},
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "expert_used_count": config.top_k_experts,
        "expert_count": config.num_experts if config.enable_moe_block else None,
    }
