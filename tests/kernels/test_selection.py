"""Which kernels a device gets, and the choices that are refused."""

import sys

import pytest
import torch

from penstock.errors import SettingError
from penstock.kernels.interface import KernelsReport, select_kernels
from penstock.machine import ISA_VARIABLE, instruction_set, processor_flags
from penstock.plan.model import ModelConfig
from penstock.plan.settings import KERNELS_VARIABLE
from penstock.plan.weight_settings import WeightsSetting, resolve_weights, settle_without_blocks

CUDA, MPS = torch.device("cuda:0"), torch.device("mps")
CONFIG = ModelConfig(1, 128, 128, 2, 1, 64, 500)


@pytest.mark.parametrize(
    ("device", "choice", "name"),
    [
        (CUDA, "auto", "cuda"),
        (CUDA, "torch", "torch"),
        (MPS, "auto", "torch"),
        (MPS, "torch", "torch"),
        (torch.device("cpu"), "torch", "torch"),
    ],
)
def test_selected(device: torch.device, choice: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "cuda":
        pytest.importorskip("triton")
    monkeypatch.setenv(KERNELS_VARIABLE, choice)
    kernels = select_kernels(device)
    assert kernels.name == name
    assert (kernels.quantised is None) == (name == "torch")


def report(
    choice: str, dtype: torch.dtype = torch.float32, weights: WeightsSetting | None = None
) -> KernelsReport:
    kernels = select_kernels(torch.device("cpu"), choice)
    return KernelsReport.of(kernels, dtype, CONFIG, weights or resolve_weights("auto"))


def test_where_slower_kernels_run_one_line_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert f"{KERNELS_VARIABLE}=torch" in str(report("torch").slower)
    if select_kernels(torch.device("cpu"), "auto").name != "native":
        pytest.skip("there are no native kernels")
    assert report("native").slower is None
    assert report("native").instructions == instruction_set(processor_flags())
    assert "heads of 64" in str(report("native", torch.float16).slower)
    unpacked = settle_without_blocks(resolve_weights("auto"), "float32", "bfloat16")
    assert "in bfloat16 they do" in str(report("native", weights=unpacked).slower)


@pytest.mark.parametrize("device", [CUDA, MPS], ids=str)
def test_native_kernels_are_of_a_cpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "native")
    with pytest.raises(SettingError, match=f"PENSTOCK_KERNELS='native' is not accepted on {device.type}: "):
        select_kernels(device)


def test_without_triton_there_are_no_kernels_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "penstock.kernels.cuda.kernels", raising=False)
    with pytest.raises(SettingError, match="needs triton, which is not installed: pip install triton"):
        select_kernels(CUDA)
    monkeypatch.setenv(KERNELS_VARIABLE, "torch")
    assert select_kernels(CUDA).name == "torch"
