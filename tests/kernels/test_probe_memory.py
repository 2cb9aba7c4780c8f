"""The probe takes little more memory than the largest weight it makes: it must run wherever the model just fits."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.interface import Kernels, select_kernels
from penstock.kernels.native.build import NativeUnavailableError
from penstock.kernels.native.kernels import NativeKernels
from penstock.kernels.probe import ROWS_TOGETHER, ProbeShapes, ProductShape, Random, measure, slab_holds
from penstock.kernels.quantised import BLOCK_FORMS, QuantisedWeight
from penstock.kernels.reference.kernels import TorchKernels
from tests.live_tensors import LiveTensors

CPU = torch.device("cpu")
# Of the weight's bytes. Rows and results are little beside it, and so is what is copied of it at a time.
MOST = 1.1


class Unpacked(TorchKernels):
    """Weights as they are on a GPU: packing would hold both forms of one for a moment, as loading it does."""

    def pack(self, weight: Tensor) -> Tensor:
        return weight


def peak_of_probe(kernels: Kernels, head: ProductShape, dtype: torch.dtype) -> int:
    shapes = ProbeShapes((ProductShape(96, 64),), 6, 2, 16, 96, (128,), 16, head)
    live = LiveTensors()
    with live:
        assert measure(kernels, shapes, dtype, CPU).head_holds
    return live.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_is_held_once(dtype: torch.dtype) -> None:
    head = ProductShape(16 * ROWS_TOGETHER, 512)
    weight_bytes = head.num_out * head.num_in * dtype.itemsize
    assert weight_bytes < peak_of_probe(Unpacked(), head, dtype) <= MOST * weight_bytes


@pytest.mark.parametrize("form", ["Q8_0", "Q4_K"])
def test_a_quantised_head_is_held_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        kernels = NativeKernels()
    except NativeUnavailableError as error:
        pytest.skip(f"the native kernels cannot be had: {error}")
    if kernels.quantised is None:
        pytest.skip("the processor has no bfloat16 products")
    zeros, made = kernels.quantised.zeros, list[weakref.ref[QuantisedWeight]]()

    def noted(*given: Any) -> QuantisedWeight:
        assert not any(each() for each in made)
        found = zeros(*given)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(kernels.quantised, "zeros", noted)
    head = ProductShape(32 * ROWS_TOGETHER, 1536, form=form)
    weight_bytes = BLOCK_FORMS[form].resident_bits * head.num_out * head.num_in / 8
    live = LiveTensors()  # but for panels, which are the system's
    with torch.inference_mode(), live:
        assert slab_holds(kernels, (head,), kernels.head_rows, Random(torch.bfloat16, CPU))
    assert len(made) == 1
    assert live.peak_bytes <= (MOST - 1) * weight_bytes
    # Of the whole probe some outputs stand for all.
    assert peak_of_probe(kernels, head, torch.bfloat16) <= (MOST - 1) * weight_bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_head_is_held_once_on_a_gpu() -> None:
    device, head = torch.device("cuda:0"), ProductShape(151_936, 4096)
    kernels = select_kernels(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        assert slab_holds(kernels, (head,), kernels.head_rows, Random(torch.bfloat16, device))
    peak_bytes = torch.cuda.max_memory_allocated(device) - before
    assert peak_bytes <= MOST * head.num_out * head.num_in * torch.bfloat16.itemsize


def test_several_products_are_held_one_at_a_time() -> None:
    products = tuple(ProductShape(16 * ROWS_TOGETHER, num_in) for num_in in (192, 256))
    live = LiveTensors()
    with torch.inference_mode(), live:
        assert slab_holds(Unpacked(), products, TorchKernels.head_rows, Random(torch.float32, CPU))
    assert live.peak_bytes <= 1.2 * 16 * ROWS_TOGETHER * 256 * torch.float32.itemsize


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("num_rows", [1, ROWS_TOGETHER, 2 * ROWS_TOGETHER + 5])
def test_every_row_cancels(num_rows: int, sign: int) -> None:
    rows = Random(torch.float32, CPU).cancelling(num_rows, 65, sign)
    first, second, rest = rows.split((32, 32, 1), dim=1)
    assert torch.equal(first.sort(dim=1).values, (sign * second).sort(dim=1).values)
    assert not rest.any()
