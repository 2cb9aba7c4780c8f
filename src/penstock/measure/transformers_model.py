"""The weights that Penstock runs, in transformers' own model."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from penstock.errors import ModelError
from penstock.layers.rotary import rotary_frequencies
from penstock.measure.random_weights import RandomWeights
from penstock.models.hf.families import FAMILIES, MULTIMODAL
from penstock.models.hf.folder import HfFolder, read_json
from penstock.models.source import WeightSource, check_source
from penstock.models.weights import expected_shapes
from penstock.plan.model import ModelConfig

# Families whose configuration `transformers_config` gives.
_DESCRIBED = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def load_transformers(source: WeightSource, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """A causal language model of transformers with `sdpa` attention, filled one tensor at a time."""
    config = source.config
    if not config.by_transformers:
        check_source(source)
    if config.family not in _DESCRIBED:
        if isinstance(source, RandomWeights):
            return _like(source, dtype, device)
        if not isinstance(source, HfFolder):
            raise ModelError(
                f"{source.describe()}: its family is compared with transformers' from a folder of safetensors alone"
            )
        kind = AutoModelForImageTextToText if _is_within(source.path) else AutoModelForCausalLM
        found = kind.from_pretrained(source.path, dtype=dtype, attn_implementation="sdpa")
        return found.to(device).eval()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            transformers_config(config), dtype=dtype, attn_implementation="sdpa"
        )
    model = model.to_empty(device=device).eval()
    model.tie_weights()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if {name: tuple(each.shape) for name, each in parameters.items()} != expected_shapes(config, parameters):
        raise ModelError(
            f"{source.describe()}: transformers' {config.family} model has other tensors, "
            "so there is nothing to compare with"
        )
    present = source.names()
    for name, parameter in parameters.items():
        _load(source, present, name, parameter)
    _fill_rotary(model.model.rotary_emb, config)
    return model


def _like(source: RandomWeights, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A model of the same settings, with the same weights."""
    family = FAMILIES[source.config.family]
    described = AutoConfig.for_model(**dict(source.settings))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(described, dtype=dtype, attn_implementation="sdpa").eval()
    for name, parameter in model.named_parameters():
        source.load_into(family.tensor_name(name), parameter.detach())
    return model


def _is_within(folder: Path) -> bool:
    """Whether the model is the text part of a multimodal one."""
    return read_json(folder / "config.json")["model_type"] in MULTIMODAL


def transformers_config(config: ModelConfig) -> PreTrainedConfig:
    """transformers' configuration of the same model. Rotary scaling is left out: see `_fill_rotary`. A family's class
    ignores what its models do not have."""
    experts, net = config.experts, config.delta_net
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "mlp_bias")
    settings: dict[str, Any] = {name: getattr(config, name) for name in same} | {
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "attention_bias": config.qkv_bias,
        "sliding_window": None,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary.theta},
        "num_experts": 0 if experts is None else experts.num_experts,
        # Nothing ends an answer early, so that all systems generate the same number of tokens.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if experts is not None:
        settings |= {
            "num_experts_per_tok": experts.num_active,
            "moe_intermediate_size": experts.intermediate_size,
            "shared_expert_intermediate_size": experts.shared_intermediate_size,
            "norm_topk_prob": experts.normalised,
            "mlp_only_layers": [index for index in range(config.num_layers) if index not in experts.layers],
        }
    if config.family.startswith(("qwen3_next", "qwen3_5")):
        linear = net.layers if net is not None else ()
        settings["layer_types"] = [
            "linear_attention" if index in linear else "full_attention" for index in range(config.num_layers)
        ]
    if net is not None:
        settings |= {
            "linear_num_key_heads": net.num_key_heads,
            "linear_num_value_heads": net.num_value_heads,
            "linear_key_head_dim": net.key_head_dim,
            "linear_value_head_dim": net.value_head_dim,
            "linear_conv_kernel_dim": net.conv_kernel,
        }
    try:
        return AutoConfig.for_model(config.family, **settings)
    except ValueError as error:
        raise ModelError(
            f"transformers has no model of the family {config.family!r}, so there is nothing to compare with"
        ) from error


def _load(source: WeightSource, present: Collection[str], name: str, out: torch.Tensor) -> None:
    """One parameter of transformers' model, which has a layer's experts as one, whatever the file has."""
    block, _, fused = name.rpartition(".experts.")
    if name in present:
        source.load_into(name, out)
    elif fused in _FUSED:  # [experts, rows of each of its parts, columns]
        parts = _FUSED[fused]
        for index, expert in enumerate(out.unbind()):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                source.load_into(f"{block}.experts.{index}.{part}.weight", rows)
    else:
        raise ModelError(
            f"{source.describe()}: there is no {name} in it, which transformers' model needs, "
            "so there is nothing to compare with"
        )


def _fill_rotary(rotary: Any, config: ModelConfig) -> None:
    """The frequencies are no parameters: they are set to Penstock's, which knows what each file asks for."""
    rotated = config.rotary_dim or config.head_dim
    frequencies, scale = rotary_frequencies(config.rotary, rotated, config.max_position)
    for name in [name for name, _ in rotary.named_buffers()]:
        setattr(rotary, name, frequencies.to(getattr(rotary, name).device, copy=True))
    rotary.attention_scaling = scale
