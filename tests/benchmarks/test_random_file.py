"""A file of published shapes, with random weights."""

from pathlib import Path

import gguf
import pytest

from benchmarks import models
from benchmarks.models import qwen3
from benchmarks.random_file import write
from penstock.engine.llm import LLM
from penstock.models.gguf.header import read_header


def test_it_is_read_as_any_other_and_mixed_as_q4_k_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SHAPES, "small", qwen3(256, 512, layers=8, vocab=50_000))
    path = tmp_path / "small.gguf"
    write("small", path)
    kinds = {name: tensor.kind for name, tensor in read_header(path).tensors.items()}
    kind = gguf.GGMLQuantizationType
    assert kinds["token_embd.weight"] == kind.Q6_K
    assert "output.weight" not in kinds
    for name in ("attn_v", "ffn_down"):
        layers = [kinds[f"blk.{layer}.{name}.weight"] for layer in range(8)]
        assert set(layers) == {kind.Q4_K, kind.Q6_K}
    assert {kinds[f"blk.{layer}.attn_q.weight"] for layer in range(8)} == {kind.Q4_K}
    llm = LLM(str(path), device="cpu")
    assert llm.model.config.vocab_size == 50_000
    answer = llm.generate("One after another.", max_tokens=3)
    assert len(answer.token_ids) == 3
