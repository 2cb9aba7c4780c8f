"""Kernels for GPUs on a CPU, run by Triton's interpreter. `tests/conftest.py` has it switched on."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.reference.attention import plain_attention

if TYPE_CHECKING:
    from penstock.kernels.cuda.kernels import CudaKernels


def require_interpreter() -> None:
    """Where kernels cannot be interpreted, tests are skipped; in CI an absent Triton is an error."""
    try:
        import triton
    except ImportError:
        if os.environ.get("CI"):
            raise
        pytest.skip("Triton is not installed, whose interpreter runs the kernels for GPUs")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled here, for a GPU: tests/gpu tries those")


@contextmanager
def interpreted_kernels(tile_size: int) -> Iterator["CudaKernels"]:
    """With plain attention in place of libraries' that no CPU has."""
    require_interpreter()
    from triton.runtime.interpreter import InterpreterBuilder

    from penstock.kernels.cuda import kernels as cuda_kernels
    from penstock.kernels.cuda import past as cuda_past

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", _widened(InterpreterBuilder.create_dot))
        patch.setattr(cuda_past, "cudnn_attention", _attention)
        patch.setattr(
            cuda_past, "_attend_without_cudnn", lambda q, k, v, scale: _attention(q, k, v, scale=scale)
        )
        yield cuda_kernels.CudaKernels(tile_size=tile_size)


def _widened(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter holds bfloat16 as whole numbers of 16 bits, and would multiply these."""
    import triton.language as tl

    def dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(builder, a, b, *others)

    return dot


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, *options: object, scale: float
) -> tuple[Tensor, Tensor]:
    """One query at a time: how many there are must change no bits. All are [batch, heads, tokens, head_dim]."""
    found = [
        plain_attention(queries[:, :, [row]], keys, values, is_causal=False, scale=scale)
        for row in range(queries.shape[2])
    ]
    return torch.cat([out for out, _ in found], dim=2), torch.cat([lse for _, lse in found], dim=2)
