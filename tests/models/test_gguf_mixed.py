"""Files that have the parts of a fused matrix in different forms: each part is kept as it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from penstock.engine.run import Run
from penstock.kernels.interface import Kernels, select_kernels
from penstock.kernels.quantised import BLOCK_FORMS, QuantisedWeight
from penstock.layers.attention import Attention
from penstock.layers.linear import Linear
from penstock.layers.mlp import MLP, ExpertMLP
from penstock.layers.recurrent import Recurrent
from penstock.models.decoder import Decoder
from penstock.models.gguf.file import GgufFile
from penstock.models.loading import load_decoder, settled_weights
from penstock.plan.weight_settings import WeightsName, WeightsSetting
from tests.engine.test_same_bits import assert_same_bits
from tests.models.builders import gguf_metadata, gguf_name, hf_model, load_tensor, write_gguf
from tests.models.gguf_builders import write_hybrid_gguf
from tests.models.test_gguf_hybrid import small
from tests.oracle import random_prompt, run_prompt

CPU = torch.device("cpu")
# As llama.cpp mixes them, and a bit more.
MIXED = {
    "attn_q": Kind.Q4_K,
    "attn_k": Kind.Q4_K,
    "attn_v": Kind.Q6_K,
    "attn_output": Kind.Q4_K,
    "ffn_gate": Kind.Q5_K,
    "ffn_up": Kind.Q4_K,
    "ffn_down": Kind.Q6_K,
    "token_embd": Kind.Q4_K,
    "output": Kind.Q6_K,
}
# As it mixes those whose rows are no whole blocks of 256.
NARROW = {
    "attn_q": Kind.Q5_0,
    "attn_k": Kind.Q5_0,
    "attn_v": Kind.Q8_0,
    "attn_output": Kind.Q5_0,
    "ffn_gate": Kind.Q5_1,
    "ffn_up": Kind.TQ2_0,
    "ffn_down": Kind.Q6_K,
    "token_embd": Kind.Q5_0,
    "output": Kind.Q8_0,
}
HYBRID = {
    "attn_q": Kind.Q4_0,  # with its gates, which come after keys and values here
    "attn_k": Kind.Q8_0,
    "attn_v": Kind.Q4_1,
    "attn_qkv": Kind.Q8_0,
    "attn_gate": Kind.Q4_1,
    "ssm_in": Kind.Q8_0,
    "ssm_beta": Kind.Q4_0,
    "ffn_gate_shexp": Kind.Q4_0,
    "ffn_up_shexp": Kind.Q8_0,
    "ffn_gate": Kind.Q4_0,
    "ffn_up": Kind.Q8_0,
}
# Of logits, by their norm.
NEAR = 0.05
NUM_DECODES = 6

pytestmark = pytest.mark.skipif(
    select_kernels(CPU).quantised is None, reason="there are no kernels for quantised weights here"
)


def blocks_of(array: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """An array in a form; in one that only llama.cpp quantises to, other values of about the same size."""
    if not kind.name.endswith("_K"):
        quantised: np.ndarray[Any, Any] = gguf.quants.quantize(array, kind)
        return quantised
    form, (num_rows, num_in) = BLOCK_FORMS[kind.name], array.shape
    random = np.random.default_rng(array.size)
    blocks = random.integers(0, 256, (num_rows, num_in // form.block_size, form.block_bytes), dtype=np.uint8)
    size = num_in**-0.5
    if kind is Kind.Q6_K:
        blocks[..., -2:] = np.array([size / 1300], np.float16).view(np.uint8)
    else:  # quants up to 15 or 31 times a scale up to 63, less a minimum that puts their mean at zero
        most = 15 if kind is Kind.Q4_K else 31
        halves = np.array([size / (20 * most), size / 40], np.float16)
        blocks[..., :4] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def write_mixed(path: Path, family: str, kinds: Mapping[str, Kind]) -> Path:
    """A dense model, with matrices of these kinds and all others in F32."""
    model = hf_model(
        family, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2
    )
    stored = {}
    for name, parameter in model.state_dict().items():
        short, array = gguf_name(name), parameter.numpy()
        kind = Kind.F32 if array.ndim == 1 else kinds[short.removesuffix(".weight").rpartition(".")[2]]
        stored[short] = (blocks_of(array, kind) if array.ndim > 1 else array, kind)
    metadata = gguf_metadata(model.config, family)
    return write_gguf(path, metadata, stored, family)


def load(source: GgufFile, weights: WeightsName) -> Decoder:
    return load_decoder(source, select_kernels(CPU), torch.bfloat16, CPU, weights)


def fused_weights(model: Decoder) -> list[Linear]:
    found: list[Linear] = []
    for layer in model.layers:
        mixer = layer.mixer
        assert isinstance(mixer, Attention | Recurrent)
        found.append(mixer.qkv if isinstance(mixer, Attention) else mixer.inputs)
        block = layer.mlp if isinstance(layer.mlp, MLP) else None
        block = layer.mlp.shared if isinstance(layer.mlp, ExpertMLP) else block
        if block is not None:
            found.append(block.gate_up)
    return found


def values(weight: Linear, kernels: Kernels) -> Tensor:
    """A weight [out, in] in bfloat16, as products see it."""
    one = torch.eye(weight.shape[1], dtype=torch.bfloat16)
    return torch.cat([kernels.linear(one, part) for part in weight.parts], dim=1).t()


def check_like_bfloat16(source: GgufFile, kept: Decoder) -> None:
    """A prompt's logits are those of the same file in bfloat16, and the same bits at any chunk size; decodes are as
    close to float32 as in bfloat16."""
    plain = load(source, "bf16")
    exact = load_decoder(source, select_kernels(CPU), torch.float32, CPU, "f32")
    prompt = random_prompt(130, vocab_size=kept.config.vocab_size)
    runs = [run_prompt(model, prompt, max_tokens=NUM_DECODES + 1) for model in (kept, plain, exact)]
    assert distance(runs[0], runs[1]) < NEAR
    for chunk_size in (64, 128) if kept.config.has_state else (1, 7, 64):
        assert_same_bits(run_prompt(kept, prompt, chunk_size=chunk_size), runs[0])
    errors = []
    for _ in range(NUM_DECODES - 1):
        for run in runs:
            run.tokens[-1] = runs[2].tokens[-1]
        for run in runs:
            run.step()
        errors.append([distance(run, runs[2]) for run in runs[:2]])
    ours, theirs = torch.tensor(errors).mean(dim=0).tolist()
    assert ours < 1.5 * theirs


def check_one_call(model: Decoder) -> None:
    """A decode by one call for all layers has the bits of one layer by layer."""
    layers = model.dense_layers
    assert layers is not None
    both: list[Tensor] = []
    for model.dense_layers in (layers, None):
        run = run_prompt(model, random_prompt(40, vocab_size=model.config.vocab_size), max_tokens=3)
        run.step()
        assert run.logits is not None
        both.append(run.logits)
    model.dense_layers = layers
    assert torch.equal(*both)


def distance(run: Run, other: Run) -> float:
    """Between their logits, as a part of the other's."""
    assert run.logits is not None
    assert other.logits is not None
    return float((run.logits - other.logits).norm() / other.logits.norm())


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # in another order in the file; with biases
def test_parts_of_any_form_are_kept(tmp_path: Path, family: str) -> None:
    source = GgufFile(write_mixed(tmp_path / "model.gguf", family, MIXED))
    kept = load(source, "auto")
    products = kept.kernels.quantised
    assert products is not None
    for index, layer in enumerate(kept.layers):
        prefix = f"model.layers.{index}"
        mixer, mlp = layer.mixer, layer.mlp
        assert isinstance(mixer, Attention)
        assert isinstance(mlp, MLP)
        for weight, forms, names in (
            (
                mixer.qkv,
                ["Q4_K", "Q6_K"],
                [f"{prefix}.self_attn.{part}_proj.weight" for part in "qkv"],
            ),
            (
                mlp.gate_up,
                ["Q5_K", "Q4_K"],
                [f"{prefix}.mlp.{part}_proj.weight" for part in ("gate", "up")],
            ),
        ):
            parts = [part for part in weight.parts if isinstance(part, QuantisedWeight)]
            assert [part.form.name for part in parts] == forms
            assert len(parts) == len(weight.parts)
            assert sum(part.nbytes for part in parts) <= 10 / 16 * 2 * weight.shape[0] * weight.shape[1]
            rows = [products.rows(part, torch.arange(part.shape[0]), torch.float32) for part in parts]
            assert torch.equal(torch.cat(rows), torch.cat([load_tensor(source, name) for name in names]))
    check_one_call(kept)
    check_like_bfloat16(source, kept)
    source.close()


def test_blocks_without_kernels_become_plain_numbers(tmp_path: Path) -> None:
    """And it is said."""
    path = write_mixed(tmp_path / "model.gguf", "llama", NARROW)
    source = GgufFile(path)
    kept = load(source, "auto")
    for layer in kept.layers:
        assert isinstance(layer.mixer, Attention)
        assert isinstance(layer.mlp, MLP)
        forms = [
            [part.form.name if isinstance(part, QuantisedWeight) else "" for part in weight.parts]
            for weight in (layer.mixer.qkv, layer.mixer.out, layer.mlp.gate_up)
        ]
        assert forms[:2] == [["Q5_0", "Q8_0"], ["Q5_0"]]
        assert forms[2][0] == "Q5_1"
        assert forms[2][1] not in BLOCK_FORMS  # of bfloat16, in whatever form products take that
    check_like_bfloat16(source, kept)
    setting = settled_weights(source, kept.kernels, torch.bfloat16, CPU, WeightsSetting("auto"))
    assert setting.is_unpacked
    assert "TQ2_0" in setting.reason
    source.close()


@pytest.mark.parametrize(
    ("family", "legacy"), [("qwen3_5_text", False), ("qwen3_next", False), ("qwen3_next", True)]
)
def test_parts_of_delta_nets_and_gates_are_kept(tmp_path: Path, family: str, legacy: bool) -> None:
    """Every output lies where it does in the same matrix of bfloat16, whatever it is made of; some parts are F32."""
    path = write_hybrid_gguf(small(family), tmp_path / "model.gguf", quantised=HYBRID, legacy=legacy)
    source = GgufFile(path)
    kept, plain = load(source, "auto"), load(source, "bf16")
    for ours, theirs in zip(fused_weights(kept), fused_weights(plain), strict=True):
        assert len(ours.parts) > 1
        assert any(isinstance(part, QuantisedWeight) for part in ours.parts)
        assert len(theirs.parts) == 1
        exact = values(theirs, plain.kernels)
        found = values(ours, kept.kernels)
        # Once in a while a value lies so close to the middle of two of bfloat16 that it is rounded to the other.
        assert torch.allclose(found, exact, rtol=2**-7, atol=0)
        assert float((found != exact).float().mean()) < 1e-3
    check_like_bfloat16(source, kept)
    source.close()
