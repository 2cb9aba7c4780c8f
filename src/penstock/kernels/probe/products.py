"""The law of products: the numbers of rows that are tried, and those that give each row the same bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.device import device_kind
from penstock.kernels.interface import Kernels
from penstock.kernels.probe.data import ROWS_TOGETHER, ProductShape, Random
from penstock.kernels.quantised import BLOCK_FORMS, Weight
from penstock.plan.grids import COARSER, FINE_ROWS, GPU_ROW_GRID

EXPERT_SLAB = 32
# If more than this share of counts is to be avoided, there is no rule in what the library does.
_MOST_AVOIDED = 0.25
# Where the queries of a chunk may begin and end in a tile.
_EDGES = (1, 7, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300)


@dataclass(frozen=True)
class Tried:
    """The numbers of rows that products are tried with on a kind of device."""

    reference: int  # what all others are compared with
    counts: tuple[int, ...]  # in ascending order
    # A floor that is not among these is not believed: a library that changes its ways at such sizes may do so again
    # beyond.
    floors: tuple[int, ...]
    slabs: tuple[int, ...]  # the preferred one first
    edges: tuple[int, ...]  # of chunks in a tile
    are_all: bool = False  # no other counts are run than those: one that has other bits is avoided


ON_CPU = Tried(
    reference=512,
    counts=(
        *(*range(1, 21), *range(23, 26), *range(31, 34), *range(47, 50), *range(63, 66), 100),
        *(*range(127, 130), 200, 256, 257, 384, 513, 1000, 2048),
    ),
    floors=tuple(range(1, 33)),
    slabs=(128, 256, 64, 512),
    edges=_EDGES,
)
# Where there are too few rows to keep a GPU's multiprocessors busy, libraries share a sum among them: some products
# do up to a few hundred rows, and at some numbers beyond. A pass of a few hundred takes hardly longer than one of a
# single row, and every number on the grid of `RowLaw.padded_rows` is tried (but for those beyond the last).
ON_GPU = Tried(
    reference=2048,
    counts=(
        *range(GPU_ROW_GRID, FINE_ROWS + 1, GPU_ROW_GRID),
        *range(FINE_ROWS + COARSER * GPU_ROW_GRID, 8193, COARSER * GPU_ROW_GRID),
    ),
    floors=tuple(range(GPU_ROW_GRID, 513, GPU_ROW_GRID)),
    slabs=(512, 256, 128, 64),
    edges=(*_EDGES, 511, 512, 513, 700),
    are_all=True,
)


def tried_on(device: torch.device) -> Tried:
    return ON_GPU if device_kind(device).probes_every_count else ON_CPU


def _factors(kernels: Kernels, shape: ProductShape, num_rows: int, random: Random) -> tuple[Weight, Tensor]:
    """A weight of that shape and rows to multiply with it, whose product is zero but for rounding."""
    if not shape.form:
        weight = kernels.pack(random.cancelling(shape.num_out, shape.num_in, 1))
        return weight, random.cancelling(num_rows, shape.num_in, -1)
    assert kernels.quantised is not None
    form = BLOCK_FORMS[shape.form]
    quantised = kernels.quantised.zeros(form, shape.num_out, shape.num_in)
    for outputs in torch.split(torch.arange(shape.num_out), ROWS_TOGETHER):
        blocks = random.cancelling_blocks(len(outputs), shape.num_in // form.block_size, form.block_bytes)
        kernels.quantised.place(quantised, outputs, blocks)
    return quantised, random.cancelling(num_rows, shape.num_in, -1, form.block_size)


def other_counts(
    kernels: Kernels, shape: ProductShape, mlp_widths: tuple[int, ...], tried: Tried, random: Random
) -> set[int]:
    """The numbers of rows that give other bits than the one which all are compared with."""
    weight, x = _factors(kernels, shape, tried.counts[-1], random)
    bias = torch.zeros(shape.num_out, dtype=x.dtype, device=x.device) if shape.bias else None
    stride = kernels.activation_stride if shape.num_in in mlp_widths else 1

    def product(start: int, end: int) -> Tensor:
        rows = x[start:end].repeat(1, stride)[:, : shape.num_in]  # as far apart as those of a pass
        return kernels.linear(rows, weight, bias)

    reference = product(0, tried.reference)
    others: set[int] = set()
    for num_rows in tried.counts:
        for start in {0, max(tried.reference - num_rows, 0) // 2}:
            end = min(start + num_rows, tried.reference)
            if not torch.equal(product(start, start + num_rows)[: end - start], reference[start:end]):
                others.add(num_rows)
    return others


def least_floor(tried: Tried, others: set[int]) -> int | None:
    """The least number of rows from which on all give the same bits, or all but those to be avoided; None where there
    is none to be believed."""
    if not tried.are_all:
        return min((floor for floor in tried.floors if floor > max(others, default=0)), default=None)
    floor = min((floor for floor in tried.floors if floor not in others), default=None)
    if floor is None or tried.counts[-1] in others:
        return None
    num_avoided = sum(count > floor for count in others)
    return floor if _MOST_AVOIDED * len(tried.counts) >= num_avoided else None


def slab_holds(kernels: Kernels, products: tuple[ProductShape, ...], slab: int, random: Random) -> bool:
    """Whether products of exactly `slab` rows give a row the same bits wherever it stands among them."""
    return all(_place_is_free(kernels, shape, slab, random) for shape in products)


def _place_is_free(kernels: Kernels, shape: ProductShape, slab: int, random: Random) -> bool:
    weight, x = _factors(kernels, shape, 2 * slab, random)
    bias = torch.zeros(shape.num_out, dtype=x.dtype, device=x.device) if shape.bias else None
    reference = kernels.linear(x[:slab], weight, bias)
    for start in {start for start in (1, 2, 7, 16, 31, slab // 2, slab - 1) if start < slab}:
        moved = kernels.linear(x[start : start + slab].clone(), weight, bias)
        if not torch.equal(moved[: slab - start], reference[start:]):
            return False
    return True
