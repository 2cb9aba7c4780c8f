"""A gated delta net: a causal convolution, then a delta rule, both with a state that is carried from span to span."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.spans import DeltaHeads
from penstock.layers.forward_batch import ForwardPass
from penstock.layers.linear import Linear


@dataclass(frozen=True)
class DeltaNet:
    """One layer. All its inputs are one product, whose columns lie as

    queries | keys | values | gates of the output | beta, in whole lanes | decay, in whole lanes
    """

    index: int  # among the decoder's delta-net layers
    heads: DeltaHeads
    inputs: Linear  # [2 * key_size + 2 * value_size + 2 * lanes, hidden]
    out: Linear  # [hidden, value_size]

    def products(self) -> tuple[Linear, ...]:
        return self.inputs, self.out

    def read_in(self, x: Tensor, step: ForwardPass) -> tuple[Tensor, ...]:
        """Carry the states over x [rows, hidden]. Returns the gated, normed outputs [rows, value_size]."""
        states = step.caches.states.layer(self.index)
        return (step.kernels.carry_states(self.inputs(x, step), self.heads, step.batch.states, states),)

    def mix(self, rows: tuple[Tensor, ...], step: ForwardPass, *, is_last: bool = False) -> Tensor:
        """What `read_in` gave, or some rows of it, to the block's output [rows, hidden]."""
        return self.out(rows[0], step)
