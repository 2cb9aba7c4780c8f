"""A fused weight whose parts are stored in different forms: as many products, side by side."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.interface import Kernels
from penstock.kernels.quantised import Weight
from penstock.layers.forward_batch import ForwardBatch


@dataclass(frozen=True, eq=False)
class JoinedWeight:
    """A weight [out, in] as several, each with the outputs after those of the one before."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def with_biases(self, bias: Tensor | None) -> list[tuple[Weight, Tensor | None]]:
        """Each part with its own of a bias [out]."""
        if bias is None:
            return [(part, None) for part in self.parts]
        sizes = [part.shape[0] for part in self.parts]
        return list(zip(self.parts, torch.split(bias, sizes), strict=True))


FusedWeight = Weight | JoinedWeight


def project(
    x: Tensor, weight: FusedWeight, bias: Tensor | None, batch: ForwardBatch, kernels: Kernels
) -> Tensor:
    """x [rows, in] times a weight [out, in], plus bias [out]."""
    if not isinstance(weight, JoinedWeight):
        return kernels.linear(x, weight, bias, is_canonical=batch.is_canonical)
    out = x.new_empty(x.shape[0], weight.shape[0])
    start = 0
    for part, own_bias in weight.with_biases(bias):
        end = start + part.shape[0]
        out[:, start:end] = kernels.linear(x, part, own_bias, is_canonical=batch.is_canonical)
        start = end
    return out
