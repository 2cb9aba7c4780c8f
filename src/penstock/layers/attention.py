"""Grouped-query attention over the cache: keys and values are written first, then queries attend to the cache."""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from penstock.cache.tensors import CacheTensors
from penstock.kernels.interface import HeadLayout, Kernels
from penstock.kernels.quantised import Weight
from penstock.kernels.spans import AttentionWork
from penstock.layers.forward_batch import ForwardBatch
from penstock.layers.fused_weight import FusedWeight, project


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
        FusedWeight  # [(heads + 2 * kv_heads) * head_dim, hidden], with gates [2 * (heads + kv_heads) * ...]
    )
    qkv_bias: Tensor | None
    out_weight: Weight  # [hidden, heads * head_dim]
    out_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    is_gated: bool = False

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @cached_property
    def layout(self) -> HeadLayout:
        return HeadLayout(
            self.num_heads, self.num_kv_heads, self.head_dim, self.query_norm, self.key_norm, self.norm_eps
        )

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
        gates [rows, heads * head_dim] where there are any."""
        projected = project(x, self.qkv_weight, self.qkv_bias, batch, kernels)
        kv = caches.kv.layer(self.index)
        queries = kernels.place_heads(projected, self.layout, cos, sin, kv, batch.places)
        if not self.is_gated:
            return (queries,)
        return (queries, projected[:, -self.num_heads * self.head_dim :])

    def give_out(
        self,
        rows: tuple[Tensor, ...],
        work: AttentionWork,
        batch: ForwardBatch,
        caches: CacheTensors,
        kernels: Kernels,
    ) -> Tensor:
        """What `take_in` gave, or some rows of it, to the block's output [rows, hidden]; padding rows attend to
        nothing."""
        attended = kernels.attend(rows[0], work, caches.kv.layer(self.index), self.scale)
        return self.put_out(attended, rows, batch, kernels)

    def put_out(
        self, attended: Tensor, rows: tuple[Tensor, ...], batch: ForwardBatch, kernels: Kernels
    ) -> Tensor:
        """The same from what the queries attended to [rows, heads * head_dim], which may be written over."""
        if self.is_gated:
            attended.mul_(kernels.sigmoid(rows[1].contiguous()))
        return kernels.linear(attended, self.out_weight, self.out_bias, is_canonical=batch.is_canonical)
