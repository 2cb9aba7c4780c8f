"""A GGUF file of a hybrid or a mixture of experts gives back the model that it was made of."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35_SPLIT

from penstock.errors import ModelError, ModelFileError
from penstock.models.gguf import file as gguf_file
from penstock.models.gguf import tokenizer as gguf_tokenizer
from penstock.models.gguf.file import GgufFile
from penstock.models.hf.folder import HfFolder
from penstock.models.source import check_source
from tests.models.builders import load_tensor
from tests.models.gguf_builders import ARCHITECTURES, hybrid_tensors, write_hybrid_gguf
from tests.models.hybrids import HYBRIDS, MIXTURES, hybrid_model

FAMILIES = tuple(ARCHITECTURES)
# Three value heads to a key head, keys and values of different sizes, and rows of whole blocks of 32.
WIDE = {
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}
QUANTISED = (
    *(
        "token_embd",
        "attn_q",
        "attn_qkv",
        "attn_gate",
        "ssm_in",
        "ssm_ba",
        "ssm_beta",
        "ssm_alpha",
        "ssm_out",
    ),
    *("ffn_down", "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps", "ffn_down_shexp"),
)
# Of the largest value: half a step of the 127 to either side, and half a step of its scale's 11 bits.
QUANTISED_ERROR = 0.5 / 127 + 0.5**11


def small(family: str, **changes: Any) -> Any:
    config_class = type(hybrid_model(family).config)
    known = {key: value for key, value in WIDE.items() if key in config_class.__dataclass_fields__}
    return hybrid_model(family, **{**known, **changes})


def parameters(model: Any, legacy: bool = False) -> dict[str, Tensor]:
    """transformers' parameters, with the experts apart and Qwen3-Next's projections as it takes them apart itself."""
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        prefix = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(each.chunk(2) for each in value):
                found |= {
                    f"{prefix}.{expert}.gate_proj.weight": gate,
                    f"{prefix}.{expert}.up_proj.weight": up,
                }
        elif name.endswith("experts.down_proj"):
            found |= {f"{prefix}.{expert}.down_proj.weight": each for expert, each in enumerate(value)}
        elif name.endswith("in_proj_qkvz.weight") and not legacy:
            module = model.get_submodule(name.split(".in_proj_qkvz")[0])
            # Each column of the weight as a token, so that rows are what the module sees as features.
            columns = (value.T[None], module.in_proj_ba.weight.T[None])
            query, key, mixed, gate, _, _ = module.fix_query_key_value_ordering(*columns)
            layer = name.split(".in_proj_qkvz")[0]
            rows = [part.flatten(2)[0].T for part in (query, key, mixed)]
            found |= {
                f"{layer}.in_proj_qkv.weight": torch.cat(rows),
                f"{layer}.in_proj_z.weight": gate.flatten(2)[0].T,
            }
        else:
            found[name] = value
    return found


def assert_same(source: GgufFile, expected: dict[str, Tensor], tolerance: float) -> None:
    assert source.names() == expected.keys()
    for name, value in expected.items():
        loaded = load_tensor(source, name)
        assert loaded.shape == value.shape
        assert (loaded - value).abs().max() <= tolerance * value.abs().max(), name


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        *((family, {"tie_word_embeddings": True, "attention_bias": True}) for family in FAMILIES),
        *((family, {"linear_num_key_heads": 6}) for family in HYBRIDS),
        ("qwen3_5_text", {"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3}),
    ],
)
def test_every_tensor_is_that_of_the_model(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = small(family, **changes)
    source = GgufFile(write_hybrid_gguf(model, tmp_path / "model.gguf"))
    assert check_source(source) == frozenset()
    assert_same(source, parameters(model), 1e-6)  # not 0: norms have gone up by 1 and down again


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_names_are_those_of_the_gguf_package(family: str) -> None:
    """What the builder calls the tensors, and so what the files here have, is not our own invention."""
    model = small(family)
    architecture = next(
        known for known, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[family]
    )
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    theirs = {
        names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        for name in model.state_dict()
    }
    ours = hybrid_tensors(model, fused_experts=True, legacy=True).keys()
    assert ours == {name + ".weight" if name and name.endswith("_exps") else name for name in theirs}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slice_elements", [1, 1000, 1 << 18])
def test_quantised_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, slice_elements: int
) -> None:
    monkeypatch.setattr(gguf_file, "_SLICE_ELEMENTS", slice_elements)
    model = small(family)
    source = GgufFile(write_hybrid_gguf(model, tmp_path / "model.gguf", quantised=QUANTISED))
    assert check_source(source) == frozenset()
    assert_same(source, parameters(model), QUANTISED_ERROR)


@pytest.mark.parametrize("quantised", [(), QUANTISED])
def test_qwen3_next_with_its_projections_in_one(tmp_path: Path, quantised: tuple[str, ...]) -> None:
    model = small("qwen3_next")
    path = write_hybrid_gguf(model, tmp_path / "model.gguf", quantised=quantised, legacy=True)
    source = GgufFile(path)
    assert check_source(source) == frozenset()
    assert_same(source, parameters(model, legacy=True), QUANTISED_ERROR if quantised else 1e-6)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("quantised", [(), QUANTISED])
def test_experts_with_gates_and_ups_in_one(tmp_path: Path, family: str, quantised: tuple[str, ...]) -> None:
    model = small(family)
    path = write_hybrid_gguf(model, tmp_path / "model.gguf", quantised=quantised, fused_experts=True)
    source = GgufFile(path)
    assert check_source(source) == frozenset()
    assert_same(source, parameters(model), QUANTISED_ERROR if quantised else 1e-6)


@pytest.mark.parametrize("quantised", [(), QUANTISED])
def test_a_part_of_a_larger_tensor_in_another_type_is_filled_and_nothing_else(
    tmp_path: Path, quantised: tuple[str, ...]
) -> None:
    source = GgufFile(
        write_hybrid_gguf(small("qwen3_5_moe_text"), tmp_path / "model.gguf", quantised=quantised)
    )
    for name in source.names():
        whole = load_tensor(source, name)
        padded = torch.full([size + 3 for size in whole.shape], 7.0, dtype=torch.bfloat16)
        part = padded[tuple(slice(1, -2) for _ in whole.shape)]
        source.load_into(name, part)
        assert torch.equal(part, whole.to(torch.bfloat16)), name
        assert (padded == 7.0).sum() >= padded.numel() - part.numel()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_is_that_of_the_folder(tmp_path: Path, family: str) -> None:
    """What the two formats say of one model is the same. (GGUF holds its epsilon in 32 bits.)"""
    model = small(family, num_hidden_layers=5, rms_norm_eps=2.0**-20)
    model.save_pretrained(tmp_path / "folder")
    file, folder = GgufFile(write_hybrid_gguf(model, tmp_path / "model.gguf")), HfFolder(tmp_path / "folder")
    assert file.config == folder.config
    assert file.config.family == family


def test_blocks_that_predict_further_tokens_and_pictures_are_left_over(tmp_path: Path) -> None:
    model = small("qwen3_5_text")
    extra = {
        name: np.ones((64,), dtype=np.float32)
        for name in ("blk.4.attn_norm.weight", "blk.4.nextn.enorm.weight", "blk.4.ssm_a", "v.post_ln.weight")
    }
    metadata = {"block_count": 5, "nextn_predict_layers": 1}
    source = GgufFile(write_hybrid_gguf(model, tmp_path / "model.gguf", metadata=metadata, tensors=extra))
    assert source.config.num_layers == 4
    assert source.config.delta_net is not None
    assert source.config.delta_net.layers == (0, 1, 2)
    assert check_source(source) == extra.keys()
    assert torch.equal(load_tensor(source, "blk.4.attn_norm.weight"), torch.ones(64))


def test_a_list_of_recurrent_layers_wins_over_the_interval(tmp_path: Path) -> None:
    model = small("qwen3_5_text", layer_types=["full_attention", *["linear_attention"] * 3])
    metadata = {"attention.recurrent_layers": [False, True, True, True], "full_attention_interval": 4}
    source = GgufFile(write_hybrid_gguf(model, tmp_path / "model.gguf", metadata=metadata))
    assert check_source(source) == frozenset()
    assert_same(source, parameters(model), 1e-6)


def test_experts_are_normalised_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    model = small("qwen3_moe", norm_topk_prob=False)
    for said, normalised in ((None, True), (True, True), (False, False)):
        path = write_hybrid_gguf(model, tmp_path / "model.gguf", metadata={"expert_weights_norm": said})
        experts = GgufFile(path).config.experts
        assert experts is not None
        assert experts.normalised is normalised


def test_slices_stay_small_where_heads_are_reordered() -> None:
    rows = torch.zeros(16, 3, 64, 1024).transpose(0, 1)  # value heads of 16 key heads, as a file has them
    slices = list(gguf_file._in_slices(rows, 32))
    assert sum(part.numel() for part in slices) == rows.numel()
    assert all(part[0].numel() <= gguf_file._SLICE_ELEMENTS for part in slices)
    assert all(part.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr() for part in slices)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3_5_text", {"ssm.group_count": 4}, "6 value heads .* cannot share 4"),
        ("qwen3_5_text", {"ssm.group_count": 0}, "group_count is 0"),
        ("qwen3_5_text", {"ssm.group_count": None}, "group_count is missing"),
        ("qwen3_5_text", {"ssm.state_size": 1 << 30}, "state_size is"),
        ("qwen3_5_text", {"ssm.inner_size": 97}, "inner_size is 97"),
        ("qwen3_5_text", {"ssm.inner_size": "wide"}, "inner_size is 'wide'"),
        ("qwen3_5_text", {"ssm.conv_kernel": 1 << 20}, "conv_kernel is"),
        ("qwen3_5_text", {"ssm.conv_kernel": 1}, "conv_kernel is 1"),
        ("qwen3_5_text", {"ssm.v_head_reordered": False}, "value heads in another order"),
        ("qwen3_next", {"ssm.v_head_reordered": True}, "value heads in another order"),
        ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval is 0"),
        ("qwen3_5_text", {"full_attention_interval": 9}, "none of the 4 layers has full attention"),
        ("qwen3_5_text", {"attention.recurrent_layers": [True] * 4}, "none of the 4 layers"),
        ("qwen3_5_text", {"attention.recurrent_layers": [True] * 3}, "an array of 4 truth values"),
        ("qwen3_5_text", {"attention.recurrent_layers": [1, 1, 1, 0]}, "an array of 4 truth values"),
        ("qwen3_5_text", {"nextn_predict_layers": 4}, "nextn_predict_layers is 4"),
        ("qwen3_5_text", {"rope.dimension_count": 3}, "dimension_count is 3"),
        ("qwen3_5_text", {"rope.dimension_count": 0}, "dimension_count is 0"),
        ("qwen3_5_text", {"rope.dimension_count": 18}, "dimension_count is 18"),
        ("qwen3_5_text", {"rope.dimension_sections": [1, 0, 0, 0]}, "leaves some of the 2 pairs"),
        ("qwen3_5_text", {"rope.dimension_sections": [0, 0, 0, 2]}, "leaves some of the 2 pairs"),
        ("qwen3_5_text", {"rope.dimension_sections": [-1, 4, 4, 4]}, "an array of 3 or 4 integers"),
        ("qwen3_5_text", {"rope.dimension_sections": [0.5] * 4}, "an array of 3 or 4 integers"),
        ("qwen3_5_text", {"rope.dimension_sections": 11}, "an array of 3 or 4 integers"),
        ("qwen3_5_text", {"attention.head_count_kv": [0, 0, 0, 2]}, "head_count_kv"),
        ("qwen3_5_text", {"expert_count": 8}, "mixture of experts, which is not supported for qwen35"),
        ("qwen3_moe", {"rope.dimension_count": 8}, "only a part of each head"),
        ("qwen3_moe", {"expert_count": None}, "expert_count is missing"),
        ("qwen3_moe", {"expert_count": 0}, "expert_count is 0"),
        ("qwen3_moe", {"expert_count": 1 << 30}, "expert_count is"),
        ("qwen3_moe", {"expert_count": 4096, "block_count": 4096}, "experts in all layers"),
        ("qwen3_moe", {"expert_used_count": 6}, "cannot go to 6 experts"),
        ("qwen3_moe", {"expert_count": 4}, "not that of gate_proj of 4 experts"),
        ("qwen3_moe", {"expert_weights_norm": 1}, "expert_weights_norm is 1"),
        ("qwen3_moe", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
        ("qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func is 2"),
        ("qwen3_moe", {"expert_group_count": 8}, "expert_group_count is 8"),
        ("qwen3_5_moe_text", {"expert_shared_feed_forward_length": None}, "expert_shared_feed.* missing"),
        ("qwen3_5_moe_text", {"expert_feed_forward_length": 0}, "expert_feed_forward_length is 0"),
    ],
)
def test_metadata_that_cannot_be_used_is_an_error(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    path = write_hybrid_gguf(small(family), tmp_path / "model.gguf", metadata=changes)
    with pytest.raises(ModelError, match=words):
        GgufFile(path)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("blk.0.ssm_dt", (6,), "holds model.layers.0.linear_attn.dt_bias twice"),
        ("blk.0.ffn_gate_up_exps.weight", (5, 64, 64), "experts.0.gate_proj.weight twice"),
        ("blk.0.ffn_up_exps.weight", (160, 64), "not that of up_proj of 5 experts"),
        ("blk.0.ffn_gate_up_exps.weight", (5, 63, 64), "not that of gate_proj and up_proj"),
    ],
)
def test_tensors_that_contradict_each_other_are_an_error(
    tmp_path: Path, name: str, shape: tuple[int, ...], words: str
) -> None:
    tensors = {name: np.ones(shape, dtype=np.float32)}
    path = write_hybrid_gguf(small("qwen3_5_moe_text"), tmp_path / "model.gguf", tensors=tensors)
    with pytest.raises(ModelFileError, match=words):
        GgufFile(path)


def test_tensors_of_another_size_than_the_metadata_says_are_an_error(tmp_path: Path) -> None:
    names = {
        "attn_qkv.weight": ("in_proj_qkv.weight", (130, 64)),
        "ssm_out.weight": ("out_proj.weight", (64, 90)),
        "ssm_a": ("A_log", (5,)),
        "ssm_conv1d.weight": ("conv1d.weight", (3,)),
    }
    for name, (known, shape) in names.items():
        tensors = {f"blk.0.{name}": -np.ones(shape, dtype=np.float32)}
        source = GgufFile(write_hybrid_gguf(small("qwen3_5_text"), tmp_path / "model.gguf", tensors=tensors))
        with pytest.raises(ModelFileError, match=known):
            check_source(source)
        with pytest.raises(ModelFileError, match=known):
            load_tensor(source, f"model.layers.0.linear_attn.{known}")


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_a_decay_that_has_no_logarithm_is_an_error(tmp_path: Path, value: float) -> None:
    tensors = {"blk.0.ssm_a": np.array([-1, -1, -1, -1, -1, value], dtype=np.float32)}
    source = GgufFile(write_hybrid_gguf(small("qwen3_5_text"), tmp_path / "model.gguf", tensors=tensors))
    with pytest.raises(ModelFileError, match=r"blk\.0\.ssm_a has values that are not below 0"):
        load_tensor(source, "model.layers.0.linear_attn.A_log")


def test_qwen35_s_split_is_that_of_transformers() -> None:
    assert gguf_tokenizer._SPLITS["qwen35"] == (QWEN35_SPLIT,)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_stored_blocks_are_the_tensor(
    tmp_path: Path, family: str, legacy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of blocks, in transformers' order, hold the values that the tensor is loaded with."""
    monkeypatch.setattr(gguf_file, "SLICE_BYTES", 300)
    path = write_hybrid_gguf(small(family), tmp_path / "model.gguf", quantised=QUANTISED, legacy=legacy)
    source = GgufFile(path)
    kept = [name for name in source.names() if source.block_form(name)]
    assert len(kept) > 4
    for name in kept:
        blocks = torch.cat([rows.clone() for rows in source.blocks(name)])
        values = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q8_0)
        assert torch.equal(torch.from_numpy(values).view(source.shape(name)), load_tensor(source, name))
    moved = [name for name in source.names() if name.endswith("linear_attn.out_proj.weight")]
    if family.startswith("qwen3_5"):  # whose columns the file has in another order
        assert moved
        assert all(source.block_form(name) is None for name in moved)
    source.close()
