"""config.json of hybrids and mixtures of experts is understood as transformers understands it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from penstock.errors import ModelError, ModelFileError
from penstock.layers.rotary import Rotary, rotary_frequencies
from penstock.models.hf.config import hf_model_config
from penstock.models.hf.folder import read_folder_config
from penstock.models.reading import Fields
from penstock.plan.model import ModelConfig, RotaryConfig
from tests.models.hf_defaults import TABLE
from tests.models.hybrids import CLASSES, HYBRIDS, MIXTURES, hybrid_settings
from tests.models.test_hf_config import ROPES

# Keys as published files have them, which transformers accepts beside its own.
PUBLISHED_ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}


def normalise(values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return hf_model_config(Fields("config.json", values), Fields("generation_config.json", generation or {}))


def assert_like(ours: ModelConfig, theirs: Any) -> None:
    """Every field of ours against transformers' configuration object."""
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied_head == theirs.tie_word_embeddings
    assert ours.qkv_bias == ours.out_bias == theirs.attention_bias
    assert not ours.mlp_bias
    assert ours.head_norm
    assert ours.rotary == RotaryConfig(theta=theirs.rope_parameters["rope_theta"])
    rotated = int(ours.head_dim * theirs.rope_parameters.get("partial_rotary_factor", 1.0))
    assert ours.rotary_dim == (None if rotated == ours.head_dim else rotated)

    is_hybrid = ours.family != "qwen3_moe"
    assert ours.gated_attention == ours.zero_centred_norm == is_hybrid
    kinds = theirs.layer_types if is_hybrid else ["full_attention"] * theirs.num_hidden_layers
    assert ours.attention_layers == tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    net = ours.delta_net
    assert (net is not None) == ("linear_attention" in kinds)
    if net is not None:
        assert net.num_key_heads == theirs.linear_num_key_heads
        assert net.num_value_heads == theirs.linear_num_value_heads
        assert net.key_head_dim == theirs.linear_key_head_dim
        assert net.value_head_dim == theirs.linear_value_head_dim
        assert net.conv_kernel == theirs.linear_conv_kernel_dim

    experts = ours.experts
    if ours.family == "qwen3_5_text":
        assert experts is None
    if ours.family != "qwen3_5_moe_text":
        assert ours.intermediate_size == theirs.intermediate_size
    if experts is not None:
        assert experts.num_experts == theirs.num_experts
        assert experts.num_active == theirs.num_experts_per_tok
        assert experts.intermediate_size == theirs.moe_intermediate_size
        assert experts.shared_intermediate_size == getattr(theirs, "shared_expert_intermediate_size", 0)
        assert experts.normalised == getattr(theirs, "norm_topk_prob", True)


@pytest.mark.parametrize("family", CLASSES)
def test_absent_keys_take_transformers_defaults(family: str) -> None:
    ours = normalise({"model_type": family})
    assert ours.family == family
    assert_like(ours, CLASSES[family][0]())
    assert ours.eos_token_ids == ()
    if family in MIXTURES:
        assert ours.experts is not None
        assert ours.experts.layers == tuple(range(ours.num_layers))


CHANGES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in CLASSES),
    *((family, {"attention_bias": True, "tie_word_embeddings": True}) for family in CLASSES),
    *((family, {"full_attention_interval": 2}) for family in HYBRIDS),
    *((family, {"layer_types": ["full_attention", "linear_attention"] * 2}) for family in HYBRIDS),
    *((family, {"partial_rotary_factor": 0.5}) for family in HYBRIDS),
    *((family, {"rope_parameters": PUBLISHED_ROPE, "head_dim": 256}) for family in HYBRIDS),
    ("qwen3_5_text", {"layer_types": ["full_attention"] * 4}),
    ("qwen3_next", {"norm_topk_prob": False}),
    ("qwen3_moe", {"norm_topk_prob": True, "head_dim": 32, "rope_theta": 1_000_000}),
]


@pytest.mark.parametrize(("family", "changes"), CHANGES)
def test_a_configuration_means_what_transformers_makes_of_it(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    keys = hybrid_settings(family, **changes)
    written = {"model_type": family, **json.loads(json.dumps(keys))}
    theirs = CLASSES[family][0](**json.loads(json.dumps(keys)))
    assert_like(normalise(written), theirs)
    theirs.save_pretrained(tmp_path)
    assert read_folder_config(tmp_path) == normalise(written)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize(
    "changes",
    [
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 3, "mlp_only_layers": [2]},
        {"mlp_only_layers": [0, 3, 99]},
        {"num_experts": 0},
        {"decoder_sparse_step": 9},
    ],
)
def test_the_layers_with_experts_are_those_of_transformers_model(
    family: str, changes: dict[str, Any]
) -> None:
    keys = hybrid_settings(family, **changes)
    ours = normalise({"model_type": family, **keys})
    with torch.device("meta"):
        model = CLASSES[family][1](CLASSES[family][0](**keys))
    layers = tuple(i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts"))
    assert (ours.experts.layers if ours.experts else ()) == layers


def test_the_number_of_experts_has_two_names() -> None:
    for values in (
        {"num_experts": 70},
        {"num_local_experts": 70},
        {"num_experts": 90, "num_local_experts": 70},
    ):
        ours = normalise({"model_type": "qwen3_moe", **values})
        assert ours.experts is not None
        assert ours.experts.num_experts == transformers.Qwen3MoeConfig(**values).num_experts == 70


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_a_part_of_each_head_turns_as_in_transformers(family: str, kind: str) -> None:
    keys = hybrid_settings(family, rope_parameters=dict(ROPES[kind]), head_dim=64)
    ours = normalise({"model_type": family, **keys})
    theirs = {"qwen3_next": Qwen3NextRotaryEmbedding, "qwen3_5_text": Qwen3_5TextRotaryEmbedding}[family](
        CLASSES[family][0](**keys)
    )
    assert ours.rotary_dim == 16
    frequencies, scale = rotary_frequencies(ours.rotary, ours.rotary_dim, ours.max_position)
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling)


def test_three_grids_of_positions_turn_text_as_one_does() -> None:
    keys = hybrid_settings("qwen3_5_text", rope_parameters=dict(PUBLISHED_ROPE), head_dim=256)
    ours = normalise({"model_type": "qwen3_5_text", **keys})
    theirs = Qwen3_5TextRotaryEmbedding(transformers.Qwen3_5TextConfig(**keys))
    assert theirs.mrope_section == PUBLISHED_ROPE["mrope_section"]
    positions = torch.arange(200)
    cos, sin = theirs(torch.empty(0), positions.expand(3, 1, -1))
    assert ours.rotary_dim == 64
    rotary = Rotary(
        ours.rotary, ours.rotary_dim, ours.max_position, torch.float32, device=torch.device("cpu")
    )
    our_cos, our_sin = (table[positions] for table in rotary.reserve(200))
    torch.testing.assert_close(our_cos, cos[0])
    torch.testing.assert_close(our_sin[:, 32:], sin[0, :, 32:])  # ours has the sign of the first half in it
    torch.testing.assert_close(-our_sin[:, :32], sin[0, :, :32])


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_a_multimodal_one_is_read(tmp_path: Path, family: str) -> None:
    keys = hybrid_settings(f"{family}_text", rope_parameters=dict(PUBLISHED_ROPE), head_dim=256)
    alone = normalise({"model_type": f"{family}_text", **keys})
    assert normalise({"model_type": family, "text_config": keys}) == alone
    config_class = {"qwen3_5": transformers.Qwen3_5Config, "qwen3_5_moe": transformers.Qwen3_5MoeConfig}[
        family
    ]
    config_class(text_config=keys).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family
    assert read_folder_config(tmp_path) == alone
    assert normalise({"model_type": family}) == normalise({"model_type": f"{family}_text"})


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(None, None, False), (True, None, True), (None, True, True), (True, False, True), (False, True, False)],
)
def test_the_outer_key_says_whether_a_multimodal_head_is_tied(
    outer: bool | None, inner: bool | None, tied: bool
) -> None:
    values: dict[str, Any] = {"model_type": "qwen3_5", "text_config": {"tie_word_embeddings": inner}}
    assert normalise({**values, "tie_word_embeddings": outer}).tied_head == tied


def test_ends_are_those_of_both_configurations_and_the_generation_file() -> None:
    values = {"model_type": "qwen3_5", "eos_token_id": 5, "text_config": {"eos_token_id": [6, 5]}}
    assert normalise(values, {"eos_token_id": [7, 6]}).eos_token_ids == (6, 5, 7)


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        (
            "qwen3_5_text",
            {"layer_types": ["linear_attention"] * 32},
            "none of the 32 layers has full attention",
        ),
        ("qwen3_next", {"num_hidden_layers": 3}, "none of the 3 layers has full attention"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, "part of each head"),
        ("qwen3_5", {"quantization_config": {"bits": 4}}, "quantised"),
        ("qwen3_5", {"text_config": {"quantization_config": {"bits": 4}}}, "quantised"),
        ("qwen3_5", {"text_config": {"hidden_act": "gelu"}}, "text_config: the activation 'gelu'"),
        ("qwen3_5_text", {"rope_parameters": {"rope_type": "mrope"}}, "mrope"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(family: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        normalise({"model_type": family, **values})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("qwen3_5_text", {"layer_types": ["full_attention"]}, "layer_types .* each of the 32 layers"),
        ("qwen3_5_text", {"layer_types": ["mamba"] * 32}, "layer_types is 'mamba', but full_attention or"),
        ("qwen3_5_text", {"layer_types": [1] * 32}, "layer_types .* list of strings"),
        ("qwen3_5_text", {"layer_types": "full_attention"}, "layer_types .* list of strings"),
        ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval"),
        ("qwen3_5_text", {"full_attention_interval": "4"}, "full_attention_interval"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "32 value heads .* 3 key heads"),
        ("qwen3_5_text", {"linear_num_key_heads": 0}, "linear_num_key_heads"),
        ("qwen3_5_text", {"linear_num_value_heads": -16}, "linear_num_value_heads"),
        ("qwen3_5_text", {"linear_key_head_dim": 1 << 11}, "linear_key_head_dim"),
        ("qwen3_5_text", {"linear_value_head_dim": 0}, "linear_value_head_dim"),
        ("qwen3_5_text", {"linear_num_value_heads": 1 << 14, "linear_value_head_dim": 1 << 10}, "exceed"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1 << 20}, "linear_conv_kernel_dim"),
        ("qwen3_5_text", {"partial_rotary_factor": 0}, "partial_rotary_factor"),
        ("qwen3_5_text", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("qwen3_5_text", {"partial_rotary_factor": float("nan")}, "partial_rotary_factor"),
        ("qwen3_5_text", {"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor"),
        ("qwen3_5_text", {"partial_rotary_factor": 1 / 256}, "leaves 1 of a head's 256"),
        ("qwen3_5_text", {"partial_rotary_factor": 1e-9}, "leaves 0 of a head's 256"),
        ("qwen3_5_text", {"partial_rotary_factor": 0.25, "head_dim": 12}, "leaves 3 of a head's 12"),
        ("qwen3_5", {"text_config": [1]}, "text_config"),
        ("qwen3_5", {"text_config": {"hidden_size": -1}}, "text_config: hidden_size"),
        ("qwen3_5", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ("qwen3_next", {"num_experts": -1}, "num_experts"),
        ("qwen3_next", {"num_experts": 1 << 20}, "num_experts"),
        ("qwen3_next", {"num_experts": 9}, "10 experts where there are 9"),
        ("qwen3_next", {"num_experts": 4096, "num_hidden_layers": 4096}, "exceed"),
        ("qwen3_next", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("qwen3_next", {"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ("qwen3_next", {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size"),
        ("qwen3_next", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_next", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("qwen3_next", {"mlp_only_layers": [True]}, "mlp_only_layers"),
        ("qwen3_next", {"mlp_only_layers": [10**30]}, "mlp_only_layers"),
        ("qwen3_next", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ("qwen3_5_moe_text", {"num_experts": 0}, "num_experts"),
        ("qwen3_moe", {"num_local_experts": 1.5}, "num_local_experts"),
    ],
)
def test_wrong_values_are_errors_that_name_the_key(family: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as error:
        normalise({"model_type": family, **values})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


FAMILIES = json.loads(TABLE.read_text())
KEYS = {key for family in FAMILIES.values() for part in family.values() for key in part} | {
    *(
        "layer_types",
        "full_attention_interval",
        "partial_rotary_factor",
        "num_local_experts",
        "mlp_only_layers",
    ),
    *(
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "quantization_config",
        "original_max_position_embeddings",
    ),
}
NUMBERS: list[Any] = [0, -1, 1, 2, 3, 4, 64, 1024, 4096, 0.5, 1e308, float("nan"), float("inf"), 10**400]
OTHERS: list[Any] = [None, True, "", "4", [], {}, [None], ["full_attention"] * 4, [0, 1], {"a": {}}]
OTHERS += [{"rope_type": kind, "factor": 2.0} for kind in ("default", "linear", "llama3", "yarn", [1])]


@settings(deadline=None, max_examples=500)
@given(
    family=st.sampled_from([*FAMILIES, "qwen3_5", "qwen3_5_moe"]),
    values=st.dictionaries(
        st.sampled_from(sorted(KEYS)), st.sampled_from([*NUMBERS, *OTHERS]), min_size=1, max_size=5
    ),
)
def test_absurd_values_are_refused_or_give_a_model_that_holds_together(
    family: str, values: dict[str, Any]
) -> None:
    try:
        ours = normalise({"model_type": family, **values})
    except ModelError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
        return
    assert ours.attention_layers
    rotated = ours.rotary_dim or ours.head_dim
    assert rotated % 2 == 0
    assert 2 <= rotated <= ours.head_dim
    if net := ours.delta_net:
        assert net.layers
        assert net.num_value_heads % net.num_key_heads == 0
        assert net.conv_kernel >= 2
        assert min(net.key_size, net.value_size) > 0
    if experts := ours.experts:
        assert experts.layers
        assert 1 <= experts.num_active <= experts.num_experts
        assert experts.num_experts * len(experts.layers) <= 1 << 17
