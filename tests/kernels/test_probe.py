"""The probe finds what holds, notices what does not, and keeps what it found."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from penstock.cache.tensors import KV
from penstock.kernels import probe as probing
from penstock.kernels.elementwise import ElementWise
from penstock.kernels.experts import GroupedExperts
from penstock.kernels.probe import (
    GROUPED,
    ON_CPU,
    ON_GPU,
    ProbeResult,
    ProbeShapes,
    ProductShape,
    measure,
    probe,
    tried_on,
)
from penstock.kernels.quantised import Weight
from penstock.kernels.reference.kernels import TorchKernels
from tests.odd_files import ODD_FILES

CPU = torch.device("cpu")
SHAPES = ProbeShapes(
    (ProductShape(96, 64), ProductShape(64, 130, bias=True)), 6, 2, 16, 96, (1088,), 16, ProductShape(300, 96)
)
DTYPES = (torch.float32, torch.bfloat16)


class RowDependent(TorchKernels):
    """Rounds otherwise below some number of rows, as a library's small-matrix path does."""

    def __init__(self, below: int) -> None:
        super().__init__()
        self.below = below

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, is_canonical: bool = True
    ) -> Tensor:
        rows = torch.cat((x, x.new_zeros(64, x.shape[1])))  # enough rows for the real kernel's own floor
        out = super().linear(rows, weight, bias)[: x.shape[0]]
        return out if x.shape[0] >= self.below else out * (1 + 2 * torch.finfo(x.dtype).eps)


class NeighbourDependent(TorchKernels):
    """Attention whose result depends, in the last bits, on how many queries there are."""

    def attend_tile(self, queries: Tensor, offset: int, past: KV | None, own: KV, scale: float) -> Tensor:
        out = super().attend_tile(queries, offset, past, own, scale)
        return out if queries.shape[0] > 100 else out * (1 + torch.finfo(out.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_real_kernels_hold(dtype: torch.dtype) -> None:
    result = measure(TorchKernels(), SHAPES, dtype, CPU)
    assert result.same_bits
    assert result.row_floor is not None
    assert 1 <= result.row_floor <= 64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("below", [1, 2, 7, 25])
def test_finds_the_floor(dtype: torch.dtype, below: int) -> None:
    shapes = ProbeShapes((ProductShape(96, 576),), 6, 2, 16, 96, (1088,), 16, ProductShape(300, 96))
    assert measure(RowDependent(below), shapes, dtype, CPU).row_floor == below


class Erratic(TorchKernels):
    """Products of some numbers of rows are summed in an order of their own."""

    def __init__(self, others: set[int]) -> None:
        super().__init__()
        self._others = others

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, is_canonical: bool = True
    ) -> Tensor:
        if x.shape[0] not in self._others:
            return super().linear(x, weight, bias)
        assert isinstance(weight, Tensor)
        half = x.shape[1] // 2
        return super().linear(x[:, half:], weight[:, half:]) + super().linear(x[:, :half], weight[:, :half])

    def pack(self, weight: Tensor) -> Tensor:
        return weight


@pytest.mark.parametrize(
    ("others", "floor", "avoided"),
    [
        (set(), 64, ()),
        ({64, 128}, 192, ()),
        ({64, 576, 2560, 4096}, 128, (576, 2560, 4096)),
        ({128, 100}, 64, (128,)),
        (set(range(64, 513, 64)), None, ()),
        ({8192}, None, ()),
        (set(range(640, 1600, 64)), None, ()),
    ],
)
def test_on_a_gpu_every_count_is_tried(
    others: set[int], floor: int | None, avoided: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "tried_on", lambda device: ON_GPU)
    monkeypatch.setattr(probing, "slab_holds", lambda *given: False)
    shapes = replace(SHAPES, products=(ProductShape(96, 64),), expert_products=())
    result = measure(Erratic(others), shapes, torch.float32, CPU)
    assert (result.row_floor, result.avoided_rows) == (floor, avoided)


@pytest.mark.parametrize(("below", "floor", "slab"), [(300, 320, 0), (513, 512, 512)])
def test_on_a_gpu_a_floor_comes_before_slabs_and_the_largest_slab_first(
    below: int, floor: int, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "tried_on", lambda device: ON_GPU)
    shapes = replace(SHAPES, products=(ProductShape(96, 64),))
    result = measure(RowDependent(below), shapes, torch.bfloat16, CPU)
    assert (result.row_floor, result.row_slab) == (floor, slab)
    assert result.same_bits


def test_devices_are_tried_with_what_their_libraries_do() -> None:
    assert tried_on(torch.device("cuda:0")) is ON_GPU
    assert tried_on(CPU) is tried_on(torch.device("mps")) is ON_CPU
    for tried in (ON_CPU, ON_GPU):
        assert list(tried.counts) == sorted(set(tried.counts))
        assert tried.reference in range(max(tried.floors), tried.counts[-1])


def test_no_floor_but_a_slab() -> None:
    """Row counts that each sum in an order of their own: only a fixed number of rows will do."""
    result = measure(RowDependent(400), SHAPES, torch.float32, CPU)
    assert (result.row_floor, result.row_slab) == (128, 128)
    assert result.same_bits


def test_experts_have_a_slab_of_their_own() -> None:
    shapes = replace(SHAPES, expert_products=(ProductShape(128, 96),), num_experts=4)
    result = measure(RowDependent(400), shapes, torch.float32, CPU)
    assert (result.row_floor, result.row_slab, result.expert_slab) == (128, 128, 32)
    assert measure(RowDependent(7), shapes, torch.float32, CPU).expert_slab == 0


class Grouped(TorchKernels):
    """Experts that are run as one, with other bits below some number of rows."""

    def __init__(self, below: int) -> None:
        super().__init__()
        self.below = below

    def stacks_experts(self, dtype: torch.dtype, activation: ElementWise | None = None) -> bool:
        return True

    def stacked_experts(self, *given: Any) -> GroupedExperts:
        return GroupedRows(self.below)


@dataclass(frozen=True)
class GroupedRows:
    has_own_law: ClassVar[bool] = True

    below: int

    @property
    def one(self) -> tuple[Weight, Weight]:
        raise NotImplementedError

    def run(self, x: Tensor, scores: Tensor, shared: Tensor | None, *, is_canonical: bool = True) -> Tensor:
        return x if len(x) >= self.below else x * (1 + 2 * torch.finfo(x.dtype).eps)


def test_experts_as_one_have_a_law_of_their_own() -> None:
    products = (ProductShape(128, 96, form=GROUPED), ProductShape(96, 64, form=GROUPED))
    shapes = replace(SHAPES, expert_products=products, num_experts=4)
    assert measure(Grouped(1), shapes, torch.float32, CPU).same_bits
    result = measure(Grouped(3), shapes, torch.float32, CPU)
    assert (result.experts_hold, result.same_bits) == (False, False)


class PlaceDependent(TorchKernels):
    """Products whose first row is rounded differently."""

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, is_canonical: bool = True
    ) -> Tensor:
        out = super().linear(x, weight, bias)
        out[0] *= 1.01
        return out


def test_neither_floor_nor_slab() -> None:
    result = measure(PlaceDependent(), SHAPES, torch.float32, CPU)
    assert result.row_floor is None
    assert not result.same_bits


class SplitDependent(TorchKernels):
    """An activation that is divided over threads wherever torch pleases."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def test_notices_an_activation_that_depends_on_the_number_of_rows() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        assert not measure(SplitDependent(), SHAPES, torch.float32, CPU).passes_hold
        assert measure(TorchKernels(), SHAPES, torch.float32, CPU).passes_hold
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_notices_a_query_that_depends_on_its_neighbours(dtype: torch.dtype) -> None:
    assert not measure(NeighbourDependent(), SHAPES, dtype, CPU).attention_holds


def test_result_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    first = probe(TorchKernels(), SHAPES, torch.float32, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(probing, "measure", lambda *_: pytest.fail("measured again"))
        assert probe(TorchKernels(), SHAPES, torch.float32, CPU) == first
    # Another dtype, tile size or number of threads is another question.
    asked: list[object] = []

    def counted(*args: object) -> ProbeResult:
        asked.append(args)
        return ProbeResult(1, 0, True, True, True)

    monkeypatch.setattr(probing, "measure", counted)
    probe(TorchKernels(), SHAPES, torch.bfloat16, CPU)
    probe(TorchKernels(tile_size=256), SHAPES, torch.float32, CPU)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        probe(TorchKernels(), SHAPES, torch.float32, CPU)
    finally:
        torch.set_num_threads(before)
    assert len(asked) == 3


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"row_floor": "x", "row_slab": 0, "attention_holds": true, "passes_hold": true}',
        '{"row_floor": 0, "row_slab": 0, "attention_holds": true, "passes_hold": true}',
        '{"row_floor": 1, "row_slab": 3, "attention_holds": true, "passes_hold": true}',
        '{"row_floor": 1, "row_slab": 0, "attention_holds": 1, "passes_hold": true}',
        '{"row_floor": 33, "row_slab": 0, "attention_holds": true, "passes_hold": true, "head_holds": true}',
        '{"row_floor": 64, "row_slab": 128, "attention_holds": true, "passes_hold": true, "head_holds": true}',
        '{"row_floor": 1.0, "row_slab": 0, "attention_holds": true, "passes_hold": true, "head_holds": true}',
        "[" * 100_000,
        '{"row_floor": 32, "row_slab": 0, "attention_holds": true, "passes_hold": true, "head_holds": true, '
        '"avoided_rows": [[]]}',
        '{"row_floor": true, "row_slab": 0, "attention_holds": true, "passes_hold": true, "head_holds": true}',
    ],
)
def test_a_damaged_result_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    measured = ProbeResult(32, 0, True, True, True)
    monkeypatch.setattr(probing, "measure", lambda *_: measured)
    assert probe(TorchKernels(), SHAPES, torch.float32, CPU) == measured
    (stored,) = (tmp_path / "probe").iterdir()
    kept = stored.read_text()
    stored.write_text(damage)
    assert probe(TorchKernels(), SHAPES, torch.float32, CPU) == measured
    assert stored.read_text() == kept


@pytest.mark.parametrize("put", ODD_FILES)
def test_what_is_no_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Path], object]
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    measured = ProbeResult(32, 0, True, True, True)
    monkeypatch.setattr(probing, "measure", lambda *_: measured)
    probe(TorchKernels(), SHAPES, torch.float32, CPU)
    (stored,) = (tmp_path / "probe").iterdir()
    kept = stored.read_text()
    stored.unlink()
    put(stored)
    assert probe(TorchKernels(), SHAPES, torch.float32, CPU) == measured
    assert stored.read_text() == kept


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file"))
    assert probe(TorchKernels(), SHAPES, torch.float32, CPU).same_bits
