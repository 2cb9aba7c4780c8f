"""Kernels for NVIDIA's GPUs: products by cuBLAS, attention to a long past by cuDNN, the rest in Triton."""

import torch
import triton
from torch import Tensor

from penstock.cache.kv import KV
from penstock.kernels.cuda_work import DecodeWork, TileWork, device_places, device_work
from penstock.kernels.protocol import HeadLayout
from penstock.kernels.spans import AttentionWork, WrittenPlaces
from penstock.kernels.torch_kernels import TorchKernels
from penstock.kernels.triton_attention import (
    BLOCK_TOKENS,
    decode_attention_kernel,
    join_parts_kernel,
    tile_attention_kernel,
)
from penstock.kernels.triton_rows import add_norm_kernel, place_heads_kernel, silu_and_mul_kernel

TILE = 1024
_LOG2_E = 1.4426950408889634
# Positions that one program of a tile's attention has.
_TILE_ROWS = 128
# A row's past is shared among so many programs, whatever its length: where it is cut must not depend on others.
_SPLITS = 32
# The matrix units take no fewer rows.
_LEAST_ROWS = 16
# cuDNN makes a plan for every number of queries that it meets: they are rounded up to few.
_QUERY_BUCKETS = (64, 128, 256, 512)
_WIDTH_BLOCK = 1024
_HEADS_TOGETHER = 16

cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention


class CudaKernels(TorchKernels):
    """What is not here is the reference's."""

    name = "cuda"

    def __init__(self, tile_size: int = TILE, row_slab: int = 0) -> None:
        super().__init__(tile_size, row_slab)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.contiguous()
        rows = x.view(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        _norm(rows, None, None, out, weight, eps)
        return out.view(x.shape)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        delta = delta.contiguous()
        total, out = torch.empty_like(delta), torch.empty_like(delta)
        _norm(x if x.stride(1) == 1 else x.contiguous(), delta, total, out, weight, eps)
        return total, out

    def place_heads(
        self, projected: Tensor, heads: HeadLayout, cos: Tensor, sin: Tensor, kv: KV, places: WrittenPlaces
    ) -> Tensor:
        num_rows = projected.shape[0]
        queries = projected.new_empty(num_rows, heads.num_heads, heads.head_dim)
        norm = heads.query_norm
        grid = (num_rows, triton.cdiv(heads.num_heads + 2 * heads.num_kv_heads, _HEADS_TOGETHER))
        place_heads_kernel[grid](
            projected,
            queries,
            kv.keys,
            kv.values,
            device_places(places, projected.device),
            cos,
            sin,
            norm,
            heads.key_norm,
            projected.stride(0),
            places.num_tokens,
            heads.norm_eps,
            NUM_HEADS=heads.num_heads,
            NUM_KV_HEADS=heads.num_kv_heads,
            HEAD_DIM=heads.head_dim,
            ROTARY_DIM=cos.shape[1],
            HAS_NORM=norm is not None,
            IS_NORM_FLOAT32=norm is not None and norm.dtype == torch.float32,
            HEADS=_HEADS_TOGETHER,
            BLOCK=triton.next_power_of_2(heads.head_dim),
            num_warps=4,
        )
        return queries

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, width)
        grid = (num_rows, triton.cdiv(width, _WIDTH_BLOCK))
        silu_and_mul_kernel[grid](gate_up, out, gate_up.stride(0), width, BLOCK=_WIDTH_BLOCK, num_warps=4)
        return out

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def attend(self, queries: Tensor, work: AttentionWork, kv: KV, scale: float) -> Tensor:
        found = device_work(work, queries.device)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for tile in found.tiles:
            self._attend_tile(queries[tile.rows], tile, kv, scale, out[tile.rows])
        if found.decodes is not None:
            self._attend_decodes(queries, found.decodes, kv, scale, out)
        if work.end < len(queries):
            out[work.end :] = 0
        return out.flatten(1)

    def _attend_tile(self, queries: Tensor, tile: TileWork, kv: KV, scale: float, out: Tensor) -> None:
        num_rows, num_heads, head_dim = queries.shape
        past_out = past_lse = None
        if tile.past:
            past_out, past_lse = attend_past(queries, kv.read(tile.past), scale)
        grid = (triton.cdiv(tile.end, _TILE_ROWS) - tile.first // _TILE_ROWS, num_heads)
        tile_attention_kernel[grid](
            queries,
            kv.keys,
            kv.values,
            tile.table,
            past_out,
            past_lse,
            out,
            tile.first,
            tile.end,
            tile.tile_start,
            scale * _LOG2_E,
            queries.stride(0),
            0 if past_out is None else past_out.stride(0),
            0 if past_lse is None else past_lse.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=kv.keys.shape[1],
            HEAD_DIM=head_dim,
            HAS_PAST=past_out is not None,
            IS_CONTIGUOUS=tile.is_contiguous,
            ROWS=_TILE_ROWS,
            BLOCK=BLOCK_TOKENS,
            PRECISION=_precision(queries),
            num_warps=8,
            num_stages=3,
        )

    def _attend_decodes(
        self, queries: Tensor, work: DecodeWork, kv: KV, scale: float, out: Tensor
    ) -> None:
        num_heads, head_dim = queries.shape[1:]
        num_rows, num_kv_heads = len(work.rows), kv.keys.shape[1]
        part_out = torch.empty(num_rows, num_heads, _SPLITS, head_dim, dtype=torch.float32, device=queries.device)
        part_lse = torch.empty(num_rows, num_heads, _SPLITS, dtype=torch.float32, device=queries.device)
        decode_attention_kernel[(num_rows, num_kv_heads, _SPLITS)](
            queries,
            work.rows,
            kv.keys,
            kv.values,
            work.tables,
            work.lengths,
            part_out,
            part_lse,
            scale * _LOG2_E,
            queries.stride(0),
            work.tables.stride(0),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            SPLITS=_SPLITS,
            GROUP_ROWS=max(_LEAST_ROWS, triton.next_power_of_2(num_heads // num_kv_heads)),
            BLOCK=BLOCK_TOKENS,
            PRECISION=_precision(queries),
            num_warps=4,
            num_stages=3,
        )
        join_parts_kernel[(num_rows, num_heads)](
            part_out, part_lse, work.rows, out, NUM_HEADS=num_heads, HEAD_DIM=head_dim, SPLITS=_SPLITS, num_warps=4
        )


def attend_past(queries: Tensor, past: KV, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of queries [n, heads, head_dim] to all of a past: [n, heads, head_dim] and, [heads, n or more], the
    logarithms of the sums of exponentials."""
    num_rows = queries.shape[0]
    size = next((size for size in _QUERY_BUCKETS if num_rows <= size), -(-num_rows // 512) * 512)
    if size != num_rows:
        padded = queries.new_zeros(size, *queries.shape[1:])
        padded[:num_rows] = queries
        queries = padded
    if queries.dtype == torch.float32:
        return _attend_past_float32(queries, past, scale)
    found = cudnn_attention(
        queries.transpose(0, 1)[None],
        past.keys.transpose(0, 1)[None],
        past.values.transpose(0, 1)[None],
        None,
        True,
        0.0,
        False,
        False,
        scale=scale,
    )
    return found[0][0].transpose(0, 1)[:num_rows], found[1].view(queries.shape[1], size)


def _attend_past_float32(queries: Tensor, past: KV, scale: float) -> tuple[Tensor, Tensor]:
    group = queries.shape[1] // past.keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1).transpose(0, 1)[None] for part in (past.keys, past.values))
    found = torch.ops.aten._scaled_dot_product_efficient_attention(
        queries.transpose(0, 1)[None], keys, values, None, True, 0.0, False, scale=scale
    )
    return found[0][0].transpose(0, 1), found[1][0]


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
    )


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
