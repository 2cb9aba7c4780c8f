"""config.json is understood as transformers understands it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ModelError, ModelFileError
from penstock.layers.rotary import rotary_frequencies
from penstock.models.hf.config import hf_model_config
from penstock.models.hf.families import FAMILIES
from penstock.models.hf.folder import read_folder_config
from penstock.models.reading import Fields
from penstock.plan.model import RotaryConfig
from tests.models.builders import CLASSES, hf_config
from tests.models.hf_defaults import DEFAULT_KEYS, TABLE, sound, table

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 50_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
        "truncate": False,
    },
}


def normalise(values: dict[str, Any], generation: dict[str, Any] | None = None) -> Any:
    return hf_model_config(Fields("config.json", values), Fields("generation_config.json", generation or {}))


def as_transformers(rotary: RotaryConfig) -> dict[str, Any]:
    """The fields that a rope type uses, under transformers' names."""
    fields = {
        "rope_type": rotary.kind,
        "rope_theta": rotary.theta,
        "factor": rotary.factor,
        "original_max_position_embeddings": rotary.original_max_position,
        "low_freq_factor": rotary.low_freq_factor,
        "high_freq_factor": rotary.high_freq_factor,
        "beta_fast": rotary.beta_fast,
        "beta_slow": rotary.beta_slow,
        "attention_factor": rotary.attention_factor,
        "truncate": rotary.truncate,
    }
    return {key: fields[key] for key in ROPES[rotary.kind]}


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("kind", ROPES)
def test_rope_parameters_equal_those_of_transformers(tmp_path: Path, family: str, kind: str) -> None:
    config = hf_config(family, rope_parameters=dict(ROPES[kind]))
    config.save_pretrained(tmp_path)
    ours = read_folder_config(tmp_path)
    assert as_transformers(ours.rotary) == {key: config.rope_parameters[key] for key in ROPES[kind]}


@pytest.mark.parametrize("kind", ROPES)
def test_the_older_keys_mean_the_same(kind: str) -> None:
    new = {"model_type": "llama", "rope_parameters": ROPES[kind]}
    scaling = {key: value for key, value in ROPES[kind].items() if key != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    old = {"model_type": "llama", "rope_theta": ROPES[kind]["rope_theta"], "rope_scaling": scaling}
    if kind == "default":
        old["rope_scaling"] = None
    assert normalise(old) == normalise(new)


def test_the_table_of_defaults_is_that_of_transformers_classes() -> None:
    """Where this fails, `python -m tests.models.hf_defaults` writes it anew."""
    assert TABLE.read_text() == table()


def test_a_key_of_another_name_is_one_whose_default_is_known() -> None:
    """Else it would count as one that is not read, and other values would be refused."""
    names = {name for family in FAMILIES.values() for name in family.keys.values()}
    assert names <= set(DEFAULT_KEYS)


@pytest.mark.parametrize("family", json.loads(TABLE.read_text()))
def test_what_transformers_models_read_and_this_one_does_not_is_refused_by_name(family: str) -> None:
    fixed = json.loads(TABLE.read_text())[family]["fixed"]
    assert "is_causal" in fixed
    values = sound(family)
    for key, value in fixed.items():
        assert normalise({**values, key: value}) == normalise({**values, key: None}) == normalise(values)
        for other in (7, {"a": 1}, not value):
            with pytest.raises(ModelError, match=f"{key} of .* is not supported"):
                normalise({**values, key: other})


@pytest.mark.parametrize("family", CLASSES)
def test_absent_keys_take_transformers_defaults(family: str) -> None:
    theirs = CLASSES[family][0]()
    window = {"sliding_window": None} if family == "mistral" else {}
    ours = normalise({"model_type": family, **window})
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied_head == theirs.tie_word_embeddings
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.rotary == RotaryConfig(theta=theirs.rope_parameters["rope_theta"])
    assert ours.qkv_bias == (family == "qwen2")
    assert ours.head_norm == (family == "qwen3")


def test_yarn_takes_its_factor_from_the_lengths_when_it_is_null() -> None:
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    config = normalise({"model_type": "llama", "max_position_embeddings": 2048, "rope_parameters": rope})
    assert config.rotary.factor == 4.0


def test_eos_ids_are_those_of_both_files() -> None:
    config = normalise({"model_type": "llama", "eos_token_id": [5, 6]}, {"eos_token_id": [6, 7]})
    assert config.eos_token_ids == (5, 6, 7)
    assert normalise({"model_type": "llama", "eos_token_id": None}).eos_token_ids == ()


def test_silu_has_two_names() -> None:
    assert normalise({"model_type": "llama", "hidden_act": "swish"}) == normalise({"model_type": "llama"})


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({"model_type": "mistral", "num_hidden_layers": 3}, (0, 1, 2)),
        ({"model_type": "mistral", "sliding_window": 11, "max_position_embeddings": 11}, None),
        ({"model_type": "qwen2", "max_window_layers": 30, "use_sliding_window": True}, (30, 31)),
        ({"model_type": "qwen2", "max_window_layers": 30}, None),
        (
            {
                "model_type": "qwen3",
                "num_hidden_layers": 2,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            (1,),
        ),
    ],
)
def test_layers_with_a_window(values: dict[str, Any], layers: tuple[int, ...] | None) -> None:
    window = normalise(values).window
    assert (None if window is None else window.layers) == layers
    assert window is None or (window.size, window.num_layers) == (4096, len(window.layers))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gpt_bigcode"}, "supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, "sliding window of"),
        ({"model_type": "llama", "hidden_act": "gelu_10"}, "gelu_10"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "part of each head"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantised"),
        ({"model_type": "llama", "is_causal": False}, "is_causal of false is not supported, only true is"),
        ({"model_type": "qwen3", "per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 32}, "layer_types is 'sliding_att"),
        ({"model_type": "llama", "layer_types": ["full_attention"]}, "layer_types .* each of the 32 layers"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 32}, "layer_types is 'linear_att"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32}, "layer_types is 'sliding_att"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"full_attention": {**ROPES["yarn"], "truncate": False}},
            },
            "truncate of false is not supported",
        ),
        (
            {"model_type": "llama", "rope_parameters": {"full_attention": ROPES["linear"]}},
            "full_attention of",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        normalise(values)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({}, "model_type"),
        ({"model_type": 3}, "model_type"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": 4096.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"max_position_embeddings": 10**18}, "max_position_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, "factor"),
        ({"rope_scaling": {**ROPES["yarn"], "factor": float("inf")}}, "factor"),
        ({"rope_scaling": {**ROPES["yarn"], "beta_fast": 1e308}}, "beta_fast"),
        ({"rope_scaling": {**ROPES["yarn"], "beta_slow": 0}}, "beta_slow"),
        ({"rope_scaling": {**ROPES["yarn"], "rope_theta": 0.5}}, "rope_theta"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 heads"),
        ({"head_dim": 3}, "head size of 3"),
    ],
)
def test_wrong_values_are_errors_that_name_the_key(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelFileError, match=key):
        normalise({"model_type": "llama", **values} if values else {})


NUMBERS = st.sampled_from(
    [0, -1, 1, 1.0000001, 2, 1e-308, 1e-9, 1e9, 1e15, 1e308, 10**400, math.inf, math.nan]
)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), kind=st.sampled_from(["default", "linear", "llama3", "yarn"]))
def test_absurd_rope_parameters_are_refused_or_give_finite_frequencies(
    data: st.DataObject, kind: str
) -> None:
    rope = dict(ROPES[kind])
    for key in data.draw(st.sets(st.sampled_from(sorted(set(rope) - {"rope_type", "truncate"})), min_size=1)):
        rope[key] = data.draw(NUMBERS)
    try:
        config = normalise({"model_type": "llama", "head_dim": 16, "rope_parameters": rope})
    except ModelFileError:
        return
    frequencies, scale = rotary_frequencies(config.rotary, config.head_dim, config.max_position)
    assert torch.isfinite(frequencies).all()
    assert math.isfinite(scale)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\x00", '{"model_type": "llama"'])
def test_damaged_json_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_folder_config(tmp_path)


def test_a_folder_without_a_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_folder_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_folder_config(tmp_path).hidden_size == 4096
