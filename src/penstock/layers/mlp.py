"""Feed-forward blocks: a gated one, and a mixture of such experts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.layers.forward_batch import ForwardPass
from penstock.layers.linear import Linear


@dataclass(frozen=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up as one product."""

    is_dense: ClassVar[bool] = True  # every row goes through the same products

    gate_up: Linear  # [2 * width, hidden]
    down: Linear  # [hidden, width]

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.down.shape[1],)

    def products(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def expert_products(self) -> tuple[Linear, ...]:
        """Products whose number of rows depends on where a router sends tokens."""
        return ()

    def __call__(self, x: Tensor, step: ForwardPass, num_rows: int | None = None) -> Tensor:
        """x [rows, hidden] to the block's output; padding after `num_rows` rows is run like any other row."""
        return self.down(step.kernels.silu_and_mul(self.gate_up(x, step)), step)


@dataclass(frozen=True)
class ExpertMLP:
    """Each token goes through a few of many blocks, and through a shared one. Tokens are grouped by expert: a group
    is one product, padded like the batch."""

    is_dense: ClassVar[bool] = False

    router: Linear  # [experts, or experts + lanes with the shared expert's gate first among them, hidden]
    experts: tuple[GatedMLP, ...]
    shared: GatedMLP | None
    num_active: int
    is_normalised: bool

    @property
    def widths(self) -> tuple[int, ...]:
        return self.experts[0].widths + (self.shared.widths if self.shared else ())

    def products(self) -> tuple[Linear, ...]:
        return (self.router, *(self.shared.products() if self.shared else ()))

    def expert_products(self) -> tuple[Linear, ...]:
        """Those of one expert, whose shapes all experts have."""
        return self.experts[0].products()

    def __call__(self, x: Tensor, step: ForwardPass, num_rows: int | None = None) -> Tensor:
        """x [rows, hidden], of which the first `num_rows` are tokens and the others padding, whose output is zero but
        for the shared expert's."""
        num_experts = len(self.experts)
        scores = self.router(x, step).float()
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
            out = _run_expert(expert, x[tokens[group]], step)
            total.index_add_(0, tokens[group], out * weights[group, None])
            start += count
        if self.shared is not None:
            gate = step.kernels.sigmoid(scores[:, num_experts:])[:, :1]
            total.addcmul_(self.shared(x, step), gate)
        return total.to(x.dtype)


def _run_expert(expert: GatedMLP, x: Tensor, step: ForwardPass) -> Tensor:
    """One expert's tokens. How many they are depends on the chunk, and must not matter to any of them."""
    if not step.batch.is_canonical:
        return expert(x, step)
    law = step.kernels.law
    slab = law.expert_slab or law.row_slab
    num_rows = law.padded_expert_rows(x.shape[0])
    padded = pad(x, (0, 0, 0, num_rows - x.shape[0]))
    fed = [expert(part, step) for part in torch.split(padded, slab or num_rows)]
    return (torch.cat(fed) if len(fed) > 1 else fed[0])[: x.shape[0]]
