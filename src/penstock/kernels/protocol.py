"""What a device must be able to compute. Plain tensors in, plain tensors out; no kernel knows a plan or a cache."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.cache.kv import KV
from penstock.errors import SettingError
from penstock.kernels.native_layers import DenseHeads, DenseLayer, DenseLayers
from penstock.kernels.native_quantised import QuantisedProducts
from penstock.kernels.quantised import Weight
from penstock.kernels.spans import AttentionWork, WrittenPlaces

# The output head runs on so many rows at a time, where a row's bits must not depend on how many there are.
HEAD_ROWS = 8
# More rows than these few are padded to a multiple of the grid: libraries keep code and plans for every number that
# they meet, and a service would meet all of them.
FEW_ROWS = 16
ROW_GRID = 8


KERNELS_VARIABLE = "PENSTOCK_KERNELS"


@dataclass(frozen=True)
class HeadLayout:
    """The heads of an attention layer. Both norms are there, or neither."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_norm: Tensor | None = None  # [head_dim]
    key_norm: Tensor | None = None
    norm_eps: float = 1e-6


class Kernels(Protocol):
    """One implementation per kind of device; `TorchKernels` is the reference for all of them."""

    name: str
    tile_size: int
    row_floor: int  # products of fewer rows than this do not give a row the same bits as those of more
    row_slab: int  # products of more rows than this run as several, of this many rows each; 0: as one
    expert_slab: int  # the same for experts, which have few rows each; 0: as for all others
    quantised: QuantisedProducts | None  # what makes weights of blocks, where `linear` takes them

    def pack(self, weight: Tensor) -> Tensor:
        """A weight [out, in] in the form that `linear` takes it in, of the same size."""

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, is_canonical: bool = True
    ) -> Tensor:
        """x [rows, in] times a packed weight [out, in], plus bias [out]. What is not canonical may be computed in the
        way that is fastest for a few rows, whose bits may differ."""

    def dense_layers(self, layers: Sequence[DenseLayer], heads: DenseHeads) -> DenseLayers | None:
        """Such layers as one call, which gives the bits of products that are not canonical; None where there is none
        for them."""

    def embed(self, token_ids: Tensor, embedding: Weight) -> Tensor:
        """Rows [n, hidden] of an embedding [vocab, hidden], which is not packed unless it is quantised."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, computed in float32. A float32 weight is applied before
        rounding to the dtype of x, any other after it."""

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + delta, both [rows, size], and the norm of that."""

    def place_heads(
        self, projected: Tensor, heads: HeadLayout, cos: Tensor, sin: Tensor, kv: KV, places: WrittenPlaces
    ) -> Tensor:
        """Queries [rows, heads, head_dim] out of projected [rows, queries | keys | values | ...], normed where the
        heads have norms and rotated; keys, treated alike, and values of the first rows go to their places in `kv`,
        a layer's whole cache.

        cos and sin are [rows, rotary_dim], sin with its sign. What of a head lies beyond rotary_dim is not
        rotated."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, for gate_up [rows, 2 * width] with the gate in the first half."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """The logistic function of x [rows, width]."""

    def attend(self, queries: Tensor, work: AttentionWork, kv: KV, scale: float) -> Tensor:
        """Attention of queries [rows, heads, head_dim] to the tokens that each sees, in `kv`, a layer's whole cache.
        Returns [rows, heads * head_dim], with zeros where rows see nothing."""

    def causal_conv(self, x: Tensor, tail: Tensor, weight: Tensor, out_tail: Tensor) -> Tensor:
        """silu of the convolution of each channel of x [n, channels] over time, in the dtype of x.

        `tail` [taps - 1, channels], up to 64 rows, is what came before x; its successor goes to `out_tail`. `weight`
        is [taps, channels] in float32, with the tap of the token itself last."""

    def delta_gates(self, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of the decay, rate * softplus(a + bias), and beta, sigmoid(b), in float32.

        a and b are [n, lanes], rate and bias [lanes] in float32."""

    def gated_delta_rule(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        out_state: Tensor,
    ) -> Tensor:
        """The gated delta rule over a span: outputs [n, heads, value_dim] in float32.

        queries and keys are [n, key_heads, key_dim] and are scaled to unit length here (queries by
        key_dim ** -0.5 too), values [n, heads, value_dim], log_decay and beta [n, heads] in float32. `state`
        [heads, key_dim, value_dim], float32, is that before the span; the one after it goes to `out_state`, which is
        another tensor. Spans cut at multiples of 64 tokens give the same bits."""

    def gated_delta_steps(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        out_state: Tensor,
    ) -> Tensor:
        """The same, one token after the other: the form for a single token."""

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of each head of x [n, heads, dim], float32, times silu of gate [n, heads * dim]; in the dtype of
        the gate, and of its shape. The weight [dim] is float32."""


def padded_rows(num_rows: int, row_floor: int, row_slab: int) -> int:
    """How many rows a product must have for `num_rows` of them to have the same bits as among any others."""
    grid = row_slab or (ROW_GRID if num_rows > FEW_ROWS else 1)
    return max(row_floor, -(-num_rows // grid) * grid)


def select_kernels(device: torch.device) -> Kernels:
    """The kernels for a device; a device without any is an error.

    On a CPU `PENSTOCK_KERNELS` may be `torch`, `native` (an error where they cannot be had) or `auto`: native where
    they can."""
    if device.type != "cpu":
        raise SettingError(f"device {str(device)!r}: there are no kernels for it; accepted: cpu")
    from penstock.kernels.native_build import NativeUnavailableError
    from penstock.kernels.torch_kernels import TorchKernels

    choice = os.environ.get(KERNELS_VARIABLE, "auto")
    if choice == "torch":
        return TorchKernels()
    if choice not in ("auto", "native"):
        raise SettingError(f"{KERNELS_VARIABLE}={choice!r} is not accepted: give auto, native or torch")
    from penstock.kernels.native_kernels import NativeKernels

    try:
        return NativeKernels()
    except NativeUnavailableError as error:
        if choice == "native":
            raise SettingError(f"{KERNELS_VARIABLE}=native is not accepted here: {error}") from error
        return TorchKernels()
