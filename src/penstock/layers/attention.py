"""Grouped-query attention over the cache: keys and values are written first, then queries attend to the cache."""

import math
from dataclasses import dataclass

from torch import Tensor

from penstock.cache.kv import KVCache
from penstock.cache.tensors import CacheTensors
from penstock.kernels.protocol import Kernels
from penstock.layers.batch import AttentionWork, DecodeRow, ForwardBatch


@dataclass(frozen=True)
class Attention:
    """One layer's attention. The projections are one product; heads lie as queries, keys, values, and gates of the
    output where the model has them."""

    index: int  # among the model's attention layers
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_weight: (
        Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden], with gates [(2 * heads + 2 * kv_heads) * ...]
    )
    qkv_bias: Tensor | None
    out_weight: Tensor  # [hidden, heads * head_dim]
    out_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    is_gated: bool = False

    def take_in(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        caches: CacheTensors,
        kernels: Kernels,
    ) -> tuple[Tensor, ...]:
        """Write the keys and values of x [rows, hidden] into the cache. Returns queries [rows, heads, head_dim], and
        gates of the same shape where there are any."""
        qkv = kernels.linear(x, self.qkv_weight, self.qkv_bias).view(x.shape[0], -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        values_end = num_rotated + self.num_kv_heads
        if self.query_norm is not None and self.key_norm is not None:
            queries = kernels.rms_norm(qkv[:, : self.num_heads], self.query_norm, self.norm_eps)
            keys = kernels.rms_norm(qkv[:, self.num_heads : num_rotated], self.key_norm, self.norm_eps)
            queries, keys = kernels.rotate(queries, cos, sin), kernels.rotate(keys, cos, sin)
        else:
            rotated = kernels.rotate(qkv[:, :num_rotated], cos, sin)
            queries, keys = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        num_tokens = batch.num_tokens
        values = qkv[:num_tokens, num_rotated:values_end]
        caches.kv.write(self.index, batch.places, keys[:num_tokens], values)
        return (queries, qkv[:, values_end:]) if self.is_gated else (queries,)

    def give_out(
        self, rows: tuple[Tensor, ...], work: AttentionWork, caches: CacheTensors, kernels: Kernels
    ) -> Tensor:
        """What `take_in` gave, or some rows of it, to the block's output [rows, hidden]; padding rows attend to
        nothing."""
        attended = self._attend(rows[0], work, caches.kv, kernels)
        if self.is_gated:
            attended.mul_(kernels.sigmoid(rows[1].flatten(1)))
        return kernels.linear(attended, self.out_weight, self.out_bias)

    def _attend(self, queries: Tensor, work: AttentionWork, cache: KVCache, kernels: Kernels) -> Tensor:
        """Queries [rows, heads, head_dim] to what they attend to, [rows, heads * head_dim]."""
        if not work.tiles and len(work.decodes) == 1 == len(queries):
            return self._attend_decode(queries[0], work.decodes[0], cache, kernels).reshape(1, -1)
        attended = queries.new_empty(queries.shape)
        num_done = 0
        for tile in work.tiles:
            past = cache.read(self.index, tile.past) if tile.past else None
            own = cache.read_padded(self.index, tile.own, tile.tile_size)
            attended[tile.start : tile.end] = kernels.attend_tile(
                queries[tile.start : tile.end], tile.offset, past, own, self._scale
            )
            num_done = tile.end
        for decode in work.decodes:
            attended[decode.row] = self._attend_decode(queries[decode.row], decode, cache, kernels)
            num_done = max(num_done, decode.row + 1)
        attended[num_done:] = 0
        return attended.flatten(1)

    def _attend_decode(self, query: Tensor, decode: DecodeRow, cache: KVCache, kernels: Kernels) -> Tensor:
        pieces = [decode.past] if decode.is_joined else [[place] for place in decode.past]
        return kernels.attend_one(query, [cache.read(self.index, piece) for piece in pieces], self._scale)

    @property
    def _scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)
