"""A recurrent layer: a causal convolution, and a rule after it where there is one, with a state that is carried from
span to span."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.spans import StateNet
from penstock.layers.forward_batch import ForwardPass
from penstock.layers.linear import Linear


@dataclass(frozen=True)
class Recurrent:
    """One layer. All its inputs are one product, whose columns lie as `Kernels.carry_states` takes them."""

    index: int  # among the decoder's recurrent layers
    net: StateNet
    inputs: Linear
    out: Linear  # [hidden, value_size]

    def products(self) -> tuple[Linear, ...]:
        return self.inputs, self.out

    def read_in(self, x: Tensor, step: ForwardPass) -> tuple[Tensor, ...]:
        """Carry the states over x [rows, hidden]. Returns what the output projection takes [rows, value_size]."""
        states = step.caches.states.layer(self.index)
        return (step.kernels.carry_states(self.inputs(x, step), self.net, step.batch.states, states),)

    def mix(self, rows: tuple[Tensor, ...], step: ForwardPass, *, is_last: bool = False) -> Tensor:
        """What `read_in` gave, or some rows of it, to the block's output [rows, hidden]."""
        return self.out(rows[0], step)
