"""Small random models made by transformers' own classes: the oracle, and the same weights in our decoder."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from penstock.engine.run import Run
from penstock.engine.sampler import SamplingParams
from penstock.kernels.interface import select_kernels
from penstock.kernels.probe import measure
from penstock.models.decoder import Decoder
from penstock.models.hf.families import MULTIMODAL
from penstock.models.hf.folder import HfFolder
from penstock.models.loading import load_decoder
from penstock.plan import ChunkedPrefillConfig
from penstock.plan.grids import RowLaw

NUM_GREEDY = int(os.environ.get("PENSTOCK_TEST_TOKENS", "12"))  # tokens of an answer that are compared
_SMALL = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
}

_DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_ZERO_CENTRED = (*HYBRIDS, "gemma", "nemotron", "gemma2", "gemma3", "gemma3_text")
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
_LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3}
_SIGMOID_EXPERTS = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
_WINDOW = {"sliding_window": 40, "num_hidden_layers": 3, "sliding_window_pattern": 2}
_LATENT = {
    "num_key_value_heads": 6,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
_MAMBA = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 32,
}
_MAMBA_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_SHORT_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
# For 12 rotated elements of a head: what `rope` of phi3 may be, beside `original_max_position_embeddings`.
LONGROPE = (
    ("rope_type", "longrope"),
    ("short_factor", (1.0, 1.1, 1.2, 1.3, 1.5, 2.0)),
    ("long_factor", (1.0, 2.0, 3.0, 5.0, 9.0, 20.0)),
    ("partial_rotary_factor", 0.75),
)
_GROWING = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.4,
}
_MROPE = {"rope": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
_MROPE_HALF = {"rope": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}
_OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "ministral": {"sliding_window": 40},
    "ministral3": {"rope": _GROWING},
    "mixtral": _LOCAL_EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 56},
    "qwen2_vl": _MROPE,
    "qwen2_5_vl": _MROPE,
    "qwen3_vl": _MROPE,
    "qwen3_vl_moe": {**_EXPERTS, **_MROPE},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "granite": _MULTIPLIERS,
    "granitemoe": {**_MULTIPLIERS, **_LOCAL_EXPERTS},
    "granitemoeshared": {**_MULTIPLIERS, **_LOCAL_EXPERTS, "shared_intermediate_size": 56},
    "glm4_moe": {**_SIGMOID_EXPERTS, "use_qk_norm": True},
    "dots1": {**_SIGMOID_EXPERTS, "sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "ernie4_5_moe": {
        "num_hidden_layers": 3,
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 40,
        "moe_num_shared_experts": 2,
    },
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": 3},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"sliding_window": 40, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_WINDOW, "query_pre_attn_scalar": 20},
    "gemma3": {**_WINDOW, "query_pre_attn_scalar": 20},
    "gemma4_text": {
        **_WINDOW,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 40,
    },
    "cohere2": {**_WINDOW, "logit_scale": 0.25},
    "olmo3": {"sliding_window": 40, "num_hidden_layers": 4},
    "exaone4": _WINDOW,
    "deepseek_v2": {**_SIGMOID_EXPERTS, **_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_SIGMOID_EXPERTS, **_LATENT},
    "mistral4": {**_SIGMOID_EXPERTS, **_LATENT, "head_dim": 24, "rope": _GROWING},
    "glm4v": _MROPE_HALF,
    "glm4v_moe": {**_SIGMOID_EXPERTS, **_MROPE_HALF},
    "glm4_moe_lite": {**_SIGMOID_EXPERTS, **_LATENT},
    "lfm2": {**_SHORT_CONV, "block_multiple_of": 40},
    "lfm2_moe": {**_SHORT_CONV, **_EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.7},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {
        **_MAMBA,
        "num_hidden_layers": 2,
        "mamba_d_ssm": 192,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.9,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "mlp_multipliers": [0.8, 1.3],
    },
    "nemotron_h": {
        **_SIGMOID_EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
        "moe_shared_expert_intermediate_size": 56,
        "mamba_num_heads": 6,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 24,
        "chunk_size": 32,
    },
    "granitemoehybrid": {
        **_MAMBA,
        **_MULTIPLIERS,
        **_LOCAL_EXPERTS,
        "layer_types": _MAMBA_LAYERS,
        "shared_intermediate_size": 56,
    },
    "gpt_oss": {
        "sliding_window": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        # transformers 5.17's model has 7, whatever the configuration says.
        "swiglu_limit": 0.7 if hasattr(transformers.GptOssConfig, "swiglu_limit") else 7.0,
    },
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 56},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 56},
}


@dataclass(frozen=True, eq=False)
class Oracle:
    """transformers' model in float32, and the folder its weights were saved to."""

    model: Any
    folder: Path

    def logits(self, prompt: list[int]) -> torch.Tensor:
        """Logits [vocab] after the prompt."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([prompt])).logits[0, -1].float()
        return logits

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        out = self.model.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


@cache
def make_oracle(family: str, **overrides: Any) -> Oracle:
    """A random model of a family. Weights are drawn wide enough that attention and norms all matter."""
    torch.manual_seed(7)
    overrides = {key: list(value) if isinstance(value, tuple) else value for key, value in overrides.items()}
    settings = {**_SMALL, **_OWN.get(family, {}), **overrides}
    if rope := dict(settings.pop("rope", ())):
        by_kind: dict[str, Any] = {
            kind: dict(own) for kind, own in rope.items() if kind.endswith("_attention")
        }
        own = {key: list(value) if isinstance(value, tuple) else value for key, value in rope.items()}
        settings["rope_parameters"] = by_kind or {"rope_theta": 10_000.0, **own}
    config_class = transformers.CONFIG_MAPPING[family]
    if family in MULTIMODAL:
        config = config_class(text_config=settings, tie_word_embeddings=settings["tie_word_embeddings"])
        config.vision_config.update(_VISION)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    else:
        config = config_class(**settings)
        # Some versions take attention without a soft cap unless they are told.
        how = {"attn_implementation": "eager"} if family == "gemma2" else {}
        is_text = (
            config_class in AutoModelForCausalLM._model_mapping
        )  # or else it is known within others alone
        auto = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
        model = auto.from_config(config, dtype=torch.float32, **how).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith((".e_score_correction_bias", ".expert_bias")):
                buffer.uniform_(-0.2, 0.2)
            if name.endswith(".layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", ".per_expert_scale")):
                is_zero_centred = family in _ZERO_CENTRED and "linear_attn" not in name
                parameter.uniform_(-0.5, 0.5) if is_zero_centred else parameter.uniform_(0.5, 1.5)
            elif "A_log" in name or "dt_bias" in name:
                # Some heads remember a few tokens, some hundreds.
                parameter.uniform_(-4.0, 1.0)
            else:
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    folder = Path(mkdtemp(prefix="penstock-oracle-"))
    model.save_pretrained(folder)
    return Oracle(model, folder)


@cache
def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """With the kernels that are chosen here, native ones where they can be had (`PENSTOCK_KERNELS`)."""
    cpu = torch.device("cpu")
    return load_decoder(HfFolder(folder), select_kernels(cpu), dtype, cpu)


@cache
def canon_of(model: Decoder) -> RowLaw:
    """The model's canonical shapes, by a probe made now."""
    result = measure(model.kernels, model.probe_shapes, model.dtype, model.device)
    assert result.same_bits
    return result.bind(model.kernels)


def run_prompt(model: Decoder, prompt: list[int], *, num_tokens: int = 1, **settings: Any) -> Run:
    """A run whose prompt has been read and `num_tokens` tokens sampled greedily."""
    chunk_size = settings.pop("chunk_size", 0)
    overlap = settings.pop("overlap", 0)
    canon = settings.pop("canon", None) or canon_of(model)
    run = Run(
        model,
        prompt,
        config=ChunkedPrefillConfig(chunk_size, overlap),
        canon=canon,
        max_tokens=settings.pop("max_tokens", num_tokens + 1),
        sampling=SamplingParams(),
        **settings,
    )
    while len(run.generated) < num_tokens:
        run.step()
    return run


def random_prompt(num_tokens: int, vocab_size: int = 211, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()
