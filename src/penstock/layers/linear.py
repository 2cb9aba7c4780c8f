"""A product with a weight, whose outputs may be stored in several forms."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from penstock.kernels.quantised import Weight
from penstock.layers.forward_batch import ForwardPass


@dataclass(frozen=True, eq=False)
class Linear:
    """x [rows, in] times a weight [out, in], plus a bias [out]. Every product of a layer is one of these.

    `parts` are weights of successive outputs, whose products are laid side by side: usually one, several where a file
    stores the parts of a fused weight in different forms."""

    parts: tuple[Weight, ...]
    bias: Tensor | None = None

    @cached_property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @cached_property
    def biases(self) -> tuple[Tensor | None, ...]:
        """Each part's own."""
        if self.bias is None:
            return (None,) * len(self.parts)
        return torch.split(self.bias, [part.shape[0] for part in self.parts])

    def __call__(self, x: Tensor, step: ForwardPass) -> Tensor:
        return step.kernels.linear_parts(x, self.parts, self.biases, is_canonical=step.batch.is_canonical)
