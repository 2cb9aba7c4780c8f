"""Folders with quantised weights, as published: what they hold is read, and a GPU keeps it as it is."""

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import ModelError, ModelFileError
from penstock.kernels.quantised import ALL_FORMS, FLOAT8
from penstock.models.hf.folder import HfFolder
from tests.kernels.triton_interpreter import interpreted_kernels

NUM_OUT, NUM_IN, GROUP = 48, 256, 64
NAME = "model.layers.0.mlp.up_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def folder_of(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    values = {"model_type": "llama", "quantization_config": config}
    (path / "config.json").write_text(json.dumps(values))
    parts = {f"{NAME}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file({"model.norm.weight": torch.ones(4), **parts}, path / "model.safetensors")
    return path


def packed(quants: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Words of eight successive columns, as the tools pack them."""
    words = torch.zeros(quants.shape[0], quants.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= quants[:, column::8] << 4 * place
    return words.to(torch.int32)


def four_bits(method: str, path: Path, *, shuffled: bool = False) -> tuple[Path, Tensor]:
    """A folder, and the values in it."""
    torch.manual_seed(0)
    num_groups = NUM_IN // GROUP
    quants = torch.randint(16, (NUM_IN, NUM_OUT))
    zeros = torch.randint(16, (num_groups, NUM_OUT))
    scales = (torch.rand(num_groups, NUM_OUT) / 50).half()
    groups = torch.arange(NUM_IN) // GROUP
    if shuffled:
        groups = groups[torch.randperm(NUM_IN)]
    values = ((quants - zeros[groups]) * scales.float()[groups]).t()
    if method == "awq":
        tensors = {"qweight": packed(quants, AWQ_ORDER), "qzeros": packed(zeros, AWQ_ORDER), "scales": scales}
    else:
        stored = (zeros - 1) % 16
        tensors = {"qweight": packed(quants.t()).t(), "qzeros": packed(stored), "scales": scales}
        tensors["g_idx"] = groups.to(torch.int32)
    return folder_of(path, {"quant_method": method, "bits": 4, "group_size": GROUP}, tensors), values


def floats(kind: str, path: Path) -> tuple[Path, Tensor]:
    torch.manual_seed(0)
    stored = torch.randn(NUM_OUT, NUM_IN).to(FLOAT8)
    if kind == "block":
        scales = torch.rand(1, 2) + 0.5
        values = stored.float() * scales.repeat_interleave(128, 1)
        return folder_of(
            path, {"quant_method": "fp8"}, {"weight": stored, "weight_scale_inv": scales}
        ), values
    scales = (torch.rand(NUM_OUT, 1) + 0.5).bfloat16()
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return folder_of(
        path, config, {"weight": stored, "weight_scale": scales}
    ), stored.float() * scales.float()


CASES = {
    "awq": ("Q4_Z", lambda path: four_bits("awq", path)),
    "gptq": ("Q4_Z", lambda path: four_bits("gptq", path)),
    "gptq, shuffled": (None, lambda path: four_bits("gptq", path, shuffled=True)),
    "fp8, blocks": ("F8_BLOCK", lambda path: floats("block", path)),
    "fp8, outputs": ("F8_ROW", lambda path: floats("channel", path)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_values_are_what_the_parts_say(case: str, tmp_path: Path) -> None:
    form, make = CASES[case]
    folder, values = make(tmp_path)
    with closing(HfFolder(folder)) as source:
        name = f"{NAME}.weight"
        assert source.names() == {name, "model.norm.weight"}
        assert source.shape(name) == (NUM_OUT, NUM_IN)
        found = torch.empty(NUM_OUT, NUM_IN)
        source.load_into(name, found)
        assert torch.equal(found, values)
        kept = source.block_form(name)
        assert (kept.name if kept else None) == form
        if kept is None:
            return
        with interpreted_kernels(256) as kernels:
            weight = kernels.quantised.zeros(ALL_FORMS[kept.name], NUM_OUT, NUM_IN, torch.device("cpu"))
            kernels.quantised.place(weight, torch.arange(NUM_OUT), torch.cat(list(source.blocks(name))))
            assert torch.equal(kernels.quantised.rows(weight, None, torch.float32), values)
            x = torch.randn(1, NUM_IN).bfloat16()
            ours = kernels.linear(x, weight, is_canonical=False).double()
            exact = x.double() @ values.double().T
            assert float((ours - exact).norm() / exact.norm()) < 0.01


# The values of one matrix as three tools pack them, by their own functions: autoawq 0.2.9
# (`WQLinear_GEMM.from_linear`), auto-gptq 0.7.1 (`QuantLinear.pack`), compressed-tensors 0.20.0 (`pack_to_int32`).
BY_TOOLS = Path(__file__).with_name("packed_by_tools.safetensors")


@pytest.mark.parametrize("case", ["awq", "gptq", "compressed-tensors", "compressed-tensors, symmetric"])
def test_what_tools_have_packed_is_read(case: str, tmp_path: Path) -> None:
    method, _, symmetric = case.partition(", ")
    stored = load_file(BY_TOOLS)
    values = stored.pop("values")
    parts = {
        name.removeprefix(f"{method}."): part for name, part in stored.items() if name.startswith(method)
    }
    if symmetric:  # zero points are 8 then
        words, scales = parts.pop("weight_zero_point"), parts["weight_scale"].float()
        zeros = torch.stack([words >> 4 * bit & 15 for bit in range(8)], dim=1).flatten(0, 1)
        values = values + ((zeros - 8) * scales).repeat_interleave(32, dim=1)
    config = {"quant_method": method, "bits": 4, "group_size": 32, "format": "pack-quantized"}
    with closing(HfFolder(folder_of(tmp_path, config, parts))) as source:
        name = f"{NAME}.weight"
        assert source.names() == {name, "model.norm.weight"}
        assert source.shape(name) == values.shape
        found = torch.empty(values.shape)
        source.load_into(name, found)
        assert torch.allclose(found, values, rtol=0, atol=1e-6)
        form = source.block_form(name)
        assert form is not None
        blocks = torch.cat(list(source.blocks(name)))
        with interpreted_kernels(256) as kernels:
            weight = kernels.quantised.zeros(form, len(values), values.shape[1], torch.device("cpu"))
            kernels.quantised.place(weight, torch.arange(len(values)), blocks)
            assert torch.equal(kernels.quantised.rows(weight, None, torch.float32), found)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "weights quantised by 'bitsandbytes' are not supported"),
        ({"quant_method": "gptq", "bits": 8}, "bits of 8 is not supported, only 4 is"),
        ({"quant_method": "awq", "version": "gemv"}, "version"),
    ],
)
def test_what_is_not_read_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        HfFolder(folder_of(tmp_path, config, {}))


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    parts = {"weight": torch.zeros(16, 32).to(FLOAT8)}
    with pytest.raises(ModelFileError, match="no scales"):
        HfFolder(folder_of(tmp_path, {"quant_method": "fp8"}, parts))
    with pytest.raises(ModelFileError, match="scales of shape"):
        HfFolder(folder_of(tmp_path, {"quant_method": "fp8"}, {**parts, "weight_scale": torch.ones(7, 1)}))
    words = torch.zeros(32, 2, dtype=torch.int32)
    awq = {
        "qweight": words,
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 16).half(),
    }
    with pytest.raises(ModelFileError, match="do not fit"):
        HfFolder(folder_of(tmp_path, {"quant_method": "awq"}, awq))
