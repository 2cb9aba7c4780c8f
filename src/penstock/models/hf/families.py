"""Families of models: what each has beyond what its configuration says, by transformers' `model_type`.

Which keys a family's configuration has, its defaults tell (`defaults.json`). Names of tensors that differ from
Llama's and Qwen's are given as those.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from penstock.models.weights import EXPERTS_ENTRY, EXPERTS_EXIT, MIXER_EXIT, MLP_EXIT, SHARED_EXIT

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers


@dataclass(frozen=True)
class Family:
    """A row of the table. `keys` and `names` map Llama's and Qwen's to the family's, and the family's to those."""

    qkv_bias: bool = False
    out_bias: bool = True  # where `attention_bias` says that there are biases
    head_norm: bool = False
    whole_heads: bool = False  # `head_dim` is of both parts of a latent head's key, of which one is rotated
    partial_rotary: float | None = None  # the rotated part of a head where a file is silent; None: always all
    rope: Mapping[str, Any] = field(default_factory=dict)  # where a file is silent
    rope_kinds: Mapping[str, str] = field(default_factory=dict)  # what it means by some
    growth_key: str = ""  # of `rope_parameters`: `RotaryConfig.query_growth`
    activation: str = ""  # whatever the file says
    embedding_is_scaled: bool = False  # by the root of the hidden size
    # Where a file is silent, one layer of so many sees everything, the last of them; the others see a window.
    full_every: int = 0
    last_is_full: bool = False  # whatever a file says of the last layer
    pattern_key: str = ""  # what the file calls that number, where it may say it
    rotary_by_kind: bool = False  # layers with a window have a rotary embedding of their own
    rotated_in_windows: bool = False  # where layers have windows, those without one are not rotated
    keys: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)  # of parts of a layer's tensors
    model: Mapping[str, Any] = field(default_factory=dict)  # fields of `ModelConfig`
    experts: Mapping[str, Any] = field(default_factory=dict)  # fields of `ExpertsConfig`
    kinds: Mapping[str, str] = field(default_factory=dict)  # what it calls kinds of layers
    # The one value that a key may have, or a tuple of them.
    only: Mapping[str, Any] = field(default_factory=dict)
    count_key: str = ""  # the key that wins where both this and num_experts are given

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        parts = "|".join(re.escape(name) for name in self.names)
        return re.compile(rf"(?<=\.)(?:{parts})(?=\.|$)")

    def tensor_name(self, name: str) -> str:
        """Our name of a tensor that the family calls so."""
        if not self.names or not name.startswith("model."):
            return name
        return self._pattern.sub(lambda found: self.names[found[0]], name)


NO_LAYER = 1 << 20  # of those sees everything, where a file is silent
_NORMS_AFTER = {"post_attention_layernorm": MIXER_EXIT, "post_feedforward_layernorm": MLP_EXIT}
_GLM_NORMS = {"post_self_attn_layernorm": MIXER_EXIT, "post_mlp_layernorm": MLP_EXIT}
_BLOCK_SPARSE = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_GRANITE_EXPERTS = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.router.layer": "mlp.gate",
    "shared_mlp.input_linear": "mlp.shared_expert.gate_up_proj",
    "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
}
_SHARED = {"shared_experts": "shared_expert"}
_SIGMOID = {"scores": "sigmoid", "choice_bias": True, "shared_gate": False}
_LATE_NORMS = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_NTK = {"dynamic": "ntk_alpha"}
_BIASES = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
_LFM2 = {
    "conv.conv": "linear_attn.conv1d",
    "conv": "linear_attn",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "embedding_norm": "norm",
    "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_BAMBA = {
    "mamba": "linear_attn",
    "feed_forward": "mlp",
    "pre_ff_layernorm": "post_attention_layernorm",
    "final_layernorm": "norm",
}
_NEMOTRON_H = {
    "embeddings": "embed_tokens",
    "norm_f": "norm",
    "mixer.norm": "mixer.norm",
    "norm": "input_layernorm",
    **_SHARED,
}
_ONLY_AFTER = {"pre_norm": False, "post_norm": True}
_SANDWICH = {**_NORMS_AFTER, "pre_feedforward_layernorm": "post_attention_layernorm"}
_GEMMA = {"zero_centred_norm": True, "post_norm": True}

FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_norm=True),
    "qwen3_moe": Family(head_norm=True, count_key="num_local_experts"),
    "qwen3_next": Family(head_norm=True, partial_rotary=0.25),
    "qwen3_5_text": Family(head_norm=True, partial_rotary=0.25),
    "qwen3_5_moe_text": Family(head_norm=True, partial_rotary=0.25),
    "ministral": Family(full_every=NO_LAYER),
    "ministral3": Family(growth_key="llama_4_scaling_beta", rope=_GROWING | {"factor": 16.0}),
    "mixtral": Family(keys={"num_experts": "num_local_experts"}, names=_BLOCK_SPARSE),
    "qwen2_moe": Family(),
    "qwen2_vl_text": Family(qkv_bias=True, rope_kinds={"mrope": "default"}),
    "qwen2_5_vl_text": Family(qkv_bias=True, rope_kinds={"mrope": "default"}),
    "qwen3_vl_text": Family(head_norm=True),
    "qwen3_vl_moe_text": Family(head_norm=True, count_key="num_local_experts"),
    "seed_oss": Family(),
    "phi3": Family(partial_rotary=1.0, rope_kinds={"su": "longrope", "yarn": "longrope"}),
    "smollm3": Family(),
    "olmo2": Family(head_norm=True, names=_NORMS_AFTER, model={"norm_all_heads": True, **_ONLY_AFTER}),
    "olmoe": Family(head_norm=True, model={"norm_all_heads": True}),
    "granite": Family(),
    "granitemoe": Family(keys={"num_experts": "num_local_experts"}, names=_GRANITE_EXPERTS),
    "granitemoeshared": Family(
        keys={
            "num_experts": "num_local_experts",
            "shared_expert_intermediate_size": "shared_intermediate_size",
        },
        names=_GRANITE_EXPERTS,
        experts={"shared_gate": False},
    ),
    "glm": Family(out_bias=False, partial_rotary=0.5, model={"interleaved_rotary": True}),
    "glm4": Family(
        out_bias=False,
        partial_rotary=0.5,
        names=_GLM_NORMS,
        model={"interleaved_rotary": True, "post_norm": True},
    ),
    "glm4_moe": Family(
        out_bias=False,
        partial_rotary=0.5,
        keys={"num_experts": "n_routed_experts", "head_norm": "use_qk_norm"},
        names=_SHARED,
        experts=_SIGMOID,
    ),
    "glm4v_text": Family(
        qkv_bias=True,
        out_bias=False,
        partial_rotary=1.0,
        rope_kinds={"mrope": "default"},
        names=_GLM_NORMS,
        model={"interleaved_rotary": True, "post_norm": True},
    ),
    "glm4v_moe_text": Family(
        out_bias=False,
        partial_rotary=0.5,
        rope_kinds={"mrope": "default"},
        keys={"num_experts": "n_routed_experts", "head_norm": "use_qk_norm"},
        names=_SHARED,
        experts=_SIGMOID,
    ),
    "dots1": Family(
        head_norm=True, keys={"num_experts": "n_routed_experts"}, names=_SHARED, experts=_SIGMOID
    ),
    "starcoder2": Family(
        keys={"rms_norm_eps": "norm_epsilon", **_BIASES},
        names={"c_fc": "up_proj", "c_proj": "down_proj"},
        model={"layer_norm": True, "norm_bias": True, "gated_mlp": False},
    ),
    "ernie4_5": Family(keys=_BIASES, model={"interleaved_rotary": True}),
    "ernie4_5_moe": Family(
        keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        names={"moe_statics": "gate", **_SHARED},
        only={"use_bias": False},
        model={"interleaved_rotary": True},
        experts={"choice_bias": True, "shared_gate": False},
    ),
    "hunyuan_v1_dense": Family(
        head_norm=True, rope_kinds=_NTK, names=_LATE_NORMS, model={"norm_after_rotary": True}
    ),
    "hunyuan_v1_moe": Family(
        head_norm=True,
        rope_kinds=_NTK,
        keys={"num_experts_per_tok": "moe_topk", "shared_expert_intermediate_size": "intermediate_size"},
        names={"shared_mlp": "shared_expert", "gate.wg": "gate", **_LATE_NORMS},
        model={"norm_after_rotary": True},
        experts={"shared_gate": False},
    ),
    "apertus": Family(
        head_norm=True,
        rope={
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        names={
            "attention_layernorm": "input_layernorm",
            "feedforward_layernorm": "post_attention_layernorm",
        },
        model={"gated_mlp": False},
    ),
    "arcee": Family(model={"gated_mlp": False}),
    "gemma": Family(embedding_is_scaled=True, model={"zero_centred_norm": True}),
    "gemma2": Family(
        embedding_is_scaled=True,
        full_every=2,
        keys={"hidden_act": "hidden_activation"},
        names=_SANDWICH,
        model=_GEMMA,
    ),
    "gemma3_text": Family(
        embedding_is_scaled=True,
        head_norm=True,
        full_every=6,
        pattern_key="sliding_window_pattern",
        rotary_by_kind=True,
        keys={"hidden_act": "hidden_activation"},
        names=_SANDWICH,
        only={"attn_logit_softcapping": None},  # which transformers' model ignores
        model=_GEMMA,
    ),
    "gemma4_text": Family(
        embedding_is_scaled=True,
        head_norm=True,
        full_every=6,
        last_is_full=True,
        rotary_by_kind=True,
        rope={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        rope_kinds={"proportional": "proportional"},
        keys={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
        names={
            **_SANDWICH,
            "post_feedforward_layernorm_1": SHARED_EXIT,
            "post_feedforward_layernorm_2": EXPERTS_EXIT,
            "pre_feedforward_layernorm_2": EXPERTS_ENTRY,
            "router.proj": "mlp.gate",
            "experts": "mlp.experts",
        },
        only={
            "attention_bias": False,
            "num_kv_shared_layers": 0,
            "use_bidirectional_attention": (None, "vision"),  # of which there is none in text
        },
        model={"post_norm": True, "value_norm": True, "layer_scale": True, "attention_scale": 1.0},
        experts={"shared_gate": False, "normed_apart": True},
    ),
    "cohere": Family(
        keys={"rms_norm_eps": "layer_norm_eps"},
        only={"use_qk_norm": False},
        model={"layer_norm": True, "parallel_blocks": True, "interleaved_rotary": True},
    ),
    "cohere2": Family(
        full_every=4,
        pattern_key="sliding_window_pattern",
        rotated_in_windows=True,
        keys={"rms_norm_eps": "layer_norm_eps"},
        model={"layer_norm": True, "parallel_blocks": True, "interleaved_rotary": True},
    ),
    "olmo3": Family(
        head_norm=True,
        full_every=4,
        rotary_by_kind=True,
        names=_NORMS_AFTER,
        model={"norm_all_heads": True, **_ONLY_AFTER},
    ),
    "gpt_oss": Family(
        full_every=2,
        activation="quick_gelu",
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        keys={"num_experts": "num_local_experts", "expert_clamp": "swiglu_limit"},
        names={"router": "gate"},
        only={"swiglu_alpha": 1.702, "hidden_act": "silu"},
        model={"sinks": True},
        experts={"bias": True, "interleaved": True},
    ),
    "exaone4": Family(
        head_norm=True,
        full_every=4,
        pattern_key="sliding_window_pattern",
        rotated_in_windows=True,
        names=_NORMS_AFTER,
        model=_ONLY_AFTER,
    ),
    "helium": Family(out_bias=False, model={"interleaved_rotary": True}),
    "nemotron": Family(
        keys={"rms_norm_eps": "norm_eps"},
        partial_rotary=0.5,
        model={"layer_norm": True, "norm_bias": True, "zero_centred_norm": True, "gated_mlp": False},
    ),
    "stablelm": Family(
        keys={"rms_norm_eps": "layer_norm_eps", "qkv_bias": "use_qkv_bias"},
        partial_rotary=0.25,
        model={"layer_norm": True, "norm_bias": True},
    ),
    "deepseek_v2": Family(
        keys={"num_experts": "n_routed_experts"},
        names=_SHARED,
        only={"mlp_bias": False},  # shared experts would have it, too
        model={"interleaved_rotary": True},
        experts={"shared_gate": False, "normalised": False},
    ),
    "deepseek_v3": Family(keys={"num_experts": "n_routed_experts"}, names=_SHARED, experts=_SIGMOID),
    "mistral4": Family(
        whole_heads=True,
        growth_key="llama_4_scaling_beta",
        rope=_GROWING | {"factor": 128.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 8192},
        keys={"num_experts": "n_routed_experts"},
        names=_SHARED,
        experts={"shared_gate": False},
    ),
    "glm4_moe_lite": Family(keys={"num_experts": "n_routed_experts"}, names=_SHARED, experts=_SIGMOID),
    "lfm2": Family(
        head_norm=True, keys={"rms_norm_eps": "norm_eps"}, names=_LFM2, kinds={"conv": "linear_attention"}
    ),
    "lfm2_moe": Family(
        head_norm=True,
        keys={"rms_norm_eps": "norm_eps", "first_k_dense_replace": "num_dense_layers"},
        names=_LFM2,
        kinds={"conv": "linear_attention"},
        experts={"scores": "sigmoid"},
    ),
    "bamba": Family(
        partial_rotary=0.5,
        names=_BAMBA,
    ),
    "falcon_h1": Family(
        keys={"logit_scale": "lm_head_multiplier"},
        names=_BAMBA,
        only={"projectors_bias": False, "mamba_proj_bias": False, "attention_bias": False, "mlp_bias": False},
    ),
    "nemotron_h": Family(
        keys={
            "layer_types": "layers_block_type",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "mlp_hidden_act",
            "num_experts": "n_routed_experts",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_expand": "expand",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_proj_bias": "use_bias",
        },
        names=_NEMOTRON_H,
        # None of which transformers' model reads, or reads in all places.
        only={"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
        model={"gated_mlp": False},
        experts=_SIGMOID,
    ),
    "granitemoehybrid": Family(
        keys={
            "num_experts": "num_local_experts",
            "shared_expert_intermediate_size": "shared_intermediate_size",
        },
        names={"mamba": "linear_attn", **_GRANITE_EXPERTS},
        kinds={"mamba": "linear_attention", "attention": "full_attention"},
        experts={"shared_gate": False},
    ),
}

# Models of text and pictures, whose text model is described under `text_config`; what it is if that does not say.
MULTIMODAL = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "mistral3": "mistral",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "gemma3": "gemma3_text",
    "aria": "aria_text",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "exaone4_5": "exaone4",
    "fuyu": "persimmon",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4v_text",
    "glm46v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "got_ocr2": "qwen2",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "janus": "llama",
    "lfm2_vl": "lfm2",
    "lighton_ocr": "qwen3",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "minicpm_ocr": "qwen3_5_text",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "moss_transcribe_diarize": "qwen3",
    "ovis2": "qwen2",
    "pp_chart2table": "qwen2",
    "qwen3_asr": "qwen3",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
}
