"""The experts of a layer on an NVIDIA GPU: five launches, of shapes that no choice of a router's changes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import triton
from torch import Tensor

from penstock.kernels.cuda import fp8
from penstock.kernels.cuda.launch import precision, shared_bytes
from penstock.kernels.cuda.quantised import operand
from penstock.kernels.elementwise import ElementWise
from penstock.kernels.experts import Router
from penstock.kernels.quantised import FLOAT_FORMS, QuantisedWeight, Weight
from penstock.kernels.triton.experts import expert_kernel, group_kernel, route_kernel, weighted_sum_kernel
from penstock.plan.model import ExpertsConfig

# Rows that a program routes, and blocks of such rows whose counts it adds up at once.
_ROUTED, _COUNTED = 16, 16
_SUMMED = 1024


@dataclass(frozen=True)
class Tile:
    """What one program of a product has."""

    rows: int
    outputs: int
    is_swapped: bool  # outputs come first in the product, of which the matrix units take no fewer than 64
    num_warps: int
    num_stages: int
    block: int = 64  # inputs at a time, which are summed one after the other


@dataclass(frozen=True)
class TilePair:
    """The tiles of both products, of as many rows."""

    inner: Tile  # gate and up: `outputs` of each
    down: Tile


# By the rows that an expert has on average, at most. Few rows take as long as their weights are read.
Tiles = Mapping[float, TilePair]
TILES: Tiles = {
    10: TilePair(Tile(16, 64, True, 4, 4, 128), Tile(16, 128, True, 4, 4, 128)),
    96: TilePair(Tile(64, 128, False, 4, 4), Tile(64, 256, False, 4, 4)),
    math.inf: TilePair(Tile(128, 128, False, 8, 4), Tile(128, 256, False, 8, 4)),
}
# Rows and weights are 8-bit floats, of which a scale may have 128 inputs.
FLOAT8_TILES: Tiles = {
    10: TilePair(Tile(16, 64, True, 4, 4, 128), Tile(16, 128, True, 4, 4, 128)),
    math.inf: TilePair(Tile(64, 128, False, 4, 4, 128), Tile(64, 256, False, 8, 4, 128)),
}
# Weights become bfloat16 in registers, from where the matrix units take what comes first: 8-bit floats for decodes,
CONVERTED_TILES: Tiles = {
    10: TilePair(Tile(16, 64, True, 4, 3, 128), Tile(16, 128, True, 8, 4, 128)),
    math.inf: TilePair(Tile(64, 64, True, 4, 3, 128), Tile(64, 128, True, 4, 3, 128)),
}
# and blocks, a part of a row of them at a time.
BLOCK_TILES: Tiles = {
    10: TilePair(Tile(16, 64, True, 4, 3, 256), Tile(16, 128, True, 4, 3, 256)),
    96: TilePair(Tile(64, 128, True, 4, 2, 256), Tile(64, 128, True, 8, 2, 256)),
    math.inf: TilePair(Tile(64, 128, True, 4, 2, 256), Tile(64, 128, True, 8, 3, 256)),
}
# Products of float32 are unrolled: larger ones take long to compile.
FLOAT32_TILES = TilePair(Tile(16, 32, True, 4, 2, 32), Tile(16, 32, True, 4, 2, 32))


@dataclass(frozen=True)
class Grouping:
    """Where the rows of a pass have their places, sorted by expert."""

    weights: Tensor  # [rows, active], float32
    places: Tensor  # [rows, active], int32
    order: Tensor  # int32, as many: the row of each place
    tiles: Tensor  # [3, tiles], int32: expert, first place, end of the expert's; no expert: there is no such tile


@dataclass(frozen=True)
class CudaExperts:
    """`GroupedExperts`, for any number of rows that is known when they are launched."""

    has_own_law: ClassVar[bool] = True

    router: Router
    gate_up: Weight  # [experts, 2 * width, hidden]; quantised, [experts * 2 * width, hidden]
    down: Weight  # [experts, hidden, width], likewise
    activation: ElementWise | None = None  # None: silu

    @property
    def config(self) -> ExpertsConfig:
        return self.router.config

    @property
    def one(self) -> tuple[Weight, Weight]:
        return self._first(self.gate_up), self._first(self.down)

    def _first(self, weight: Weight) -> Weight:
        if isinstance(weight, Tensor):
            return weight[0]
        height, width = weight.shape
        return replace(weight, shape=(height // self.config.num_experts, width))

    def run(self, x: Tensor, scores: Tensor, shared: Tensor | None, *, is_canonical: bool = True) -> Tensor:
        tiles = self.tiles_for(x, is_canonical)
        grouping = self.group(scores, tiles.inner.rows)
        out = self.feed(x, grouping, tiles, is_canonical)
        return self._summed(out, grouping, shared, scores)

    def tiles_for(self, x: Tensor, is_canonical: bool = True) -> TilePair:
        if x.dtype == torch.float32:
            return FLOAT32_TILES
        mean = x.shape[0] * self.config.num_active / self.config.num_experts
        found = _tiles_of(self.gate_up, is_canonical), _tiles_of(self.down, is_canonical)
        inner, down = (next(pair for most, pair in tiles.items() if mean <= most) for tiles in found)
        # Both have the places that rows were given.
        return TilePair(inner.inner, replace(down.down, rows=inner.inner.rows))

    def group(self, scores: Tensor, tile_rows: int) -> Grouping:
        """Route rows by their scores, and give them places."""
        config, num_rows = self.config, len(scores)
        num_experts, num_active = config.num_experts, config.num_active
        num_places = num_rows * num_active
        num_blocks = triton.cdiv(num_rows, _ROUTED)
        # An expert's last tile may have a single row.
        num_tiles = min(num_places, triton.cdiv(num_places, tile_rows) + num_experts)
        columns = triton.next_power_of_2(num_experts)

        def numbers(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=scores.device)

        chosen, places, order = (numbers(num_rows, num_active) for _ in range(3))
        counts, tiles = numbers(num_blocks, num_experts), numbers(3, num_tiles)
        weights = torch.empty(num_rows, num_active, dtype=torch.float32, device=scores.device)
        route_kernel[(num_blocks,)](
            scores,
            self.router.choice_bias,
            self.router.expert_scales,
            weights,
            chosen,
            counts,
            order,
            places,
            tiles,
            scores.stride(0),
            num_rows,
            num_tiles,
            tile_rows,
            float(config.scale),
            NUM_EXPERTS=num_experts,
            NUM_ACTIVE=num_active,
            NUM_GROUPS=config.num_groups,
            NUM_ACTIVE_GROUPS=config.num_active_groups,
            GROUP_BEST=config.group_best,
            IS_SOFTMAX=config.scores == "softmax",
            IS_NORMALISED=config.normalised,
            COLUMNS=columns,
            SLOTS=triton.next_power_of_2(num_active),
            ROWS=_ROUTED,
            IS_ALONE=num_blocks == 1,
            num_warps=4,
        )
        if num_blocks > 1:
            group_kernel[(num_blocks,)](
                chosen,
                counts,
                order,
                places,
                tiles,
                num_rows,
                num_blocks,
                num_tiles,
                tile_rows,
                NUM_EXPERTS=num_experts,
                NUM_ACTIVE=num_active,
                COLUMNS=columns,
                ROWS=_ROUTED,
                TOGETHER=_COUNTED,
                num_warps=4,
            )
        return Grouping(weights, places, order, tiles)

    def feed(self, x: Tensor, grouping: Grouping, tiles: TilePair, is_canonical: bool = True) -> Tensor:
        """Each place's row through the place's expert: [places, hidden]."""
        hidden, width = x.shape[1], self.down.shape[-1]
        is_silu = self.activation is None
        num_inner = width if is_silu else 2 * width
        rows = _rows(x, self.gate_up, is_canonical)
        inner = _product(rows, self.gate_up, grouping, grouping.order, tiles.inner, num_inner, is_silu)
        if self.activation is not None:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.activation(gate, out=gate).mul_(up)
        rows = _rows(inner, self.down, is_canonical)
        del inner  # no name holds it beside what comes of it
        return _product(rows, self.down, grouping, None, tiles.down, hidden, False)

    def _summed(self, out: Tensor, grouping: Grouping, shared: Tensor | None, scores: Tensor) -> Tensor:
        (num_rows, num_active), size = grouping.weights.shape, out.shape[1]
        total = out.new_empty(num_rows, size)
        is_gated = shared is not None and self.config.shared_gate
        weighted_sum_kernel[(num_rows, triton.cdiv(size, _SUMMED))](
            out,
            grouping.weights,
            grouping.places,
            shared,
            scores,
            total,
            0 if shared is None else shared.stride(0),
            scores.stride(0),
            size,
            GATE=self.config.num_experts if is_gated else 0,
            NUM_ACTIVE=num_active,
            BLOCK=_SUMMED,
            num_warps=4,
        )
        return total


@dataclass(frozen=True)
class _Rows:
    """What a product takes: rows [rows, in], and where they are 8-bit floats what they are multiples of, as
    `fp8.scale_rows` has them."""

    values: Tensor
    scales: Tensor | None = None


def _tiles_of(weight: Weight, is_canonical: bool) -> Tiles:
    if isinstance(weight, Tensor):
        return TILES
    if weight.form not in FLOAT_FORMS:
        return BLOCK_TILES
    return FLOAT8_TILES if is_canonical else CONVERTED_TILES


def _takes_float8(weight: Weight, is_canonical: bool) -> bool:
    """Whether rows become 8-bit floats for a product: as those of a chunk do, however few they are."""
    return isinstance(weight, QuantisedWeight) and weight.form in FLOAT_FORMS and is_canonical


def _rows(x: Tensor, weight: Weight, is_canonical: bool) -> _Rows:
    if isinstance(weight, QuantisedWeight) and _takes_float8(weight, is_canonical):
        return _Rows(*fp8.scale_rows_for(x, weight))
    return _Rows(x)


def _product(
    rows: _Rows,
    weight: Weight,
    grouping: Grouping,
    order: Tensor | None,
    tile: Tile,
    num_out: int,
    is_gated: bool,
) -> Tensor:
    x, found = rows.values, operand(weight)
    dtype = x.dtype if rows.scales is None else torch.bfloat16
    out = torch.empty(grouping.order.numel(), num_out, dtype=dtype, device=x.device)
    num_tiles = grouping.tiles.shape[1]
    expert_kernel[(num_tiles * triton.cdiv(num_out, tile.outputs),)](
        x,
        rows.scales,
        *found.tensors,
        order,
        grouping.tiles,
        out,
        x.stride(0),
        0 if rows.scales is None else rows.scales.stride(1),
        num_tiles,
        NUM_IN=weight.shape[-1],
        NUM_OUT=num_out,
        IS_GATED=is_gated,
        **found.constants,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        BLOCK=tile.block,
        IS_SWAPPED=tile.is_swapped,
        PRECISION=precision(x),
        num_warps=tile.num_warps,
        num_stages=_num_stages(tile, is_gated, x, weight),
    )
    return out


def _num_stages(tile: Tile, is_gated: bool, x: Tensor, weight: Weight) -> int:
    """Blocks that are on their way at a time, no more than a multiprocessor holds."""
    weight_bytes = weight.element_size() if isinstance(weight, Tensor) else 1
    num_bytes = tile.rows * x.element_size() + (2 if is_gated else 1) * tile.outputs * weight_bytes
    return max(min(tile.num_stages, shared_bytes(x.device) // (num_bytes * tile.block)), 1)
