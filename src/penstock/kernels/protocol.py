"""What a device must be able to compute. Plain tensors in, plain tensors out; no kernel knows a plan or a cache."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.cache.kv import KV
from penstock.errors import SettingError


class Kernels(Protocol):
    """One implementation per kind of device; `TorchKernels` is the reference for all of them."""

    name: str
    tile_size: int
    row_slab: int  # products of more rows than this run as several, of this many rows each; 0: as one

    def pack(self, weight: Tensor) -> Tensor:
        """A weight [out, in] in the form that `linear` takes it in, of the same size."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] times a packed weight [out, in], plus bias [out]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, computed in float32."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of x [rows, heads, head_dim]; cos and sin are [rows, head_dim], sin with its sign."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, for gate_up [rows, 2 * width] with the gate in the first half."""

    def attend_tile(self, queries: Tensor, offset: int, past: KV | None, own: KV, scale: float) -> Tensor:
        """Attention of queries [n, heads, head_dim] that stand at `offset` in their tile.

        `past` is all that lies before the tile, seen by every query; `own` is the tile, whole (its keys after
        the last query may hold anything finite). Returns [n, heads, head_dim].
        """

    def attend_one(self, query: Tensor, past: Sequence[KV], scale: float) -> Tensor:
        """Attention of one query [heads, head_dim] to everything in `past`, in any number of pieces."""


def select_kernels(device: torch.device) -> Kernels:
    """The kernels for a device; a device without any is an error."""
    if device.type == "cpu":
        from penstock.kernels.torch_kernels import TorchKernels

        return TorchKernels()
    raise SettingError(f"device {str(device)!r}: there are no kernels for it; accepted: cpu")
