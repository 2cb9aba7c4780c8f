"""Weights of 4 to 8 bits for GPUs, by Triton's interpreter: values are the file's, and products are theirs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from penstock.errors import ModelError
from penstock.kernels.cuda import quantised
from penstock.kernels.cuda.experts import CudaExperts
from penstock.kernels.probe import ProbeShapes, ProductShape, Random, check_blocks
from penstock.kernels.quantised import (
    BLOCK_FORMS,
    F8_BLOCK,
    F8_ROW,
    FLOAT8,
    FLOAT_FORMS,
    HOST_FORMS,
    Q4_K,
    Q6_K,
    Q8_0,
    BlockForm,
    QuantisedWeight,
    quantise,
)
from penstock.layers.attention import Attention
from penstock.layers.mlp import MLP, ExpertMLP
from penstock.models.decoder import Decoder
from penstock.models.gguf.file import GgufFile
from penstock.models.loading import load_decoder, settled_weights
from penstock.models.source import stored_bits
from penstock.plan.memory import weight_bytes
from penstock.plan.weight_settings import WeightsName, resolve_weights
from tests.kernels.parity import check_close
from tests.kernels.test_quantised import random_blocks
from tests.kernels.triton_interpreter import interpreted_kernels
from tests.models.gguf_builders import write_hybrid_gguf
from tests.models.test_gguf_hybrid import small
from tests.models.test_gguf_mixed import MIXED, NARROW, write_mixed

if TYPE_CHECKING:
    from penstock.kernels.cuda.kernels import CudaKernels

CPU = torch.device("cpu")
NUM_OUT, NUM_IN = 20, 512
# Interpreted, what becomes bfloat16 is cut off: weights of a few rows, and every output.
MOST = 0.012
GPU_FORMS = [form for form in BLOCK_FORMS.values() if form not in HOST_FORMS]
forms = pytest.mark.parametrize("form", [*GPU_FORMS, *FLOAT_FORMS], ids=lambda form: form.name)


@pytest.fixture(scope="module")
def kernels() -> Iterator["CudaKernels"]:
    with interpreted_kernels(256) as found:
        yield found


def blocks_of(form: BlockForm) -> Tensor:
    if form in FLOAT_FORMS:
        values = torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(1))
        values[:, :128] *= 5
        return quantise(values, F8_ROW)
    return random_blocks(form, NUM_OUT, NUM_IN)


def values_of(form: BlockForm, blocks: Tensor) -> Tensor:
    """In float32, as the gguf package has them; of 8-bit floats, as they are defined."""
    if form not in FLOAT_FORMS:
        return torch.from_numpy(dequantize(blocks.numpy(), Kind[form.name])).view(NUM_OUT, NUM_IN)
    found = blocks.view(NUM_OUT, -1, form.block_bytes)
    scales, floats = found[..., :4].contiguous().view(torch.float32), found[..., 4:].contiguous()
    return (floats.view(FLOAT8).float() * scales).flatten(1)


def weight_of(kernels: "CudaKernels", form: BlockForm) -> tuple[QuantisedWeight, Tensor]:
    """In an order of rows that is not the file's."""
    blocks, outputs = blocks_of(form), torch.arange(NUM_OUT).flip(0)
    weight = kernels.quantised.zeros(form, NUM_OUT, NUM_IN, CPU)
    for part in (slice(0, 7), slice(7, NUM_OUT)):
        kernels.quantised.place(weight, outputs[part], blocks[part])
    return weight, values_of(form, blocks).flip(0)


@forms
def test_values_are_those_of_the_file(kernels: "CudaKernels", form: BlockForm) -> None:
    weight, values = weight_of(kernels, form)
    assert torch.equal(kernels.quantised.rows(weight, None, torch.float32), values)
    some = torch.tensor([7, 0, 19, 7])
    assert torch.equal(kernels.quantised.rows(weight, some, torch.float32), values[some])
    per_row = 32 / NUM_IN if form is F8_ROW else 0
    assert 8 * weight.nbytes / values.numel() == form.device_bits + per_row
    assert kernels.unpacked_bytes(weight) == (0 if form in FLOAT_FORMS else 2 * values.numel())


@forms
@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_products_of_a_few_rows(kernels: "CudaKernels", form: BlockForm, num_rows: int) -> None:
    weight, values = weight_of(kernels, form)
    x = torch.randn(num_rows, 2 * NUM_IN).bfloat16()[:, :NUM_IN]
    bias = torch.randn(NUM_OUT).bfloat16()
    exact = x.double() @ values.double().T + bias.double()
    check_close(kernels.linear(x, weight, bias, is_canonical=False), exact, MOST)
    wide = torch.zeros(num_rows, NUM_OUT + 8, dtype=torch.bfloat16)
    kernels.linear_into(wide[:, 3:-5], x, weight, None, is_canonical=False)
    check_close(wide[:, 3:-5], exact - bias.double(), MOST)
    assert not wide[:, :3].any()
    assert not wide[:, -5:].any()


@pytest.mark.parametrize("form", GPU_FORMS, ids=lambda form: form.name)
def test_products_of_a_row_however_it_is_shared(
    kernels: "CudaKernels", form: BlockForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By warps that have as many inputs each, one part of them at a time or two, and by more than have any."""
    weight, values = weight_of(kernels, form)
    x = torch.randn(1, NUM_IN).bfloat16()
    for warps, is_double in ((1, False), (1, True), (2, False), (16, False)):
        monkeypatch.setattr(quantised, "_ROW_WARPS", {0: (warps, is_double)})
        check_close(kernels.linear(x, weight, is_canonical=False), x.double() @ values.double().T, MOST)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_weights_of_several_forms_side_by_side(kernels: "CudaKernels", num_rows: int) -> None:
    x, biases = torch.randn(num_rows, NUM_IN).bfloat16(), torch.randn(2, NUM_OUT).bfloat16()
    for forms in ((Q4_K, Q6_K), (Q6_K, Q8_0), (Q8_0, Q4_K), (Q4_K, F8_BLOCK)):
        found = [weight_of(kernels, form) for form in forms]
        exact = torch.cat([x.double() @ values.double().T for _, values in found], dim=1)
        weights = [weight for weight, _ in found]
        ours = kernels.linear_parts(x, weights, (None, None), is_canonical=False)
        check_close(ours, exact, MOST)
        ours = kernels.linear_parts(x, weights, tuple(biases), is_canonical=False)
        check_close(ours, exact + biases.flatten().double(), MOST)


@pytest.mark.parametrize("form", [Q4_K, Q8_0], ids=lambda form: form.name)
def test_rows_that_are_few_have_the_same_bits(kernels: "CudaKernels", form: BlockForm) -> None:
    """Among as many as share a kernel."""
    weight, _ = weight_of(kernels, form)
    x = torch.randn(16, NUM_IN).bfloat16()
    for counts in ((2, 3, 4), (5, 16)):
        most = kernels.linear(x[: counts[-1]], weight, is_canonical=False)
        for count in counts:
            assert torch.equal(kernels.linear(x[:count], weight, is_canonical=False), most[:count])


@pytest.mark.parametrize("form", [Q4_K, Q8_0, F8_BLOCK], ids=lambda form: form.name)
def test_products_that_come_out_wrong_are_noticed(
    kernels: "CudaKernels", form: BlockForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all numbers of rows, or of some; in any of the model's products."""
    shapes = ProbeShapes((ProductShape(NUM_OUT, NUM_IN, form=form.name),), 1, 1, 64, 64, (), 64, None)
    random = Random(torch.bfloat16, CPU)
    check_blocks(kernels, shapes, random)
    linear = kernels.quantised.linear

    def wrong(x: Tensor, *args: Any) -> Tensor:
        found = linear(x, *args)
        if len(x) == 17:
            found[16, :5] = float("nan") if form is Q8_0 else 0
        return found

    monkeypatch.setattr(kernels.quantised, "linear", wrong)
    with pytest.raises(
        ModelError, match=f"products of 17 rows with weights .* in {form.name} come out wrong"
    ):
        check_blocks(kernels, replace(shapes, products=(), head=shapes.products[0]), random)


@pytest.mark.parametrize("form", [*GPU_FORMS, F8_BLOCK], ids=lambda form: form.name)
def test_products_of_many_rows_are_those_of_bfloat16(kernels: "CudaKernels", form: BlockForm) -> None:
    """Of 8-bit floats, too, where a block of them has not 128 outputs."""
    weight, values = weight_of(kernels, form)
    x = torch.randn(65, NUM_IN).bfloat16()
    rounded = kernels.quantised.rows(weight, None, torch.bfloat16)
    assert torch.equal(kernels.linear(x, weight), torch.nn.functional.linear(x, rounded))
    check_close(rounded, values, MOST)


def test_blocks_that_a_gpu_has_no_kernels_for_are_named(kernels: "CudaKernels", tmp_path: Path) -> None:
    source = GgufFile(write_mixed(tmp_path / "mixed.gguf", "llama", NARROW))
    settled = settled_weights(source, kernels, torch.bfloat16, CPU, resolve_weights(environ={}))
    assert settled.is_unpacked
    assert "Q5_1 and TQ2_0 as bfloat16" in settled.reason
    source.close()


def test_a_file_s_blocks_are_a_gpu_s(kernels: "CudaKernels", tmp_path: Path) -> None:
    """Matrices stay in the blocks that a file has, each in its form, and the rest does not."""
    source = GgufFile(write_mixed(tmp_path / "mixed.gguf", "llama", MIXED))
    kept = load_decoder(source, kernels, torch.bfloat16, CPU)
    settled = settled_weights(source, kernels, torch.bfloat16, CPU, resolve_weights(environ={}))
    assert settled.reason.startswith("auto: ")
    bits = stored_bits(source, 16, on_gpu=True)
    assert weight_bytes(kept.config, 2, bits) == pytest.approx(kept.num_weight_bytes, rel=0.01)
    mixer, mlp = kept.layers[0].mixer, kept.layers[0].mlp
    assert isinstance(mixer, Attention)
    assert isinstance(mlp, MLP)
    forms = [
        [part.form.name for part in product.parts if isinstance(part, QuantisedWeight)]
        for product in (mixer.qkv, mixer.out, mlp.gate_up, mlp.down)
    ]
    assert forms == [["Q4_K", "Q6_K"], ["Q4_K"], ["Q5_K", "Q4_K"], ["Q6_K"]]


SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"ffn_gate_exps": Kind.Q4_0, "ffn_up_exps": Kind.Q4_0, "ffn_down_exps": Kind.Q8_0}


def loaded_experts(model: Decoder) -> CudaExperts:
    block = model.layers[0].mlp
    assert isinstance(block, ExpertMLP)
    assert isinstance(block.experts, CudaExperts)
    return block.experts


@pytest.mark.parametrize("weights", ["auto", "int4", "int8", "fp8"])
def test_experts_are_blocks_of_a_gpu_too(
    kernels: "CudaKernels", weights: WeightsName, tmp_path: Path
) -> None:
    """All of a layer in one weight: those that a file has, or that others become."""
    path = write_hybrid_gguf(small("qwen3_moe", **SIZES), tmp_path / "experts.gguf", quantised=EXPERTS)
    source = GgufFile(path)
    kept = load_decoder(source, kernels, torch.bfloat16, CPU, weights)
    found = loaded_experts(kept)
    plain = loaded_experts(load_decoder(source, kernels, torch.bfloat16, CPU, "bf16"))
    forms = {"auto": ["Q4_0", "Q8_0"], "int4": ["Q4_1"] * 2, "int8": ["Q8_0"] * 2, "fp8": ["F8_ROW"] * 2}
    for weight, values, form in zip(
        (found.gate_up, found.down), (plain.gate_up, plain.down), forms[weights], strict=True
    ):
        assert isinstance(weight, QuantisedWeight)
        assert isinstance(values, Tensor)
        assert weight.form.name == form
        some = torch.arange(0, weight.shape[0], 7)  # of every expert; the interpreter takes its time
        own = kernels.quantised.rows(weight, some, torch.float32)
        most = {"auto": MOST, "int4": 0.08, "int8": MOST, "fp8": 0.07}[weights]
        check_close(own, values.flatten(0, 1)[some].double(), most)
    if weights == "auto":
        bits = stored_bits(source, 16, on_gpu=True)
        assert weight_bytes(kept.config, 2, bits) == pytest.approx(kept.num_weight_bytes, rel=0.01)
    tried = {shape.form for shape in kept.probe_shapes.expert_products}
    assert tried == {f"grouped {form}" for form in forms[weights]}


def test_experts_whose_parts_are_of_two_forms_are_plain(kernels: "CudaKernels", tmp_path: Path) -> None:
    kinds = EXPERTS | {"ffn_up_exps": Kind.Q8_0}
    source = GgufFile(
        write_hybrid_gguf(small("qwen3_moe", **SIZES), tmp_path / "experts.gguf", quantised=kinds)
    )
    model = load_decoder(source, kernels, torch.bfloat16, CPU)
    found = loaded_experts(model)
    assert isinstance(found.gate_up, Tensor)
    assert isinstance(found.down, QuantisedWeight)
    bits = stored_bits(source, 16, on_gpu=True)
    assert weight_bytes(model.config, 2, bits) == pytest.approx(model.num_weight_bytes, rel=0.01)
