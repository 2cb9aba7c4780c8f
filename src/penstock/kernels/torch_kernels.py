"""The reference kernels, in plain torch. What they promise about bits is measured by `penstock.kernels.probe`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.cache.kv import KV
from penstock.kernels.shares import even_shares

# A query keeps its bits as long as it keeps its place modulo this many rows of the attention kernel's input.
QUERY_GRID = 64

# Rows of the own tile's piece, for queries that end before the tile does. A shorter square gives the same bits as the
# whole one at these sizes only (at 192 of 256 the library's products take another path).
PREFIX_SIZES = (64, 128)

# The number of rows that packed weights are laid out for.
_PACKED_FOR_ROWS = 512

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class TorchKernels:
    """Kernels for the CPU."""

    name = "torch"

    def __init__(self, tile_size: int = 256) -> None:
        self.tile_size = tile_size

    def pack(self, weight: Tensor) -> Tensor:
        # oneDNN's own layout, which it would otherwise make anew in every product: a single row takes half the
        # time, and fewer rows are enough for row-invariance than with the default float32 library.
        if not _can_pack(weight.dtype):
            return weight
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        return packed

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not weight.is_mkldnn:
            return torch.nn.functional.linear(x, weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # The two halves of a head are the pairs' first and second parts. `sin` is negative in its first half, so
        # that a rotation is two products and a sum, which round alike in vector and scalar code.
        half = cos.shape[-1] // 2
        swapped = torch.cat((x[..., half : 2 * half], x[..., :half]), dim=-1)
        rotated = x[..., : 2 * half] * cos[:, None]
        rotated += swapped.mul_(sin[:, None])
        if 2 * half == x.shape[-1]:
            return rotated
        return torch.cat((rotated, x[..., 2 * half :]), dim=-1)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for rows in even_shares(*gate.shape, torch.get_num_threads()):
            torch.ops.aten.silu.out(gate[rows], out=activated[rows])
        return activated.mul_(up)

    def attend_tile(self, queries: Tensor, offset: int, past: KV | None, own: KV, scale: float) -> Tensor:
        num_queries, num_heads, head_dim = queries.shape
        rows = slice(offset, offset + num_queries)
        tile_size = own.keys.shape[0]
        size = min((size for size in PREFIX_SIZES if rows.stop <= size), default=tile_size)
        size = min(size, tile_size)
        if num_queries < size:
            tile = queries.new_zeros(size, num_heads, head_dim)
            tile[rows] = queries
        else:
            tile = queries
        own = KV(own.keys[:size], own.values[:size])
        own_out, own_lse = _flash(tile, own, scale, causal=True)  # [S, H, D], [H, S]
        if past is None:
            return own_out[rows]

        # The past needs only the rows at hand, out to the grid.
        start = offset // QUERY_GRID * QUERY_GRID
        end = min(-(-rows.stop // QUERY_GRID) * QUERY_GRID, size)
        past_out, past_lse = _flash_grouped(tile[start:end], past, scale)  # [R, H, D], [H, R]
        # The weights are computed on the tile's full shape: a vectorised exponential and its scalar tail differ
        # in the last bit, so where a row stands among them must not depend on the chunk.
        difference = own_lse.new_zeros(num_heads, tile_size)
        difference[:, start:end] = past_lse - own_lse[:, start:end]
        past_weight = torch.sigmoid(difference).t()[rows, :, None]  # [n, H, 1]
        inner = slice(offset - start, offset - start + num_queries)
        merged = torch.empty_like(queries, memory_format=torch.contiguous_format)
        return torch.add(own_out[rows] * (1.0 - past_weight), past_out[inner].mul(past_weight), out=merged)

    def attend_one(self, query: Tensor, past: Sequence[KV], scale: float) -> Tensor:
        if len(past) == 1:
            return _flash_grouped(query[None], past[0], scale)[0][0]
        parts = [_flash_grouped(query[None], piece, scale) for piece in past]
        weights = torch.softmax(torch.stack([lse for _, lse in parts]), dim=0)  # [pieces, H, 1]
        outs = torch.stack([out[0] for out, _ in parts])  # [pieces, H, D]
        return (outs * weights).sum(dim=0).to(query.dtype)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _flash(queries: Tensor, kv: KV, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Queries [R, H, D] to output [R, H, D] and log-sum-exp [H, R]."""
    out, lse = flash_attention(
        queries.transpose(0, 1)[None],
        kv.keys.transpose(0, 1)[None],
        kv.values.transpose(0, 1)[None],
        0.0,
        causal,
        scale=scale,
    )
    return out[0].transpose(0, 1), lse[0]


def _flash_grouped(queries: Tensor, kv: KV, scale: float) -> tuple[Tensor, Tensor]:
    """Unmasked attention with the queries of a group of heads stacked as rows: keys are read once a group, and
    the kernel works on larger blocks. Same bits as head by head, a tenth less time for chunks and a fifth of it
    for a single bfloat16 query."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = kv.keys.shape[1]
    group = num_heads // num_kv_heads
    stacked = queries.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    out, lse = flash_attention(
        stacked.reshape(1, num_kv_heads, group * num_rows, head_dim),
        kv.keys.transpose(0, 1)[None],
        kv.values.transpose(0, 1)[None],
        0.0,
        False,
        scale=scale,
    )
    out = out.view(num_kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3)
    return out.reshape(num_rows, num_heads, head_dim), lse.reshape(num_heads, num_rows)
