"""transformers' model, filled from a file by Penstock, is the one that was saved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ModelError
from penstock.measure.transformers_model import load_transformers, transformers_config
from penstock.models.hf.folder import HfFolder
from tests.models.hybrids import (
    CLASSES,
    MIXTURES,
    MULTIMODAL,
    fuse_experts,
    hybrid_model,
    multimodal_model,
    rewrite_weights,
)

YARN = {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in CLASSES),
    ("qwen3_moe", {"norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 2}),
    ("qwen3_next", {"mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True}),
    ("qwen3_next", {"num_experts": 0, "full_attention_interval": 2}),
    ("qwen3_5_text", {"layer_types": ["full_attention"] * 4, "tie_word_embeddings": True}),
    ("qwen3_5_text", {"partial_rotary_factor": 0.5, "rope_parameters": YARN}),
    ("qwen3_5_moe_text", {"partial_rotary_factor": 1.0, "head_dim": 24}),
]


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, 96, (1, 70), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        result: torch.Tensor = model(tokens).logits
    return result


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_a_saved_model_is_filled_with_its_own_weights(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    saved = hybrid_model(family, **changes)
    saved.save_pretrained(tmp_path)
    loaded = load_transformers(HfFolder(tmp_path), torch.float32)
    assert type(loaded) is type(saved)
    theirs, ours = saved.state_dict(), loaded.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    torch.testing.assert_close(logits(loaded), logits(saved), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", MULTIMODAL)
@pytest.mark.parametrize("tied", [False, True])
def test_the_text_model_of_a_multimodal_one_says_the_same(tmp_path: Path, family: str, tied: bool) -> None:
    saved = multimodal_model(family, tie_word_embeddings=tied)
    saved.save_pretrained(tmp_path)
    loaded = load_transformers(HfFolder(tmp_path), torch.float32)
    torch.testing.assert_close(logits(loaded), logits(saved), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_form_of_the_experts_in_the_file_does_not_matter(tmp_path: Path, family: str) -> None:
    saved = hybrid_model(family)
    saved.save_pretrained(tmp_path)
    apart = HfFolder(tmp_path)
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in apart.names()
    rewrite_weights(tmp_path, fuse_experts)
    fused = HfFolder(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused.names()
    loaded = load_transformers(fused, torch.float32).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.state_dict().items())


def test_a_form_that_transformers_has_no_parameters_for_is_an_error(tmp_path: Path) -> None:
    hybrid_model("qwen3_next").save_pretrained(tmp_path)

    def split(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in tensors if "in_proj_ba" in name]:
            both = tensors.pop(name)
            tensors[name.replace("_ba", "_b")], tensors[name.replace("_ba", "_a")] = both.chunk(2)
        return tensors

    rewrite_weights(tmp_path, split)
    with pytest.raises(ModelError, match=r"in_proj_ba\.weight"):
        load_transformers(HfFolder(tmp_path), torch.float32)


def test_a_family_that_transformers_does_not_know_is_an_error(tmp_path: Path) -> None:
    hybrid_model("qwen3_moe").save_pretrained(tmp_path)
    config = replace(HfFolder(tmp_path).config, family="toy")
    with pytest.raises(ModelError, match="'toy'"):
        transformers_config(config)
