"""How products of a few rows are shared among programs, and put together again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from penstock.kernels.cuda.launch import early
from penstock.kernels.triton.rows import join_sums_kernel

_LEAST_ROWS = 16  # the matrix units take no fewer
_JOINED = 1024  # outputs


@dataclass(frozen=True)
class Launch:
    """Outputs and inputs that a program has at a time, how many such steps are on their way, its warps; and by how
    many programs a product is shared at least, if its inputs are enough for that."""

    outputs: int
    inputs: int
    stages: int
    warps: int
    least_programs: int = 256


def least_rows(num_rows: int) -> int:
    """As many as a program has."""
    return max(_LEAST_ROWS, int(triton.next_power_of_2(num_rows)))


def shared_out(launch: Launch, num_out: int, num_in: int) -> tuple[tuple[int, int], int]:
    """Programs by outputs and by parts of the inputs, and how many inputs a part has."""
    by_outputs, steps = triton.cdiv(num_out, launch.outputs), triton.cdiv(num_in, launch.inputs)
    steps_each = triton.cdiv(steps, min(triton.cdiv(launch.least_programs, by_outputs), steps))
    return (by_outputs, triton.cdiv(steps, steps_each)), steps_each * launch.inputs


@contextmanager
def summed(
    num_parts: int, bias: Tensor | None, out: Tensor
) -> Iterator[tuple[Tensor | None, Tensor, int, bool]]:
    """What a product's programs are told: a bias and where their sums go, rows how far apart, and whether there is a
    bias. Sums in parts are joined afterwards."""
    if num_parts == 1:
        yield bias, out, out.stride(0), bias is not None
        return
    sums = torch.empty(num_parts, *out.shape, dtype=torch.float32, device=out.device)
    yield None, sums, out.shape[1], False
    num_rows, num_out = out.shape
    join_sums_kernel[(num_rows, triton.cdiv(num_out, _JOINED))](
        sums,
        bias,
        out,
        out.stride(0),
        num_out,
        HAS_BIAS=bias is not None,
        PARTS=num_parts,
        BLOCK=_JOINED,
        num_warps=4,
        **early(out.device, num_rows),
    )
