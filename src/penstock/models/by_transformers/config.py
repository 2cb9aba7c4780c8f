"""The configuration of a model that transformers' code runs: what its own class makes of config.json, what would be
silently wrong refused, and what planning needs of the rest."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from penstock.errors import ModelError, ModelFileError
from penstock.models.by_transformers.families import REASONS, TRIED
from penstock.models.by_transformers.trace import Trace, trace
from penstock.models.reading import Fields, Most, first_line, shortened
from penstock.plan.model import ExpertsConfig, ModelConfig, WindowConfig

# What a configuration may say that is no part of a pass here, and what it is set to.
_RETURNED = {
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "use_cache": False,
}
# Rotary embeddings that depend on how long a pass is.
_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class TransformersConfig:
    """A model as transformers describes it, and as planning does."""

    own: PreTrainedConfig
    model_class: type[PreTrainedModel]
    trace: Trace
    model: ModelConfig


def transformers_config(file: Fields, config: Fields, name: str, generation: Fields) -> TransformersConfig:
    """Of config.json, or of its part that is the text model `name`."""
    if name not in TRIED:
        why = REASONS.get(name, "it is not among the families that were tried")
        raise ModelError(
            f"{file.origin}: the model type {shortened(repr(name))} is not run by transformers' code: {why}"
        )
    if file.has("quantization_config") or config.has("quantization_config"):
        raise ModelError(
            f"{file.origin}: quantised weights are not supported by transformers' code here; use the original weights"
        )
    for key, value in config.values.items():  # a class makes lists of them, and its model modules
        most = Most.LAYERS if key.endswith(("_layer", "_layers")) else Most.EXPERTS
        if key.endswith(("_layer", "_layers", "_experts")) and isinstance(value, int) and value > most:
            raise config.error(key, value, f"a number up to {most}")
    try:
        own = transformers.CONFIG_MAPPING[name].from_dict({**config.values, **_RETURNED})
        if config is not file:  # a multimodal model ties its head by the outer key
            outer = transformers.CONFIG_MAPPING[file.text("model_type")].from_dict(dict(file.values))
            own.tie_word_embeddings = outer.tie_word_embeddings
    except Exception as error:  # a class checks what it likes
        raise ModelFileError(f"{config.origin}: transformers refuses it: {first_line(error)}") from error
    _check(config.origin, own)
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(own)]
    traced = trace(config.origin, model_class, own)
    ends = config.token_ids("eos_token_id") + file.token_ids("eos_token_id")
    ends += generation.token_ids("eos_token_id")
    return TransformersConfig(own, model_class, traced, _planned(config, name, own, traced, ends))


def _check(origin: str, own: PreTrainedConfig) -> None:
    for rope in _ropes(getattr(own, "rope_parameters", None)):
        if (kind := rope.get("rope_type", "default")) in _BY_LENGTH:
            raise ModelError(
                f"{origin}: the rope type {kind!r} is not run by transformers' code: it depends on a pass's length"
            )
    if getattr(own, "num_kv_shared_layers", 0):
        raise ModelError(
            f"{origin}: layers that share keys and values are not run by transformers' code: they would be cached "
            "several times"
        )
    if getattr(own, "add_cross_attention", False) or getattr(own, "is_encoder_decoder", False):
        raise ModelError(f"{origin}: attention to an encoder is not run by transformers' code")


def _ropes(found: object) -> Iterator[Mapping[str, Any]]:
    """One for all layers, or one for each kind."""
    if isinstance(found, Mapping):
        yield found
        for each in found.values():
            yield from _ropes(each)


def _planned(
    config: Fields, name: str, own: PreTrainedConfig, traced: Trace, ends: tuple[int, ...]
) -> ModelConfig:
    layers, experts = traced.layers, traced.experts
    largest = max(layers, key=lambda layer: (layer.num_kv_heads * layer.head_dim, layer.num_heads))
    windows = {layer.window for layer in layers if layer.window}
    max_position = own.max_position_embeddings
    if not isinstance(max_position, int) or not 1 <= max_position <= Most.POSITIONS:
        raise config.error("max_position_embeddings", max_position, f"1 to {Most.POSITIONS}")
    if len(windows) > 1:
        raise ModelError(f"{config.origin}: windows of several sizes ({sorted(windows)}) are not supported")
    groups = getattr(own, "n_group", None) or 1
    if any(each.num_experts % groups for each in experts):  # groups would have the experts of several rows
        raise config.error("n_group", groups, f"a divisor of {experts[0].num_experts} experts")
    window = None
    if windows and (size := windows.pop()) < max_position:
        windowed = tuple(index for index, layer in enumerate(layers) if layer.window)
        window = WindowConfig(size, len(windowed), windowed)
    digest = sha256(
        json.dumps([transformers.__version__, own.to_dict()], sort_keys=True, default=str).encode()
    )
    return ModelConfig(
        family=name,
        by_transformers=digest.hexdigest(),
        num_layers=len(layers),
        hidden_size=traced.hidden_size,
        intermediate_size=traced.widest,
        num_heads=largest.num_heads,
        num_kv_heads=largest.num_kv_heads,
        head_dim=largest.head_dim,
        vocab_size=traced.vocab_size,
        max_position=max_position,
        tied_head=bool(own.tie_word_embeddings),
        window=window,
        experts=ExpertsConfig(
            num_layers=len(experts),
            num_experts=experts[0].num_experts,
            num_active=experts[0].num_active,
            intermediate_size=max(each.width for each in experts),
        )
        if experts
        else None,
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )
