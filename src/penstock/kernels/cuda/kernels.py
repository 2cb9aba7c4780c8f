"""Kernels for NVIDIA's GPUs: products by cuBLAS, attention to a long past by cuDNN, the rest in Triton."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import TypeVar

import torch
import triton
from torch import Tensor

from penstock.cache.tensors import KV, LayerStates
from penstock.kernels.cuda import delta, fla
from penstock.kernels.cuda.experts import CudaExperts
from penstock.kernels.cuda.launch import (
    KeptKernel,
    SideStream,
    early,
    num_multiprocessors,
    precision,
    shared_bytes,
)
from penstock.kernels.cuda.launch_sizes import least_rows
from penstock.kernels.cuda.past import attend_past, prepare_past
from penstock.kernels.cuda.quantised import GpuProducts
from penstock.kernels.cuda.work import (
    ChunkWork,
    DecodeWork,
    TileWork,
    device_attention,
    device_places,
    device_states,
)
from penstock.kernels.elementwise import ElementWise
from penstock.kernels.quantised import FLOAT_FORMS, QuantisedWeight, Weight
from penstock.kernels.reference.attention import attend_by_tiles
from penstock.kernels.reference.kernels import TorchKernels
from penstock.kernels.spans import (
    AttentionWork,
    DeltaHeads,
    GroupWork,
    HeadLayout,
    Scoring,
    StateNet,
    StateWork,
    Work,
    WrittenPlaces,
)
from penstock.kernels.triton.attention import (
    decode_attention_kernel,
    join_parts_kernel,
    tile_attention_kernel,
)
from penstock.kernels.triton.rows import (
    add_norm_kernel,
    few_rows_kernel,
    place_heads_kernel,
    silu_and_mul_kernel,
)
from penstock.plan.grids import (
    BLOCK_TOKENS,
    FEED_ROWS,
    GPU_FEW_ROWS,
    GPU_HEAD_ROWS,
    GPU_ROW_GRID,
    GPU_TILE,
    LONG_PAST,
    SPLITS,
    RowLaw,
)
from penstock.plan.step import KernelKind

Group = TypeVar("Group", bound=GroupWork)

_LOG2_E = 1.4426950408889634
# Queries that one program of a tile's attention has. In float32 products are unrolled: compiling larger ones takes a
# minute.
_TILE_ROWS, _TILE_ROWS_FLOAT32 = 64, 16
# Of shorter windows, programs of twice the positions would compute more that is hidden.
_LONG_WINDOW = 512
# Larger heads take twice the threads, and half a block at a time: a program's sums lie in its registers.
_LARGE_HEAD = 256
# More do not lie on a multiprocessor with what they are multiplied with.
_LARGEST_HEAD = 512
# A program has no fewer blocks of a past than these, unless there are no more.
_LEAST_BLOCKS = 2
# The matrix units take no fewer rows.
_LEAST_ROWS = 16
# What a program has of the weight in a product of few rows, and how many such blocks are on their way. Of more than
# these rows it may have half as many outputs, where all programs then run at once.
_FEW_ROWS_OUTPUTS, _FEW_ROWS_BLOCK, _FEW_ROWS_STAGES = 64, 128, 6
_BY_OUTPUTS = 32
_FLOAT32_OUTPUTS, _FLOAT32_BLOCK = 16, 64
_PARTS_TOGETHER = 8
_WIDTH_BLOCK = 1024
_HEADS_TOGETHER = 16


_tile_attention = KeptKernel(tile_attention_kernel)


class CudaKernels(TorchKernels):
    """What is not here is the reference's."""

    name = "cuda"  # and "cuda+fla", where prompts of delta nets run in flash-linear-attention's kernels
    head_rows = GPU_HEAD_ROWS
    few_rows = GPU_FEW_ROWS
    feed_rows = FEED_ROWS
    activation_stride = 2
    can_capture = True
    stacked_experts = CudaExperts
    quantised: GpuProducts

    def __init__(self, tile_size: int = GPU_TILE, row_slab: int = 0) -> None:
        self.law = RowLaw(tile_size, row_slab=row_slab, row_grid=GPU_ROW_GRID)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        self.libraries = f"triton {triton.__version__}, cudnn {cudnn}, cuda {torch.version.cuda}"
        if fla.is_available():
            self.name = "cuda+fla"
            self.libraries += f", fla-core {version('fla-core')}"
        self.quantised = GpuProducts()

    def memory_kind(self, dtype: torch.dtype, head_dim: int) -> KernelKind:
        return "cuda"

    def prepare(self, work: Work, device: torch.device) -> Work:
        return replace(
            _prepared(work, device),
            windows=tuple(_prepared(group, device) for group in work.windows),
            states=device_states(work.states, device),
        )

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def stacks_experts(self, dtype: torch.dtype, activation: ElementWise | None = None) -> bool:
        return True

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, is_canonical: bool = True
    ) -> Tensor:
        if isinstance(weight, QuantisedWeight):
            return self.quantised.linear(x, weight, bias, is_canonical)
        # In float32 the bits of few rows are those of any other few, but not those of many.
        if not is_canonical and x.dtype == torch.float32 and self._has_few(x, weight):
            return _few_rows_product(x, weight, bias)
        return super().linear(x, weight, bias, is_canonical=is_canonical)

    def unpacked_bytes(self, weight: Weight) -> int:
        if not isinstance(weight, QuantisedWeight) or weight.form in FLOAT_FORMS:
            return 0
        return math.prod(weight.shape) * weight.dtype.itemsize

    def linear_parts(
        self,
        x: Tensor,
        parts: Sequence[Weight],
        biases: Sequence[Tensor | None],
        *,
        is_canonical: bool = True,
    ) -> Tensor:
        if len(x) == 1 and not is_canonical and self.quantised.joins(parts):
            return self.quantised.row_of_pair(x, parts, biases)
        return super().linear_parts(x, parts, biases, is_canonical=is_canonical)

    def linear_into(
        self, out: Tensor, x: Tensor, weight: Weight, bias: Tensor | None, *, is_canonical: bool
    ) -> None:
        if isinstance(weight, QuantisedWeight):
            self.quantised.linear(x, weight, bias, is_canonical, out)
        else:
            super().linear_into(out, x, weight, bias, is_canonical=is_canonical)

    def embed(self, token_ids: Tensor, embedding: Weight) -> Tensor:
        if isinstance(embedding, QuantisedWeight):
            return self.quantised.rows(embedding, token_ids, torch.bfloat16)
        return embedding[token_ids]

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == torch.bfloat16 and self._has_few(x, weight):
            return _few_rows_product(x, weight, bias)
        return torch.nn.functional.linear(x, weight, bias)

    def _has_few(self, x: Tensor, weight: Tensor) -> bool:
        return len(x) <= self.few_rows and weight.is_contiguous()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.contiguous()
        rows = x.view(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        _norm(rows, None, None, out, weight, eps)
        return out.view(x.shape)

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor,
        weight: Tensor,
        eps: float,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        delta = delta.contiguous()
        total, out = into or (torch.empty_like(delta), torch.empty_like(delta))
        _norm(x if x.stride(1) == 1 else x.contiguous(), delta, total, out, weight, eps)
        return total, out

    def place_heads(
        self, projected: Tensor, heads: HeadLayout, cos: Tensor, sin: Tensor, kv: KV, places: WrittenPlaces
    ) -> Tensor:
        num_rows, placed = projected.shape[0], device_places(places, projected.device)
        queries = projected.new_empty(num_rows, heads.num_heads, heads.head_dim)
        norm = heads.query_norm
        rotary_dim = cos.shape[1]
        num_rest = heads.head_dim - rotary_dim
        grid = (num_rows, triton.cdiv(heads.num_heads + 2 * heads.num_kv_heads, _HEADS_TOGETHER))
        place_heads_kernel[grid](
            projected,
            queries,
            kv.keys,
            kv.values,
            placed.rows,
            cos,
            sin,
            norm,
            heads.key_norm,
            projected.stride(0),
            placed.num_tokens,
            heads.norm_eps,
            NUM_HEADS=heads.num_heads,
            NUM_KV_HEADS=heads.num_kv_heads,
            HEAD_DIM=heads.head_dim,
            ROTARY_DIM=rotary_dim,
            HAS_NORM=norm is not None,
            IS_NORM_FLOAT32=norm is not None and norm.dtype == torch.float32,
            HEADS=_HEADS_TOGETHER,
            HALF_BLOCK=triton.next_power_of_2(rotary_dim // 2),
            REST_BLOCK=triton.next_power_of_2(num_rest) if num_rest else 0,
            num_warps=4,
            **early(projected.device, num_rows),
        )
        return queries

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        # Written over the gate: the largest tensor of a pass is not joined by half as large a one.
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        grid = (num_rows, triton.cdiv(width, _WIDTH_BLOCK))
        silu_and_mul_kernel[grid](
            gate_up,
            gate_up.stride(0),
            width,
            BLOCK=_WIDTH_BLOCK,
            num_warps=4,
            **early(gate_up.device, num_rows),
        )
        return gate_up[:, :width]

    def elementwise(self, function: ElementWise, x: Tensor) -> Tensor:
        return function(x, out=x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def carry_states(self, projected: Tensor, net: StateNet, work: StateWork, states: LayerStates) -> Tensor:
        if isinstance(net, DeltaHeads):
            return delta.carry_states(projected, net, work, states)
        return super().carry_states(projected, net, work, states)

    def attend(self, queries: Tensor, work: AttentionWork, kv: KV, scoring: Scoring) -> Tensor:
        shape = (*queries.shape[:2], kv.values.shape[2])
        out = torch.empty(shape, dtype=queries.dtype, device=queries.device)
        if queries.shape[2] > _LARGEST_HEAD:
            for span in work.spans:
                attend_by_tiles(queries, span, kv, scoring, out=out)
        else:
            self.attend_into(queries, work, kv, scoring, out)
        if work.end < len(queries):
            out[work.end :] = 0
        return out.flatten(1)

    def attend_into(
        self, queries: Tensor, work: AttentionWork, kv: KV, scoring: Scoring, out: Tensor
    ) -> None:
        """The same into `out` [rows, heads, value_dim], whose rows that see nothing stay as they are."""
        found, side = device_attention(work, queries.device), SideStream(queries.device)
        has_long = any(chunk.tiles[-1].tile_start >= LONG_PAST for chunk in found.chunks)
        try:
            if found.decodes is not None:
                with side.fork(has_long and not scoring.window):
                    self._attend_decodes(queries, found.decodes, kv, scoring, out, is_alone=not found.chunks)
            for chunk in found.chunks:
                self._attend_chunk(queries, chunk, kv, scoring, out, side)
        finally:
            side.join()

    def _attend_chunk(
        self, queries: Tensor, chunk: ChunkWork, kv: KV, scoring: Scoring, out: Tensor, side: SideStream
    ) -> None:
        if not _has_library(queries.shape[2], kv.values.shape[2], scoring.window, scoring.soft_cap):
            # The past is a part of the tile, which begins at the first token.
            first, last = chunk.tiles[0], chunk.tiles[-1]
            rows = slice(first.rows.start, last.rows.stop)
            whole = TileWork(rows, 0, first.first, last.end, chunk.table, chunk.is_contiguous)
            self._attend_tile(queries[rows], whole, None, kv, scoring, out[rows])
            return
        past = chunk.read_past(kv)
        for tile in chunk.tiles:
            own_past = past.first(tile.tile_start) if past is not None and tile.tile_start else None
            # The rest of a tile takes as long as some hundreds of queries would, and leaves most of a GPU idle.
            is_rest = tile is not chunk.tiles[-1] and tile.first > tile.tile_start
            with side.fork(is_rest and tile.tile_start >= LONG_PAST):
                self._attend_tile(queries[tile.rows], tile, own_past, kv, scoring, out[tile.rows])
        side.join()  # before the memory of the past is used again

    def preparations(self, num_rows: int, num_heads: int, kv: KV, scale: float) -> Iterator[None]:
        tile_size = self.law.tile_size
        return prepare_past(min(num_rows, tile_size), num_heads, kv, scale, tile_size)

    def _attend_tile(
        self, queries: Tensor, tile: TileWork, past: KV | None, kv: KV, scoring: Scoring, out: Tensor
    ) -> None:
        num_heads, head_dim = queries.shape[1:]
        value_dim = kv.values.shape[2]
        num_parts, past_out, past_lse = 0, None, None
        past_strides: tuple[int, ...] = (0, 0, 0, 1)
        lse_strides: tuple[int, ...] = (0, 0, 1)
        if past is not None:
            past_out, past_lse = attend_past(queries, past, scoring.scale)
            num_parts, past_strides, lse_strides = len(past_out), past_out.stride(), past_lse.stride()
        num_kv_heads = kv.keys.shape[1]
        sizes = num_heads, num_kv_heads, head_dim, value_dim
        program = _tile_program(queries.device, queries.dtype, *sizes, scoring.window, scoring.soft_cap)
        constants = {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "COLUMNS": triton.next_power_of_2(head_dim),
            "VALUE_DIM": value_dim,
            "VALUE_COLUMNS": triton.next_power_of_2(value_dim),
            "NUM_PARTS": num_parts,
            "IS_CONTIGUOUS": tile.is_contiguous,
            "WINDOW": scoring.window,
            "SOFT_CAP": scoring.soft_cap,
            "HAS_SINKS": scoring.sinks is not None,
            "HEADS": program.heads,
            "POSITIONS": program.positions,
            "TOKENS": program.tokens,
            "BLOCK": BLOCK_TOKENS,
            "PRECISION": precision(queries),
        }
        strides = (queries.stride(0), *past_strides[:3], *lse_strides[:2])
        _tile_attention.launch(
            (queries.device, queries.dtype, strides, *constants.values()),
            (
                num_heads // program.heads,
                triton.cdiv(tile.end, program.positions) - tile.first // program.positions,
                1,
            ),
            (
                queries,
                kv.keys,
                kv.values,
                tile.table,
                past_out,
                past_lse,
                scoring.sinks,
                out,
                tile.first,
                tile.end,
                tile.tile_start,
                _score_scale(scoring),
                *strides,
            ),
            constants,
            num_warps=program.warps,
            num_stages=program.stages,
        )

    def _attend_decodes(
        self, queries: Tensor, work: DecodeWork, kv: KV, scoring: Scoring, out: Tensor, *, is_alone: bool
    ) -> None:
        num_heads, head_dim = queries.shape[1:]
        num_rows, (num_kv_heads, value_dim) = len(work.rows), kv.values.shape[1:]
        part_out = torch.empty(
            num_rows, num_heads, SPLITS, value_dim, dtype=torch.float32, device=queries.device
        )
        part_lse = torch.empty(num_rows, num_heads, SPLITS, dtype=torch.float32, device=queries.device)
        # Programs that would have nothing to do in any row are not launched.
        most_blocks = work.most_blocks
        if scoring.window:
            most_blocks = min(most_blocks, triton.cdiv(scoring.window, BLOCK_TOKENS) + 1)
        num_splits = min(triton.cdiv(most_blocks, _LEAST_BLOCKS), SPLITS)
        is_early = early(queries.device, num_rows) if is_alone else {}
        decode_attention_kernel[(num_rows, num_kv_heads, num_splits)](
            queries,
            work.rows,
            kv.keys,
            kv.values,
            work.tables,
            work.lengths,
            part_out,
            part_lse,
            _score_scale(scoring),
            queries.stride(0),
            work.tables.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            COLUMNS=triton.next_power_of_2(head_dim),
            VALUE_DIM=value_dim,
            VALUE_COLUMNS=triton.next_power_of_2(value_dim),
            SPLITS=SPLITS,
            LEAST_BLOCKS=_LEAST_BLOCKS,
            WINDOW=scoring.window,
            SOFT_CAP=scoring.soft_cap,
            GROUP_ROWS=max(_LEAST_ROWS, triton.next_power_of_2(num_heads // num_kv_heads)),
            BLOCK=BLOCK_TOKENS,
            PRECISION=precision(queries),
            num_warps=4,
            num_stages=_num_stages(queries.device, head_dim * queries.element_size()),
            **is_early,
        )
        join_parts_kernel[(num_rows, num_heads)](
            part_out,
            part_lse,
            work.rows,
            work.lengths,
            scoring.sinks,
            out,
            NUM_HEADS=num_heads,
            VALUE_DIM=value_dim,
            COLUMNS=triton.next_power_of_2(value_dim),
            SPLITS=SPLITS,
            LEAST_BLOCKS=_LEAST_BLOCKS,
            WINDOW=scoring.window,
            HAS_SINKS=scoring.sinks is not None,
            BLOCK=BLOCK_TOKENS,
            TOGETHER=_PARTS_TOGETHER,
            num_warps=1,  # which has all parts of a column in one thread
            **is_early,
        )


def _prepared(work: Group, device: torch.device) -> Group:
    all_layers = device_attention(work.all_layers, device)
    is_alike = work.last_layer is work.all_layers
    last_layer = all_layers if is_alike else device_attention(work.last_layer, device)
    places = device_places(work.places, device)
    return replace(work, places=places, all_layers=all_layers, last_layer=last_layer)


def _score_scale(scoring: Scoring) -> float:
    """What brings dot products to powers of two, or to parts of the cap."""
    return scoring.scale / scoring.soft_cap if scoring.soft_cap else scoring.scale * _LOG2_E


def _few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, (num_out, num_in) = len(x), weight.shape
    size, is_by_rows = least_rows(num_rows), False
    if x.dtype == torch.float32:
        outputs, block = _FLOAT32_OUTPUTS, _FLOAT32_BLOCK
    else:
        outputs, block = _FEW_ROWS_OUTPUTS, _FEW_ROWS_BLOCK
        is_by_rows = num_rows > _BY_OUTPUTS and num_out * 2 <= outputs * num_multiprocessors(x.device)
        outputs = outputs // 2 if is_by_rows else outputs
    bytes_per_stage = (outputs + size) * block * x.element_size()
    out = x.new_empty(num_rows, num_out)
    few_rows_kernel[(triton.cdiv(num_out, outputs),)](
        x,
        weight,
        bias,
        out,
        x.stride(0),
        num_rows,
        num_out,
        num_in,
        HAS_BIAS=bias is not None,
        IS_WHOLE=num_in % block == 0,
        ROWS=size,
        OUTPUTS=outputs,
        BLOCK=block,
        BY_ROWS=is_by_rows,
        PRECISION=precision(x),
        num_warps=4,
        num_stages=max(min(_FEW_ROWS_STAGES, shared_bytes(x.device) // bytes_per_stage), 1),
        **early(x.device, num_rows),
    )
    return out


def _norm(
    x: Tensor, delta: Tensor | None, total: Tensor | None, out: Tensor, weight: Tensor, eps: float
) -> None:
    num_rows, size = x.shape
    block = triton.next_power_of_2(size)
    add_norm_kernel[(num_rows,)](
        x,
        delta,
        total,
        out,
        weight,
        x.stride(0),
        size,
        eps,
        HAS_DELTA=delta is not None,
        IS_WEIGHT_FLOAT32=weight.dtype == torch.float32,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
        **early(x.device, num_rows),
    )


@dataclass(frozen=True)
class TileProgram:
    """What one program of a tile's attention has: heads with keys in common, positions, tokens that it takes at a
    time, warps, and how often so many tokens are on their way."""

    heads: int
    positions: int
    tokens: int
    warps: int
    stages: int


@cache
def _tile_program(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    window: int,
    soft_cap: float,
) -> TileProgram:
    """Which follows from the layer alone: sums of programs of another shape may be rounded in another way."""
    largest, stages = max(head_dim, value_dim), _num_stages(device, head_dim * dtype.itemsize)
    if dtype == torch.float32:
        return TileProgram(1, _TILE_ROWS_FLOAT32, BLOCK_TOKENS, 8 if largest > _LARGE_HEAD else 4, stages)
    if largest > _LARGE_HEAD:
        wide = TileProgram(1, _TILE_ROWS, BLOCK_TOKENS // 2, 8, 2)
        narrow = TileProgram(1, _TILE_ROWS // 2, BLOCK_TOKENS // 2, 8, 1)
    else:
        # Where all of a long past is walked: keys and values are read half as often.
        heads = 2 if num_heads // num_kv_heads % 2 == 0 else 1
        wide = TileProgram(heads, 2 * _TILE_ROWS // heads, BLOCK_TOKENS, 8, stages)
        narrow = TileProgram(1, _TILE_ROWS, BLOCK_TOKENS, 4, stages)
        is_short = heads == 1 and 0 < window < _LONG_WINDOW
        if is_short or _has_library(head_dim, value_dim, window, soft_cap):
            return narrow
    rows = wide.heads * wide.positions
    held = rows * head_dim + wide.stages * wide.tokens * (head_dim + value_dim)
    return wide if held * dtype.itemsize <= shared_bytes(device) else narrow


def _has_library(head_dim: int, value_dim: int, window: int, soft_cap: float) -> bool:
    """For attention to the past."""
    return not window and not soft_cap and head_dim == value_dim <= _LARGE_HEAD


def _num_stages(device: torch.device, bytes_per_token: int) -> int:
    """Blocks of keys and values that a program has on their way: as many as its memory holds, and fewer where heads
    are large, so that a multiprocessor has room for several programs."""
    wanted = 3 if bytes_per_token <= 256 else 2 if bytes_per_token <= 512 else 1
    block_bytes = BLOCK_TOKENS * bytes_per_token
    # Beside the queries, keys and values for each.
    held = (shared_bytes(device) // block_bytes - 1) // 2
    return max(min(wanted, held), 1)
