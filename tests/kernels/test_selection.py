"""Which kernels a device gets, and the choices that are refused."""

import sys

import pytest
import torch

from penstock.errors import SettingError
from penstock.kernels.interface import select_kernels
from penstock.plan.settings import KERNELS_VARIABLE

CUDA, MPS = torch.device("cuda:0"), torch.device("mps")


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
