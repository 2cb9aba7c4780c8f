"""Grouped-query attention over the cache: keys and values are written first, then queries attend to the cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.spans import HeadLayout, Scoring
from penstock.layers.forward_batch import ForwardPass
from penstock.layers.linear import Linear


@dataclass(frozen=True)
class Attention:
    """One layer's attention. The projections are one product; heads lie as queries, keys, values, and gates of the
    output where the model has them."""

    index: int  # among the decoder's attention layers of its K/V group
    heads: HeadLayout
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden], with gates [2 * (heads + kv_heads) * ...]
    out: Linear  # [hidden, heads * head_dim]
    scoring: Scoring
    is_gated: bool = False
    group: int = 0  # of the K/V groups of the cache
    rotary: int = 0  # among the model's
    query_scale: int = 0  # where queries grow with their position: by which of the rotary tables
    # Norms of queries and keys that `HeadLayout` has not: of all heads together, or of each after its rotation.
    norms: tuple[Tensor, Tensor] | None = None
    is_normed_late: bool = False
    value_norm: Tensor | None = None  # [head_dim]

    def products(self) -> tuple[Linear, ...]:
        return self.qkv, self.out

    def read_in(self, x: Tensor, step: ForwardPass) -> tuple[Tensor, ...]:
        """Write the keys and values of x [rows, hidden] into the cache. Returns queries [rows, heads, head_dim], and
        gates [rows, heads * head_dim] where there are any."""
        projected = self.qkv(x, step)
        cos, sin = step.rotary[self.rotary]
        if self.norms is not None:
            self._norm(projected, cos, sin, step)
            if self.is_normed_late:  # and rotated
                cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        if self.value_norm is not None:
            start = (self.heads.num_heads + self.heads.num_kv_heads) * self.heads.head_dim
            values = projected[:, start : start + self.heads.num_kv_heads * self.heads.head_dim]
            by_head = values.reshape(len(values), -1, self.heads.head_dim)
            values.copy_(step.kernels.rms_norm(by_head, self.value_norm, self.heads.norm_eps).flatten(1))
        kv = step.caches.layer(self.group, self.index)
        queries = step.kernels.place_heads(
            projected, self.heads, cos, sin, kv, step.batch.group(self.group).places
        )
        if self.query_scale:
            queries.mul_(step.rotary[self.query_scale][0][:, :, None])
        if not self.is_gated:
            return (queries,)
        return (queries, projected[:, -self.heads.num_heads * self.heads.head_dim :])

    def _norm(self, projected: Tensor, cos: Tensor, sin: Tensor, step: ForwardPass) -> None:
        """Write normed queries and keys over the projections [rows, queries | keys | ...]."""
        assert self.norms is not None
        heads, start = self.heads, 0
        for norm, num_heads in zip(self.norms, (heads.num_heads, heads.num_kv_heads), strict=True):
            end = start + num_heads * heads.head_dim
            part = projected[:, start:end].view(len(projected), -1, len(norm))
            if self.is_normed_late:
                part = step.kernels.rotate(part, cos, sin)
            projected[:, start:end] = step.kernels.rms_norm(part, norm, heads.norm_eps).flatten(1)
            start = end

    def mix(self, rows: tuple[Tensor, ...], step: ForwardPass, *, is_last: bool = False) -> Tensor:
        """What `read_in` gave, or the rows of it whose logits are wanted, to the block's output [rows, hidden];
        padding rows attend to nothing."""
        own = step.batch.group(self.group)
        work = own.last_layer if is_last else own.all_layers
        attended = step.kernels.attend(rows[0], work, step.caches.layer(self.group, self.index), self.scoring)
        return self.project_out(attended, rows, step)

    def project_out(self, attended: Tensor, rows: tuple[Tensor, ...], step: ForwardPass) -> Tensor:
        """The same from what the queries attended to [rows, heads * head_dim], which may be written over."""
        if self.is_gated:
            attended.mul_(step.kernels.sigmoid(rows[1].contiguous()))
        return self.out(attended, step)
