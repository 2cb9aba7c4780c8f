"""Feed-forward blocks: one for all tokens, and a mixture of such experts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.elementwise import ElementWise
from penstock.kernels.experts import GroupedExperts, Router, route
from penstock.layers.forward_batch import ForwardPass
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm


@dataclass(frozen=True)
class MLP:
    """down(activation(gate(x)) * up(x)), with gate and up as one product; or down(activation(up(x)))."""

    waits_for_host: ClassVar[bool] = False  # which has to know where rows go before products are launched

    gate_up: Linear  # [2 * width, hidden]; without a gate [width, hidden]
    down: Linear  # [hidden, width]
    activation: ElementWise | None = None  # None: silu, of a gate
    is_gated: bool = True
    clamp: float = 0.0  # as in `ExpertsConfig`

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
        return self.down(self._activated(self.gate_up(x, step), step), step)  # no name holds what is between

    def _activated(self, inner: Tensor, step: ForwardPass) -> Tensor:
        if self.activation is None:
            return step.kernels.silu_and_mul(inner)
        if self.clamp:
            gate, up = inner.chunk(2, dim=-1)
            gate.clamp_(max=self.clamp)
            up.clamp_(-self.clamp, self.clamp).add_(1)
        return step.kernels.activate(inner, self.activation, is_gated=self.is_gated)


@dataclass(frozen=True)
class NoBlock:
    """In place of either block of a layer that has but the other (Nemotron-H): it adds nothing."""

    waits_for_host: ClassVar[bool] = False
    widths: ClassVar[tuple[int, ...]] = ()

    def products(self) -> tuple[Linear, ...]:
        return ()

    expert_products = products

    def read_in(self, x: Tensor, step: ForwardPass) -> tuple[Tensor, ...]:
        return (x,)

    def mix(self, rows: tuple[Tensor, ...], step: ForwardPass, *, is_last: bool = False) -> Tensor:
        return torch.zeros_like(rows[0])

    def __call__(self, x: Tensor, step: ForwardPass, num_rows: int | None = None) -> Tensor:
        return torch.zeros_like(x)


@dataclass(frozen=True)
class ApartNorms:
    """Of a mixture whose parts are each normed on their own."""

    shared: Norm
    experts: Norm
    router: Norm
    shared_exit: Norm
    experts_exit: Norm


@dataclass(frozen=True)
class ExpertMLP:
    """Each token goes through a few of many blocks, and through a shared one. Kernels may have all of them as one;
    otherwise tokens are grouped by expert here, and a group is one product, padded like the batch."""

    router: Router
    scoring: Linear  # [experts, or experts + lanes with the shared expert's gate first among them, hidden]
    experts: tuple[MLP, ...] | GroupedExperts
    shared: MLP | None
    norms: ApartNorms | None = None  # then what enters has not been normed

    @property
    def waits_for_host(self) -> bool:
        return isinstance(self.experts, tuple)

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.expert_products()[1].shape[1], *(self.shared.widths if self.shared else ()))

    def products(self) -> tuple[Linear, ...]:
        return (self.scoring, *(self.shared.products() if self.shared else ()))

    def expert_products(self) -> tuple[Linear, ...]:
        """Those of one expert, whose shapes all experts have."""
        if isinstance(self.experts, tuple):
            return self.experts[0].products()
        return tuple(Linear((weight,)) for weight in self.experts.one)

    def __call__(self, x: Tensor, step: ForwardPass, num_rows: int | None = None) -> Tensor:
        """x [rows, hidden], of which the first `num_rows` are tokens and the others padding, whose output is of no
        use."""
        if (norms := self.norms) is None:
            return self._run(x, self.scoring(x, step), self.shared, step, num_rows)
        assert self.shared is not None
        kernels = step.kernels
        scores = self.scoring(norms.router(x, kernels), step)
        out = norms.experts_exit(self._run(norms.experts(x, kernels), scores, None, step, num_rows), kernels)
        return out.add_(norms.shared_exit(self.shared(norms.shared(x, kernels), step), kernels))

    def _run(
        self, x: Tensor, scores: Tensor, shared: MLP | None, step: ForwardPass, num_rows: int | None
    ) -> Tensor:
        if isinstance(self.experts, tuple):
            return self._run_each(self.experts, x, scores.float(), shared, step, num_rows)
        beside = shared(x, step) if shared else None
        return self.experts.run(x, scores, beside, is_canonical=step.batch.is_canonical)

    def _run_each(
        self,
        experts: tuple[MLP, ...],
        x: Tensor,
        scores: Tensor,
        shared: MLP | None,
        step: ForwardPass,
        num_rows: int | None,
    ) -> Tensor:
        num_experts = len(experts)
        own = scores[:num_rows, :num_experts].contiguous()
        weights, chosen = route(own, self.router, step.kernels.sigmoid)
        total = mix_experts(experts, x, chosen, weights, step)
        if shared is not None and self.router.config.shared_gate:
            gate = step.kernels.sigmoid(scores[:, num_experts:])[:, :1]
            total.addcmul_(shared(x, step), gate)
        elif shared is not None:
            total += shared(x, step)
        return total.to(x.dtype)


def mix_experts(
    experts: Sequence[Callable[[Tensor, ForwardPass], Tensor]],
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    step: ForwardPass,
) -> Tensor:
    """The sum, in float32, of the outputs of each row's experts, `chosen` [rows, active], with their weights. Rows of
    x [rows or more, hidden] that have none are zero."""
    # A token's outputs are summed in the order of its experts, which no other token can change.
    order = chosen.flatten().argsort(stable=True)
    weights = weights.flatten()[order]
    tokens = order // chosen.shape[1]
    counts = torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()
    total = x.new_zeros(x.shape, dtype=torch.float32)
    start = 0
    for expert, count in zip(experts, counts, strict=True):
        if not count:
            continue
        group = slice(start, start + count)
        out = _run_expert(expert, x[tokens[group]], step)
        total.index_add_(0, tokens[group], out * weights[group, None])
        start += count
    return total


def _run_expert(expert: Callable[[Tensor, ForwardPass], Tensor], x: Tensor, step: ForwardPass) -> Tensor:
    """One expert's tokens. How many they are depends on the chunk, and must not matter to any of them."""
    if not step.batch.is_canonical:
        return expert(x, step)
    law = step.kernels.law
    slab = law.expert_slab or law.row_slab
    num_rows = law.padded_expert_rows(x.shape[0])
    padded = pad(x, (0, 0, 0, num_rows - x.shape[0]))
    fed = [expert(part, step) for part in torch.split(padded, slab or num_rows)]
    return (torch.cat(fed) if len(fed) > 1 else fed[0])[: x.shape[0]]
