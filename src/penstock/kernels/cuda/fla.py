"""The gated delta rule over blocks of 64 tokens: flash-linear-attention's kernels, launched with fixed settings.

The library's own entry chooses settings and sometimes whole implementations by timing them and by the environment:
another process could sum in another order. Here every launch is the same whatever the length, so that spans that end
on multiples of 64 give the same bits however they are cut, and no launch waits for the device.
"""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.autotuner import Autotuner, Heuristics

from penstock.kernels.device import device_kind
from penstock.kernels.reference.delta import RuleInputs
from penstock.plan.grids import STATE_GRID

# The launches below fit this one.
_VERSION = "0.6."
_MOST_KEY_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16)
# Rows that the library inverts directly.
_CORNER = 16
_SOLVE = {"BK": 64, "num_warps": 2}
_WRITTEN = {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3}
_CARRY = {"BV": 32, "num_warps": 4, "num_stages": 3}
# From this compute capability on, Triton before 3.8 may compile the carrying of states by more warps wrongly.
_BLACKWELL = 10
_CARRY_ON_BLACKWELL = {**_CARRY, "num_warps": 2}
_READ = {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3}


@dataclass(frozen=True)
class _Kernels:
    solve: Any
    written: Any
    carry: Any
    read: Any


def can_run(dtype: torch.dtype, key_dim: int) -> bool:
    """Whether the library is there, and takes such inputs. Products of float32 it would compute in fewer bits."""
    return dtype in _DTYPES and key_dim <= _MOST_KEY_DIM and is_available()


@cache
def is_available() -> bool:
    """Whether the library is there, with all it needs and in a version that is known. Not imported: that takes
    seconds."""
    try:
        return version("fla-core").startswith(_VERSION) and find_spec("einops") is not None
    except PackageNotFoundError:
        return False


def gated_delta_blocks(inputs: RuleInputs, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs [n, heads, value_dim], in the dtype of the values, and the state after them.

    Queries and keys are of unit length; log decays are sums over each block, to the base of 2; `state` is [heads,
    key_dim, value_dim] in float32. All are contiguous."""
    kernels = _kernels()
    queries, keys, values, decays, beta = inputs
    num_tokens, num_key_heads, key_dim = keys.shape
    num_heads, value_dim = values.shape[1:]
    num_blocks = triton.cdiv(num_tokens, STATE_GRID)
    whole = {"cu_seqlens": None, "T": num_tokens, "H": num_key_heads, "HV": num_heads, "K": key_dim}
    whole |= {"BT": STATE_GRID, "USE_G": True, "IS_VARLEN": False}

    # The parts above the diagonal are not written.
    inverses = keys.new_zeros(num_tokens, num_heads, STATE_GRID)
    kernels.solve[(num_blocks, num_heads)](
        k=keys, g=decays, beta=beta, A=inverses, chunk_indices=None, BC=_CORNER, **whole, **_SOLVE
    )
    erased = keys.new_empty(num_tokens, num_heads, key_dim)
    written = torch.empty_like(values)
    kernels.written[(num_blocks, num_heads)](
        k=keys,
        v=values,
        beta=beta,
        w=erased,
        u=written,
        A=inverses,
        g=decays,
        chunk_indices=None,
        V=value_dim,
        **whole,
        **_WRITTEN,
    )
    states = keys.new_empty(num_blocks, num_heads, key_dim, value_dim)
    new_values, next_state = torch.empty_like(values), torch.empty_like(state)
    carry = _CARRY_ON_BLACKWELL if _capability(keys.device) >= _BLACKWELL else _CARRY
    kernels.carry[(triton.cdiv(value_dim, carry["BV"]) * num_heads,)](
        k=keys,
        v=written,
        w=erased,
        v_new=new_values,
        g=decays,
        gk=None,
        h=states,
        h0=state,
        ht=next_state,
        chunk_offsets=None,
        V=value_dim,
        USE_GK=False,
        USE_INITIAL_STATE=True,
        STORE_FINAL_STATE=True,
        SAVE_NEW_VALUE=True,
        STATE_V_FIRST=False,
        **whole,
        **carry,
    )
    out = torch.empty_like(values)
    kernels.read[(triton.cdiv(value_dim, _READ["BV"]) * num_blocks, num_heads)](
        q=queries,
        k=keys,
        v=new_values,
        h=states,
        g=decays,
        g_gamma=None,
        o=out,
        chunk_indices=None,
        scale=scale,
        V=value_dim,
        USE_G_GAMMA=False,
        STATE_V_FIRST=False,
        **whole,
        **_READ,
    )
    return out, next_state


@cache
def _capability(device: torch.device) -> int:
    return (device_kind(device).capability or (0, 0))[0]


@cache
def _kernels() -> _Kernels:
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_kernel_h_blockdim64
    from fla.ops.common.chunk_o import chunk_fwd_kernel_o
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_kkt_solve_kernel
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd_kernel

    return _Kernels(
        _plain(chunk_gated_delta_rule_fwd_kkt_solve_kernel),
        _plain(recompute_w_u_fwd_kernel),
        _plain(chunk_gated_delta_rule_fwd_kernel_h_blockdim64),
        _plain(chunk_fwd_kernel_o),
    )


def _plain(kernel: Any) -> Any:
    """The kernel itself, without what chooses its settings."""
    while isinstance(kernel, (Autotuner, Heuristics)):
        kernel = kernel.fn
    return kernel
