"""Attention of a chunk to all that was read before its tile, which needs no mask: cuDNN's, where a GPU has it."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from penstock.cache.tensors import KV
from penstock.kernels.device import device_kind
from penstock.plan.grids import BLOCK_TOKENS, HEADS_AND_PARTS, QUERY_BUCKETS

_HOPPER = (9, 0)

cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention


def attend_past(queries: Tensor, past: KV, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of queries [n, heads, head_dim] to all of a past, in parts: [parts, n or more, heads, head_dim] and
    [parts, heads, n or more], the logarithms of the sums of exponentials."""
    num_rows, num_heads, head_dim = queries.shape
    num_tokens, num_kv_heads = past.keys.shape[:2]
    # How many parts there are must follow from the model and the past alone.
    num_parts = max(HEADS_AND_PARTS // num_heads, 1)
    if num_tokens % (num_parts * BLOCK_TOKENS):
        num_parts = 1
    # cuDNN makes a plan for every number of queries and every length of a past, which takes it tens of milliseconds.
    size = next((size for size in QUERY_BUCKETS if num_rows <= size), -(-num_rows // 512) * 512)
    if size != num_rows:
        padded = queries.new_empty(size, num_heads, head_dim)
        padded[:num_rows] = queries
        queries = padded
    # One view each, since every call on a tensor costs the host as much as a launch.
    part = num_tokens // num_parts
    shape = (num_parts, num_kv_heads, part, head_dim)
    strides = (part * num_kv_heads * head_dim, head_dim, num_kv_heads * head_dim, 1)
    keys, values = past.keys.as_strided(shape, strides), past.values.as_strided(shape, strides)
    queries = queries.as_strided((num_parts, num_heads, size, head_dim), (0, head_dim, queries.stride(0), 1))
    if has_cudnn_attention(queries.device, queries.dtype, head_dim):
        out, lse = cudnn_attention(queries, keys, values, None, True, 0.0, False, False, scale=scale)[:2]
    else:
        out, lse = _attend_without_cudnn(queries, keys, values, scale)
    return out.transpose(1, 2), lse.view(num_parts, num_heads, -1)


def _attend_without_cudnn(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """By torch's own kernel. All are [parts, heads or fewer, tokens, head_dim]."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_efficient_attention(
        queries, keys, values, None, True, 0.0, False, scale=scale
    )[:2]
    return found


def prepare_past(num_rows: int, num_heads: int, kv: KV, scale: float, tile_size: int) -> Iterator[None]:
    """Have cuDNN make its plans for so many queries and each past of whole tiles in `kv`, one at each step."""
    num_tokens, _, head_dim = kv.keys.shape
    if not has_cudnn_attention(kv.keys.device, kv.keys.dtype, head_dim):
        return
    queries = kv.keys.new_zeros(num_rows, num_heads, head_dim)
    for past in range(tile_size, num_tokens, tile_size):
        attend_past(queries, kv.first(past), scale)
        yield


@cache
def has_cudnn_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """cuDNN has none in float32, and large heads on Hopper alone."""
    if dtype == torch.float32:
        return False
    capability = device_kind(device).capability or _HOPPER
    return capability[0] >= 8 and (head_dim <= 128 or capability == _HOPPER)
