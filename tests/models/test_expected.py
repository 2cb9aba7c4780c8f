"""The tensors that a configuration calls for are those that transformers saves, and the others are told of."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from penstock.errors import ModelFileError
from penstock.models.hf.folder import HfFolder
from penstock.models.opened import open_model
from penstock.models.source import SkippedWeights, check_source, skipped_weights
from penstock.models.weights import expected_shapes
from tests.models.builders import hf_model, load_tensor
from tests.models.hybrids import (
    CLASSES,
    HYBRIDS,
    MIXTURES,
    MULTIMODAL,
    fuse_experts,
    hybrid_model,
    multimodal_model,
    rewrite_weights,
)

Tensors = dict[str, torch.Tensor]


def skipped(folder: Path) -> SkippedWeights:
    source = HfFolder(folder)
    return skipped_weights(source.config, check_source(source))


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "tie_word_embeddings": True}])
def test_saved_models_have_exactly_the_expected_tensors(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    hybrid_model(family, **changes).save_pretrained(tmp_path)
    source = HfFolder(tmp_path)
    assert check_source(source) == frozenset()
    assert expected_shapes(source.config, source.names()).keys() == source.names()


@pytest.mark.parametrize("family", MIXTURES)
def test_fused_experts_are_expected_where_they_are_there(tmp_path: Path, family: str) -> None:
    hybrid_model(family).save_pretrained(tmp_path)
    rewrite_weights(tmp_path, fuse_experts)
    assert check_source(HfFolder(tmp_path)) == frozenset()

    def transpose(tensors: Tensors) -> Tensors:
        name = "model.layers.1.mlp.experts.gate_up_proj"
        return {**tensors, name: tensors[name].transpose(1, 2)}

    rewrite_weights(tmp_path, transpose)
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.experts\.gate_up_proj is \[5, 64, 48\]"):
        check_source(HfFolder(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.linear_attn.A_log",
        "model.layers.1.linear_attn.conv1d.weight",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.2.mlp.experts.4.up_proj.weight",
        "model.layers.2.mlp.shared_expert_gate.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    hybrid_model("qwen3_next").save_pretrained(tmp_path)
    rewrite_weights(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(ModelFileError, match=f"{name} missing"):
        check_source(HfFolder(tmp_path))


def published(tensors: Tensors) -> Tensors:
    """The names of published multimodal files, with what they hold beside the text model."""
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    one = torch.zeros(1)
    renamed |= {f"mtp.layers.0.{part}.weight": one for part in ("norm", "fc", "mlp")}
    renamed |= {f"model.visual.blocks.{index}.weight": one for index in range(5)}
    return renamed


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_published_file_has_the_names_of_the_text_model(tmp_path: Path, family: str) -> None:
    model = hybrid_model(family)
    model.save_pretrained(tmp_path)
    plain = HfFolder(tmp_path)
    tensors = {name: load_tensor(plain, name) for name in plain.names()}
    rewrite_weights(tmp_path, published)
    source = HfFolder(tmp_path)
    assert tensors.keys() <= source.names()
    assert all(torch.equal(load_tensor(source, name), tensor) for name, tensor in tensors.items())
    report = skipped(tmp_path)
    assert report.describe() == "skipped: 3 multi-token-prediction weights, 5 vision weights"
    assert set(report.multi_token) | set(report.vision) == source.names() - tensors.keys()


@pytest.mark.parametrize("family", MULTIMODAL)
@pytest.mark.parametrize("tied", [False, True])
def test_the_text_model_of_a_saved_multimodal_one_is_found(tmp_path: Path, family: str, tied: bool) -> None:
    model = multimodal_model(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    source = HfFolder(tmp_path)
    report = skipped(tmp_path)
    assert source.config.tied_head == tied
    assert len(report.vision) == sum("visual" in name for name in model.state_dict())
    assert report.multi_token == report.unknown == ()
    for name in ("embed_tokens.weight", "layers.0.linear_attn.A_log", "layers.3.self_attn.q_proj.weight"):
        theirs = model.state_dict()[f"model.language_model.{name}"]
        assert torch.equal(load_tensor(source, f"model.{name}"), theirs)


def test_a_tensor_under_both_prefixes_is_an_error(tmp_path: Path) -> None:
    hybrid_model("qwen3_5_text").save_pretrained(tmp_path)
    rewrite_weights(tmp_path, lambda tensors: tensors | published(tensors))
    with pytest.raises(
        ModelFileError, match=r"model\.safetensors: tensor model\..* twice, under two prefixes"
    ):
        HfFolder(tmp_path)


def test_layers_beyond_the_last_predict_several_tokens(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    one = torch.zeros(1)
    extra = {"model.layers.2.eh_proj.weight": one, "model.layers.1.odd.weight": one}
    rewrite_weights(tmp_path, lambda tensors: tensors | extra)
    assert skipped(tmp_path) == SkippedWeights(
        multi_token=("model.layers.2.eh_proj.weight",), unknown=("model.layers.1.odd.weight",)
    )


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], None),
        (["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"], None),
        (["mtp.norm.weight"], "skipped: 1 multi-token-prediction weight"),
        (["visual.a", "model.visual.b"], "skipped: 2 vision weights"),
        (["a.b", "c.d"], "skipped: 2 unknown weights (a.b, c.d)"),
        (["mtp.a", "x"], "skipped: 1 multi-token-prediction weight, 1 unknown weight (x)"),
        (list("abcdef"), "skipped: 6 unknown weights (a, b, c, d, 2 more)"),
        (["\x1b[2J\n"], "skipped: 1 unknown weight ('\\x1b[2J\\n')"),
        ([f"model.layers.{'9' * 20_000}.w"], f"skipped: 1 unknown weight (model.layers.{'9' * 64}...)"),
    ],
)
def test_the_report_is_one_line(tmp_path: Path, names: list[str], words: str | None) -> None:
    hf_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    report = skipped_weights(HfFolder(tmp_path).config, names)
    assert report.describe() == words


def test_a_file_with_nothing_else_has_no_report(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    assert skipped(tmp_path) == SkippedWeights()
    assert skipped(tmp_path).describe() is None


def test_an_opened_model_tells_what_was_skipped(tmp_path: Path) -> None:
    hybrid_model("qwen3_5_text").save_pretrained(tmp_path)
    rewrite_weights(tmp_path, published)
    words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = open_model(tmp_path)
    assert opened.skipped.describe() == "skipped: 3 multi-token-prediction weights, 5 vision weights"
    opened.source.close()
