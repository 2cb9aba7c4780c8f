"""A gated delta net: a causal convolution, then a delta rule, both with a state that is carried from span to span."""

from dataclasses import dataclass

from torch import Tensor

from penstock.cache.tensors import CacheTensors
from penstock.kernels.interface import DeltaHeads, Kernels
from penstock.kernels.quantised import Weight
from penstock.kernels.spans import AttentionWork
from penstock.layers.forward_batch import ForwardBatch
from penstock.layers.fused_weight import FusedWeight, project


@dataclass(frozen=True)
class DeltaNet:
    """One layer. All its inputs are one product, whose columns lie as

    queries | keys | values | gates of the output | beta, in whole lanes | decay, in whole lanes
    """

    index: int  # among the model's delta-net layers
    heads: DeltaHeads
    in_weight: FusedWeight  # [2 * key_size + 2 * value_size + 2 * lanes, hidden]
    out_weight: Weight  # [hidden, value_size]

    def take_in(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        caches: CacheTensors,
        kernels: Kernels,
    ) -> tuple[Tensor, ...]:
        """Carry the states over x [rows, hidden]. Returns the gated, normed outputs [rows, value_size]."""
        projected = project(x, self.in_weight, None, batch, kernels)
        return (kernels.carry_states(projected, self.heads, batch.states, caches.states.layer(self.index)),)

    def give_out(
        self,
        rows: tuple[Tensor, ...],
        work: AttentionWork,
        batch: ForwardBatch,
        caches: CacheTensors,
        kernels: Kernels,
    ) -> Tensor:
        """What `take_in` gave, or some rows of it, to the block's output [rows, hidden]."""
        return kernels.linear(rows[0], self.out_weight, is_canonical=batch.is_canonical)
