"""How an element-wise pass is divided, so that no element's bits depend on how many rows there are.

torch gives each thread a run of elements and ends a run that is no multiple of the vector length in scalar code,
whose exponential differs in the last bit. Here every run is whole vectors:

    rows   [ as many as give every thread the same whole number of vectors )[ few ) [ few ) ...
            one call, all threads                                            one thread each
"""

import math
from collections.abc import Callable
from functools import partial
from math import gcd

import torch
from torch import Tensor

from penstock.kernels.threads import num_threads
from penstock.plan.grids import LANES

# A function of every element of x, whose result is written to `out`, which may be x.
ElementWise = Callable[..., Tensor]

# A pass of up to this many elements is left to one thread.
_GRAIN = 32_768


def in_shares(function: ElementWise, x: Tensor, out: Tensor | None = None) -> Tensor:
    """An element-wise function of x [rows, width], whose rows do not notice how many they are."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    shares = even_shares(x.shape[0], x.shape[1], num_threads())
    if len(shares) == 1:
        return function(x, out=out)
    for rows in shares:
        function(x[rows], out=out[rows])
    return out


def even_shares(num_rows: int, width: int, num_threads: int) -> list[slice]:
    """Divide the rows of [num_rows, width] into calls. A width that is no multiple of LANES is taken row by row."""
    if width % LANES:
        return [slice(row, row + 1) for row in range(num_rows)]
    # With this many rows or more there is a grain for every thread; a multiple of `unit` rows divides evenly.
    enough = -(-num_threads * _GRAIN // width)
    unit = num_threads // gcd(num_threads, width // LANES)
    start = num_rows // unit * unit
    if start < enough and num_threads > 1:
        start = 0
    shares = [slice(0, start)] if start else []
    rows_per_grain = max(_GRAIN // width, 1)
    while start < num_rows:
        end = min(start + rows_per_grain, num_rows)
        shares.append(slice(start, end))
        start = end
    return shares


# Activations, by transformers' names


def _gelu(x: Tensor, out: Tensor) -> Tensor:
    """By its formula: torch's own takes one library or another by how x lies in memory."""
    return out.copy_(torch.erf(x * math.sqrt(0.5)).add_(1).mul_(x).mul_(0.5))


def _relu2(x: Tensor, out: Tensor) -> Tensor:
    return torch.clamp_min(x, 0, out=out).square_()


def _quick_gelu(x: Tensor, out: Tensor) -> Tensor:
    return out.copy_(torch.sigmoid(x * 1.702).mul_(x))


def xielu(alpha_p: float = 0.8, alpha_n: float = 0.8, beta: float = 0.5, eps: float = -1e-6) -> ElementWise:
    """A parabola for positive elements; for the others, an exponential beside a line."""

    def function(x: Tensor, out: Tensor) -> Tensor:
        negative = torch.expm1(x.clamp(max=eps)).sub_(x).mul_(alpha_n)
        return out.copy_(torch.where(x > 0, alpha_p * x * x, negative).add_(x, alpha=beta))

    return function


_gelu_tanh = partial(torch.ops.aten.gelu.out, approximate="tanh")
ACTIVATIONS: dict[str, ElementWise] = {
    "silu": torch.ops.aten.silu.out,
    "swish": torch.ops.aten.silu.out,
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": lambda x, out: torch.clamp_min(x, 0, out=out),
    "relu2": _relu2,
    "xielu": xielu(),  # as it is before training
}
