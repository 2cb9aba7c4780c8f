"""A hybrid from a GGUF file, or from a checkpoint with more in it than the text model, is the same model."""

from pathlib import Path

import pytest
import torch

from penstock.kernels.torch_kernels import TorchKernels
from penstock.models.gguf_file import GgufFile
from penstock.models.loading import load_decoder
from tests.engine.hybrids import MODELS, hybrid_oracle
from tests.engine.test_parity import relative_error
from tests.models.gguf_builders import write_hybrid_gguf
from tests.oracle import make_oracle, random_prompt, run_prompt

# A GGUF file says neither which layers are dense nor that experts' weights are not normalised.
NAMES = [*(name for name in MODELS if "dense" not in name), "qwen3_moe, normalised"]


@pytest.mark.parametrize("name", NAMES)
def test_gguf(name: str, tmp_path: Path) -> None:
    oracle = hybrid_oracle(name) if name in MODELS else make_oracle("qwen3_moe", norm_topk_prob=True)
    prompt = random_prompt(150)
    source = GgufFile(write_hybrid_gguf(oracle.model, tmp_path / "model.gguf"))
    try:
        model = load_decoder(source, TorchKernels(), torch.float32, torch.device("cpu"))
    finally:
        source.close()
    for chunk_size in (3, 64, 0):
        logits = run_prompt(model, prompt, chunk_size=chunk_size).logits
        assert logits is not None
        assert relative_error(logits, oracle.logits(prompt)) < 1e-4
