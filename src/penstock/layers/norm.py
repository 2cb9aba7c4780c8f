"""The norm of a residual, or none."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.interface import Kernels


@dataclass(frozen=True, eq=False)
class Norm:
    """A root-mean-square norm, or a layer norm. Without a weight it changes nothing."""

    eps: float = 1e-6
    weight: Tensor | None = None  # [hidden]
    bias: Tensor | None = None  # [hidden], of a layer norm
    is_centred: bool = False  # the mean is subtracted

    @property
    def rms_weight(self) -> Tensor | None:
        """The weight, where this is a root-mean-square norm."""
        return None if self.is_centred else self.weight

    def __call__(self, x: Tensor, kernels: Kernels) -> Tensor:
        """Of x [rows, hidden]; without a weight x itself."""
        if self.weight is None:
            return x
        if self.is_centred:
            return kernels.layer_norm(x, self.weight, self.bias, self.eps)
        return kernels.rms_norm(x, self.weight, self.eps)

    def of_sum(
        self, x: Tensor, delta: Tensor, kernels: Kernels, into: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + delta, both [rows, hidden], and the norm of that; `into` as in `Kernels.add_norm`."""
        if (weight := self.rms_weight) is not None:
            return kernels.add_norm(x, delta, weight, self.eps, into)
        total = x + delta
        normed = self(total, kernels)
        return (total, normed) if into is None else (into[0].copy_(total), into[1].copy_(normed))
