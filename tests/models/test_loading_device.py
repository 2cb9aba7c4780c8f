"""Weights on their way to a device other than the processor: which forms they may have, and that they all arrive."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import SettingError
from penstock.kernels.interface import select_kernels
from penstock.kernels.reference.kernels import TorchKernels
from penstock.models import bytefile
from penstock.models.bytefile import ByteFile, copy_plain
from penstock.models.decoder import _tensors
from penstock.models.hf.folder import HfFolder
from penstock.models.loading import load_decoder, settled_weights
from penstock.models.opened import open_weights
from penstock.models.source import WeightSource
from penstock.plan.weight_settings import WeightsSetting, resolve_weights
from tests.oracle import make_oracle

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FAMILIES = ("llama", "qwen3_moe", "qwen3_next")


@pytest.fixture
def quantised(smollm2_path: Path) -> Iterator[WeightSource]:
    with closing(open_weights(smollm2_path)) as source:
        yield source


@pytest.mark.parametrize(
    ("dtype", "name", "called"), [(torch.bfloat16, "bf16", "bfloat16"), (torch.float32, "f32", "float32")]
)
def test_auto_makes_plain_weights_of_blocks_and_says_so(
    quantised: WeightSource, dtype: torch.dtype, name: str, called: str
) -> None:
    setting = settled_weights(quantised, TorchKernels(), dtype, CUDA, resolve_weights(environ={}))
    assert setting.name == name
    assert (
        setting.reason
        == f"auto: {called}, made of the file's blocks, with which these kernels do not compute"
    )


def test_what_was_asked_for_and_plain_files_stay(quantised: WeightSource) -> None:
    asked = WeightsSetting("bf16", "argument")
    assert settled_weights(quantised, TorchKernels(), torch.bfloat16, CUDA, asked) == asked
    auto = WeightsSetting("auto", "default")
    with closing(HfFolder(make_oracle("llama").folder)) as plain:
        assert settled_weights(plain, TorchKernels(), torch.bfloat16, CUDA, auto) == auto


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(("device", "where"), [("cuda:0", "here"), ("mps", "on mps")])
def test_quantised_weights_need_kernels(
    quantised: WeightSource, weights: str, device: str, where: str
) -> None:
    place = torch.device(device)
    with pytest.raises(SettingError, match=f"weights='{weights}' is not accepted {where}: .*NVIDIA's"):
        load_decoder(quantised, TorchKernels(), torch.bfloat16, place, weights)  # type: ignore[arg-type]


def test_slices_take_turns_in_several_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the way to a GPU: a place is used again once what it held was fetched."""
    values = torch.randn(1000, 64)
    path = tmp_path / "values"
    path.write_bytes(values.numpy().tobytes())
    log: list[str] = []

    class Fetched(bytefile._Place):
        def __init__(self, num_bytes: int, name: str) -> None:
            super().__init__(num_bytes)
            self.name = name

        def part(self, num_bytes: int) -> torch.Tensor:
            log.append(f"read {self.name}")
            return super().part(num_bytes)

        def copy(self, values: torch.Tensor, out: torch.Tensor) -> None:
            log.append(f"copy {self.name}")
            super().copy(values, out)

    monkeypatch.setattr(bytefile, "SLICE_BYTES", 300 * 64 * 4)
    monkeypatch.setattr(bytefile, "_places", lambda size, device: [Fetched(size, name) for name in "ab"])
    out = torch.zeros(1000, 70, dtype=torch.bfloat16)
    with closing(ByteFile(path)) as file:
        copy_plain(file, 0, torch.float32, out[:, :64])
    assert torch.equal(out[:, :64], values.bfloat16())
    assert log == [f"{what} {name}" for name in "abab" for what in ("read", "copy")]


@needs_gpu
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_a_folder_s_tensors_arrive_on_a_gpu(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    name = "model.embed_tokens.weight"
    values = torch.randn(1 << 13, 384).to(stored)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({name: values}, tmp_path / "model.safetensors")
    whole = torch.zeros(1 << 13, 400, dtype=wanted, device=CUDA)
    with closing(HfFolder(tmp_path)) as source:
        source.load_into(name, whole[:, :384])
    assert torch.equal(whole[:, :384].cpu(), values.to(wanted))
    assert not whole[:, 384:].any()


@needs_gpu
def test_a_gguf_s_tensors_arrive_on_a_gpu(quantised: WeightSource) -> None:
    for name in sorted(quantised.names())[:12]:
        here = torch.zeros(quantised.shape(name), dtype=torch.bfloat16)
        there = torch.zeros_like(here, device=CUDA)
        quantised.load_into(name, here)
        quantised.load_into(name, there)
        assert torch.equal(there.cpu(), here), name


@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_a_model_lies_on_its_gpu(family: str) -> None:
    with closing(HfFolder(make_oracle(family).folder)) as source:
        model = load_decoder(source, select_kernels(CUDA), torch.bfloat16, CUDA)
        here = load_decoder(source, TorchKernels(), torch.bfloat16, CPU)
    parts = [tensor for part in (model._embedding, model._head, *model.layers) for tensor in _tensors(part)]
    assert {tensor.device for tensor in parts} == {CUDA} == {model.device}
    assert torch.equal(model._embedding.cpu(), here._embedding)  # type: ignore[union-attr,arg-type]
