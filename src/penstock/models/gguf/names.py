"""Names of tensors: llama.cpp's, and what Hugging Face calls the same."""

import re

from penstock.plan.model import ModelConfig

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
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
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
# Tensors [experts, out, in] that hold one projection of every expert, or two: the second's rows after the first's.
_STACKS = {
    "ffn_gate_exps.weight": ("gate_proj",),
    "ffn_up_exps.weight": ("up_proj",),
    "ffn_down_exps.weight": ("down_proj",),
    "ffn_gate_up_exps.weight": ("gate_proj", "up_proj"),
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")


def hugging_face_name(name: str, config: ModelConfig) -> str | None:
    """The tensor's name in transformers, where the model has a use for it and it is no stack of experts."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        return _with_ending(name, _GLOBAL)
    index, rest = int(block[1]), block[2]
    if index >= config.num_layers:
        return None
    prefix = f"model.layers.{index}."
    if config.delta_net and index in config.delta_net.layers and rest in _DELTA_NET:
        return f"{prefix}linear_attn.{_DELTA_NET[rest]}"
    # The norm before the feed-forward block has two names; the hybrids' tells where it is, not what it serves.
    second_norm = "post_attention_norm" if config.zero_centred_norm else "ffn_norm"
    names = _LAYER | {second_norm: "post_attention_layernorm"}
    if config.experts:
        names |= _EXPERTS
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
