"""Multi-head latent attention: what is cached of a token is a latent, which serves all heads as key and as value."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.spans import Scoring
from penstock.layers.forward_batch import ForwardPass
from penstock.layers.linear import Linear
from penstock.plan.model import LatentConfig


@dataclass(frozen=True)
class LatentAttention:
    """One layer. A head's key would be its weight times the latent; its query is multiplied with that weight instead,
    so that all heads' queries see the latents themselves, as those of one KV head."""

    index: int  # among the decoder's attention layers
    num_heads: int
    sizes: LatentConfig
    inputs: Linear  # [queries or their latent | latent | rotated part of the key, hidden]
    queries: Linear | None  # [heads * (key_dim + rotary_dim), query_rank]
    query_norm: Tensor | None  # [query_rank]
    latent_norm: Tensor  # [rank]
    of_keys: Tensor  # [heads, key_dim, rank]
    of_values: Tensor  # [heads, rank, value_dim]
    out: Linear  # [hidden, heads * value_dim]
    scoring: Scoring
    query_scale: int = 0  # where queries grow with their position: by which of the rotary tables

    def products(self) -> tuple[Linear, ...]:
        return (self.inputs, *((self.queries,) if self.queries else ()), self.out)

    def read_in(self, x: Tensor, step: ForwardPass) -> tuple[Tensor, ...]:
        """Write the latents of x [rows, hidden] into the cache. Returns queries [rows, heads, rank + rotary_dim]."""
        sizes, kernels = self.sizes, step.kernels
        cos, sin = step.rotary[0]
        projected = self.inputs(x, step)
        query, latent, rotated = torch.split(
            projected,
            [projected.shape[1] - sizes.rank - sizes.rotary_dim, sizes.rank, sizes.rotary_dim],
            dim=1,
        )
        latent = kernels.rms_norm(latent.contiguous(), self.latent_norm, sizes.norm_eps)
        keys = torch.cat((latent, kernels.rotate(rotated[:, None], cos, sin)[:, 0]), dim=1)[:, None]
        places = step.batch.places
        kv = step.caches.layer(0, self.index)
        kv.write(places.ranges, keys[: places.num_tokens], keys[: places.num_tokens])
        if self.queries is not None and self.query_norm is not None:
            query = kernels.rms_norm(query.contiguous(), self.query_norm, sizes.norm_eps)
            query = self.queries(query, step)
        heads = query.view(len(query), self.num_heads, -1)
        own = kernels.per_head(
            heads[..., : sizes.key_dim], self.of_keys, is_canonical=step.batch.is_canonical
        )
        queries = torch.cat((own, kernels.rotate(heads[..., sizes.key_dim :], cos, sin)), dim=-1)
        if self.query_scale:
            queries.mul_(step.rotary[self.query_scale][0][:, :, None])
        return (queries,)

    def mix(self, rows: tuple[Tensor, ...], step: ForwardPass, *, is_last: bool = False) -> Tensor:
        """What `read_in` gave, or the rows of it whose logits are wanted, to the block's output [rows, hidden];
        padding rows attend to nothing."""
        work = step.batch.last_layer if is_last else step.batch.all_layers
        attended = step.kernels.attend(rows[0], work, step.caches.layer(0, self.index), self.scoring)
        latents = attended.view(len(attended), self.num_heads, -1)[..., : self.sizes.rank]
        values = step.kernels.per_head(latents, self.of_values, is_canonical=step.batch.is_canonical)
        return self.out(values.flatten(1), step)
