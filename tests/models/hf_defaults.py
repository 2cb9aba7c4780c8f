"""What transformers' configuration classes assume, and what its models read of them.
`python -m tests.models.hf_defaults` writes the table of both."""

import ast
import json
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

import penstock.models.hf
from penstock.models.hf.config import hf_model_config
from penstock.models.hf.families import FAMILIES
from penstock.models.reading import Fields

TABLE = Path(penstock.models.hf.__file__).with_name("defaults.json")
# Keys of a config.json whose defaults Penstock wants to know.
DEFAULT_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
    *("rms_norm_eps", "tie_word_embeddings", "eos_token_id", "hidden_act"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "sliding_window_pattern"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
    # What some families call these, or have besides.
    *("num_local_experts", "n_routed_experts", "moe_num_experts", "moe_k", "moe_topk"),
    *("shared_intermediate_size", "n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"),
    *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    *("routed_scaling_factor", "n_group", "topk_group"),
    *("norm_epsilon", "norm_eps", "layer_norm_eps", "use_qk_norm"),
    *("use_bias", "qkv_bias", "use_qkv_bias", "attention_out_bias"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "query_pre_attn_scalar"),
    *("logits_scaling", "logit_scale", "final_logit_softcapping", "attn_logit_softcapping"),
    *("no_rope_layer_interval", "default_theta", "original_max_position_embeddings"),
    # Latent attention.
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rope_interleave"),
    *("topk_method", "mlp_layer_types"),
    # Recurrent layers.
    *(
        "conv_L_cache",
        "conv_bias",
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
    ),
    *(
        "num_dense_layers",
        "use_expert_bias",
        "position_embedding_type",
        "full_attn_idxs",
        "attn_layer_indices",
    ),
    *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand"),
    *("mamba_conv_bias", "mamba_proj_bias", "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"),
    *("ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier", "mlp_multipliers", "key_multiplier"),
    *("attention_in_multiplier", "attention_out_multiplier", "lm_head_multiplier"),
    *("hidden_activation", "swiglu_alpha", "swiglu_limit"),
    # Layers of two shapes, and experts beside a dense block.
    *("attention_k_eq_v", "enable_moe_block", "top_k_experts", "hidden_size_per_layer_input"),
    # Layers of one block each.
    *("layers_block_type", "mlp_hidden_act", "layer_norm_epsilon", "moe_shared_expert_intermediate_size"),
    *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "expand"),
    *("use_conv_bias", "time_step_min"),
)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "shared_intermediate_size": 16,
    "pad_token_id": 0,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
}
# Layers of hybrids, whose defaults have none with attention; and as many KV heads as heads.
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_WHOLE = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "head_dim": 16}
_MROPE = {"rope_type": "default", "rope_theta": 1e4}
_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
OWN: dict[str, dict[str, Any]] = {
    **{
        family: {"num_key_value_heads": 4, "num_attention_heads": 4, "n_group": 1, "topk_group": 1}
        for family in LATENT
    },
    "mistral4": {"num_key_value_heads": 4, "num_attention_heads": 4, "n_group": 1, **_WHOLE},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "glm4v_text": {"rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1]}},
    "glm4v_moe_text": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1]}},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "granitemoehybrid": {"layer_types": _LAYERS, "num_hidden_layers": 4},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2},
    "lfm2": {"layer_types": ["conv", *_LAYERS[1:2], "conv", "conv"], "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", *_LAYERS[1:2], "conv", "conv"], "num_hidden_layers": 4},
}
# What a model reads, and what changes nothing of a prompt's logits.
WITHOUT_EFFECT = {
    # Training, and heads for other tasks.
    *(
        "attention_dropout",
        "initializer_range",
        "router_aux_loss_coef",
        "output_router_logits",
        "pretraining_tp",
    ),
    *("resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout", "hidden_dropout"),
    *("router_jitter_noise", "input_jitter_noise"),
    *("id2label", "label2id", "num_labels", "problem_type", "gradient_checkpointing"),
    # What is returned beside the logits, and the way of computing.
    *(
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
        "chunk_size_feed_forward",
        "dtype",
    ),
    # Names, of the model and of tokens that nobody puts anywhere.
    *("architectures", "transformers_version", "name_or_path", "auto_map", "bos_token_id", "pad_token_id"),
    *("eod_token_id", "sep_token_id"),
    # How tokens are grouped on their way, and for a loss.
    *("mamba_chunk_size", "chunk_size", "num_logits_to_keep", "z_loss_coefficient"),
    # Layers that predict several tokens at once, which are left in the file.
    *("num_mtp_layers", "num_nextn_predict_layers"),
}

# Of one family alone.
OWN_WITHOUT_EFFECT = {
    "gemma4_text": {"vocab_size_per_layer_input", "use_double_wide_mlp"},  # of E2B and E4B
    "nemotron_h": {
        # Of weights that are made; of limits that its model does not read.
        *("time_step_max", "time_step_floor", "time_step_limit", "rescale_prenorm_residual"),
        *("use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        "mtp_layers_block_type",
    },
}


def table() -> str:
    """A line for each family. `defaults` are the class's own attributes, before an object of it derives some from
    others. `fixed` is what the class or its model reads and Penstock does not, with the one value it may have."""
    entries = {family: {"defaults": defaults(family), "fixed": fixed(family)} for family in FAMILIES}
    return (
        "{\n" + ",\n".join(f'"{family}": {json.dumps(entry)}' for family, entry in entries.items()) + "\n}\n"
    )


def defaults(family: str) -> dict[str, Any]:
    config = transformers.CONFIG_MAPPING[family]
    found = {key: getattr(config, key) for key in DEFAULT_KEYS if hasattr(config, key)}
    return {key: value for key, value in found.items() if not isinstance(value, property)}


def fixed(family: str) -> dict[str, Any]:
    config = transformers.CONFIG_MAPPING[family]
    found = {field.name: _of_class(config, field.name) for field in fields(config)}
    found |= model_reads(config)
    read = {*DEFAULT_KEYS, *WITHOUT_EFFECT, *OWN_WITHOUT_EFFECT.get(family, ()), *reads_here(family)}
    return {
        name: value
        for name, value in sorted(found.items())
        if name not in read and not name.startswith(("_", "base_", "sub_configs"))
    }


def _of_class(config: type[PreTrainedConfig], name: str) -> Any:
    value = getattr(config, name, None)
    return None if isinstance(value, property) else value


def model_reads(config: type[PreTrainedConfig]) -> dict[str, Any]:
    """The names that a model asks its configuration for, when it is made and run, with their defaults."""
    reads: dict[str, Any] = {}
    original: Any = config.__getattribute__

    def noting(self: Any, name: str) -> Any:
        try:
            value = original(self, name)
        except AttributeError:
            if reads.get(name) is None:
                reads[name] = _literal_default(sys._getframe(1).f_code.co_filename, name)
            raise
        if not callable(value):
            reads.setdefault(name, _of_class(config, name))
        return value

    renamed = getattr(config, "attribute_map", {})
    small: dict[str, Any] = {
        key: value for key, value in SMALL.items() if hasattr(config, key) and key not in renamed
    }
    if "vl" in config.model_type:
        small["rope_parameters"] = {**_MROPE, "mrope_section": [2, 1, 1]}
    made = config(**{**small, **OWN.get(config.model_type, {})})
    setattr(config, "__getattribute__", noting)  # noqa: B010
    try:
        is_alone = type(made) in AutoModelForCausalLM._model_mapping
        model = (AutoModelForCausalLM if is_alone else AutoModel).from_config(made).eval()
        with torch.no_grad():
            past = model(torch.arange(6)[None], use_cache=True).past_key_values
            model(torch.arange(1)[None], past_key_values=past)
    finally:
        del config.__getattribute__
    return reads


@cache
def _literal_default(file: str, name: str) -> Any:
    """What `getattr(config, name, default)` gives where there is none."""
    for node in ast.walk(ast.parse(Path(file).read_text())):
        match node:
            case ast.Call(ast.Name("getattr"), [_, ast.Constant(value), ast.Constant(default)]) if (
                value == name
            ):
                return default
    return None


def sound(family: str) -> dict[str, Any]:
    """The least that a configuration needs, where all defaults are the class's."""
    unset = {key: SMALL[key] for key, value in defaults(family).items() if value is None and key in SMALL}
    own = OWN.get(family, {})
    return {**unset, "model_type": family, "max_position_embeddings": 64, "head_dim": 64, **own}


def reads_here(family: str) -> set[str]:
    reads: set[str] = set()

    class Noting(dict[str, object]):
        def get(self, key: str, default: object = None) -> object:
            reads.add(key)
            return super().get(key, default)

    values = Noting(sound(family))
    hf_model_config(Fields("config.json", values), Fields("generation_config.json", {}))
    return reads


if __name__ == "__main__":
    # A new family is read with its defaults, to see what is read.
    entries = {family: {"defaults": defaults(family), "fixed": {}} for family in FAMILIES}
    TABLE.write_text(json.dumps(entries))
    TABLE.write_text(table())
