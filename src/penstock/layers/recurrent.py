"""A recurrent layer: a causal convolution, and a rule after it where there is one, with a state that is carried from
span to span; alone or beside attention."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.spans import StateNet
from penstock.layers.attention import Attention
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


@dataclass(frozen=True)
class SideBySide:
    """Both in one layer (Falcon-H1): each reads what enters it, and what they give is summed."""

    attention: Attention
    recurrent: Recurrent

    def products(self) -> tuple[Linear, ...]:
        return self.attention.products() + self.recurrent.products()

    def read_in(self, x: Tensor, step: ForwardPass) -> tuple[Tensor, ...]:
        """What the recurrent part gives to be mixed, then what attention does."""
        return self.recurrent.read_in(x, step) + self.attention.read_in(x, step)

    def mix(self, rows: tuple[Tensor, ...], step: ForwardPass, *, is_last: bool = False) -> Tensor:
        mixed = self.recurrent.mix(rows[:1], step)
        return mixed.add_(self.attention.mix(rows[1:], step, is_last=is_last))
