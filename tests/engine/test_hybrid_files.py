"""A hybrid is the same model from a GGUF file, with its experts fused, and from a checkpoint with more in it."""

import shutil
from pathlib import Path

import pytest
import torch

from penstock.kernels.interface import select_kernels
from penstock.models.decoder import Decoder
from penstock.models.gguf.file import GgufFile
from penstock.models.hf.folder import HfFolder
from penstock.models.loading import load_decoder
from penstock.models.source import WeightSource, check_source, skipped_weights
from tests.engine.hybrids import MODELS, hybrid_oracle
from tests.engine.test_parity import relative_error
from tests.models.gguf_builders import write_hybrid_gguf
from tests.models.hybrids import fuse_experts, multimodal_model, rewrite_weights
from tests.oracle import load_model, make_oracle, random_prompt, run_prompt

# A GGUF file says neither which layers are dense nor that experts' weights are not normalised.
NAMES = [*(name for name in MODELS if "dense" not in name), "qwen3_moe, normalised"]


def loaded(source: WeightSource) -> Decoder:
    try:
        cpu = torch.device("cpu")
        return load_decoder(source, select_kernels(cpu), torch.float32, cpu)
    finally:
        source.close()


@pytest.mark.parametrize("name", NAMES)
def test_gguf(name: str, tmp_path: Path) -> None:
    oracle = hybrid_oracle(name) if name in MODELS else make_oracle("qwen3_moe", norm_topk_prob=True)
    prompt = random_prompt(150)
    model = loaded(GgufFile(write_hybrid_gguf(oracle.model, tmp_path / "model.gguf")))
    for chunk_size in (3, 64, 0):
        logits = run_prompt(model, prompt, chunk_size=chunk_size).logits
        assert logits is not None
        assert relative_error(logits, oracle.logits(prompt)) < 1e-4


# An inner width that fills no whole vectors, and one that does.
@pytest.mark.parametrize("inner_width", [40, 64])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe_text"])
def test_fused_experts(family: str, inner_width: int, tmp_path: Path) -> None:
    oracle = make_oracle(family, moe_intermediate_size=inner_width)
    folder = tmp_path / "fused"
    shutil.copytree(oracle.folder, folder)
    rewrite_weights(folder, fuse_experts)
    source = HfFolder(folder)
    assert "model.layers.0.mlp.experts.gate_up_proj" in source.names()
    assert "model.layers.0.mlp.experts.0.up_proj.weight" not in source.names()
    fused = loaded(source)
    prompt = random_prompt(150)
    expected = oracle.logits(prompt)
    for chunk_size in (3, 64, 0):
        logits = run_prompt(fused, prompt, chunk_size=chunk_size).logits
        assert logits is not None
        assert relative_error(logits, expected) < 1e-4
        apart = run_prompt(load_model(oracle.folder), prompt, chunk_size=chunk_size).logits
        assert apart is not None
        assert torch.equal(logits, apart)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_text_model_of_a_published_multimodal_one(family: str, tied: bool, tmp_path: Path) -> None:
    theirs = multimodal_model(family, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    extra = {f"mtp.layers.0.{part}.weight": torch.ones(4, 4) for part in ("norm", "fc", "mlp")}
    rewrite_weights(tmp_path, lambda tensors: tensors | extra)
    source = HfFolder(tmp_path)
    report = skipped_weights(source.config, check_source(source))
    assert report.multi_token == tuple(sorted(extra))
    assert report.vision
    assert report.unknown == ()
    ours = loaded(source)
    prompt = random_prompt(150, vocab_size=96)
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([prompt])).logits[0, -1]
    for chunk_size in (3, 64, 0):
        logits = run_prompt(ours, prompt, chunk_size=chunk_size).logits
        assert logits is not None
        assert relative_error(logits, expected) < 1e-4
