"""A mixture of experts: each token goes through a few of many feed-forward blocks, and through a shared one."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.interface import Kernels
from penstock.kernels.quantised import Weight
from penstock.layers.forward_batch import ForwardBatch
from penstock.layers.mlp import GatedMLP


@dataclass(frozen=True)
class ExpertMLP:
    """Tokens are grouped by expert; a group is one product, padded like the batch."""

    router_weight: (
        Weight  # [experts, or experts + lanes with the shared expert's gate first among them, hidden]
    )
    experts: tuple[GatedMLP, ...]
    shared: GatedMLP | None
    num_active: int
    is_normalised: bool

    def __call__(self, x: Tensor, num_rows: int, batch: ForwardBatch, kernels: Kernels) -> Tensor:
        """x [rows, hidden], of which the first `num_rows` are tokens and the others padding, whose output is zero but
        for the shared expert's."""
        num_experts = len(self.experts)
        scores = kernels.linear(x, self.router_weight, is_canonical=batch.is_canonical).float()
        chances = torch.softmax(scores[:num_rows, :num_experts].contiguous(), dim=-1)
        weights, chosen = torch.topk(chances, self.num_active, dim=-1)  # [n, active]
        if self.is_normalised:
            weights /= weights.sum(dim=-1, keepdim=True)
        # A token's outputs are summed in the order of its experts, which no other token can change.
        order = chosen.flatten().argsort(stable=True)
        weights = weights.flatten()[order]
        tokens = order // self.num_active
        counts = torch.bincount(chosen.flatten(), minlength=num_experts).tolist()
        total = x.new_zeros(x.shape, dtype=torch.float32)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if not count:
                continue
            group = slice(start, start + count)
            out = _feed(expert, x[tokens[group]], batch, kernels)
            total.index_add_(0, tokens[group], out * weights[group, None])
            start += count
        if self.shared is not None:
            gate = kernels.sigmoid(scores[:, num_experts:])[:, :1]
            total.addcmul_(self.shared.feed(x, batch, kernels), gate)
        return total.to(x.dtype)


def _feed(expert: GatedMLP, x: Tensor, batch: ForwardBatch, kernels: Kernels) -> Tensor:
    """One expert's tokens. How many they are depends on the chunk, and must not matter to any of them."""
    if not batch.is_canonical:
        return expert.feed(x, batch, kernels)
    law = kernels.law
    slab = law.expert_slab or law.row_slab
    num_rows = law.padded_expert_rows(x.shape[0])
    padded = pad(x, (0, 0, 0, num_rows - x.shape[0]))
    fed = [expert.feed(part, batch, kernels) for part in torch.split(padded, slab or num_rows)]
    return (torch.cat(fed) if len(fed) > 1 else fed[0])[: x.shape[0]]
