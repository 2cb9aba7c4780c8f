"""What a device must be able to compute. Plain tensors in, plain tensors out; no kernel knows a plan or a cache."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.cache.kv import KV
from penstock.cache.recurrent import LayerStates
from penstock.errors import SettingError
from penstock.kernels.device import device_kind
from penstock.kernels.native.layers import DenseHeads, DenseLayer, DenseLayers
from penstock.kernels.native.quantised import QuantisedProducts
from penstock.kernels.quantised import Weight
from penstock.kernels.spans import AttentionWork, StateWork, WrittenPlaces
from penstock.plan.grids import RowLaw

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


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a gated delta net, and all it has beside its products."""

    num_key_heads: int
    num_value_heads: int  # a multiple of the key heads, each of which has as many in a row
    key_head_dim: int
    value_head_dim: int
    norm_eps: float
    conv_weight: Tensor  # [taps, 2 * key_size + value_size], float32; the tap of the token itself is last
    decay_rate: Tensor  # [lanes], float32, negative
    decay_bias: Tensor  # [lanes], float32
    norm: Tensor  # [value_head_dim], float32

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        return 2 * self.key_size + self.value_size


class Kernels(Protocol):
    """One implementation per kind of device; `TorchKernels` is the reference for all of them."""

    name: str
    libraries: str  # beside torch, whose versions bits depend on
    law: RowLaw  # the shapes on which a row keeps its bits: as far as is known before a probe, then as it found
    head_rows: int  # the output head runs on so many rows at a time, where their number must not matter to their bits
    feed_rows: int  # feed-forward blocks run on no more rows than this at a time; 0: on all
    activation_stride: int  # rows of an activation are so many times as far apart as they are long
    can_capture: bool  # whether passes can be kept as graphs of a device's own
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

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor,
        weight: Tensor,
        eps: float,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x + delta, both [rows, size], and the norm of that; `into` says where they go, if not to new tensors. It
        may name x and delta."""

    def place_heads(
        self, projected: Tensor, heads: HeadLayout, cos: Tensor, sin: Tensor, kv: KV, places: WrittenPlaces
    ) -> Tensor:
        """Queries [rows, heads, head_dim] out of projected [rows, queries | keys | values | ...], normed where the
        heads have norms and rotated; keys, treated alike, and values of the first rows go to their places in `kv`,
        a layer's whole cache.

        cos and sin are [rows, rotary_dim], sin with its sign. What of a head lies beyond rotary_dim is not
        rotated."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, for gate_up [rows, 2 * width] with the gate in the first half. It may be written over."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """The logistic function of x [rows, width]."""

    def attend(self, queries: Tensor, work: AttentionWork, kv: KV, scale: float) -> Tensor:
        """Attention of queries [rows, heads, head_dim] to the tokens that each sees, in `kv`, a layer's whole cache.
        Returns [rows, heads * head_dim], with zeros where rows see nothing."""

    def preparations(self, num_rows: int, num_heads: int, kv: KV, scale: float) -> Iterator[None]:
        """What the first attention of so many rows to each length of a past waits for, done in advance: a piece at
        each step. `kv` is a layer's whole cache, as long as the longest past; nothing is written to it."""

    def carry_states(
        self, projected: Tensor, net: DeltaHeads, work: StateWork, states: LayerStates
    ) -> Tensor:
        """A gated delta net from its inputs to its gated, normed outputs [rows, value_size], with zeros where rows
        carry no state. Spans cut at multiples of 64 tokens give the same bits.

        `projected` is [rows, queries | keys | values | gates of the output | beta | decay], the last two of as many
        columns as `net` has lanes. Queries, keys and values first go through a causal convolution of each channel and
        silu; queries and keys are then scaled to unit length, queries by key_head_dim ** -0.5 too."""


def select_kernels(device: torch.device) -> Kernels:
    """The kernels for a device; a device without any is an error.

    `PENSTOCK_KERNELS` may be `torch`, which is the reference on every device, `auto`, or, on a CPU, `native` (an
    error where they cannot be had, while `auto` is native where they can). On a GPU of NVIDIA's `auto` is its own
    kernels, on one of Apple's the reference."""
    choice = os.environ.get(KERNELS_VARIABLE, "auto")
    if choice not in ("auto", "native", "torch"):
        raise SettingError(KERNELS_VARIABLE, choice, "auto, native or torch")
    kind = device_kind(device)
    if choice == "native" and not kind.is_host:
        raise SettingError(
            KERNELS_VARIABLE, choice, "auto or torch", where=f"on {kind.name}", because="they are a CPU's"
        )
    from penstock.kernels.reference.kernels import TorchKernels

    if choice == "torch" or kind.name == "mps":
        return TorchKernels()
    return _cuda_kernels() if kind.name == "cuda" else _cpu_kernels(is_required=choice == "native")


def _cuda_kernels() -> Kernels:
    try:
        from penstock.kernels.cuda.kernels import CudaKernels
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise SettingError(
            "device",
            "cuda",
            f"{KERNELS_VARIABLE}=torch for the reference kernels",
            because="it needs triton, which is not installed: pip install triton",
        ) from error
    return CudaKernels()


def _cpu_kernels(*, is_required: bool) -> Kernels:
    from penstock.kernels.native.build import NativeUnavailableError
    from penstock.kernels.native.kernels import NativeKernels
    from penstock.kernels.reference.kernels import TorchKernels

    try:
        return NativeKernels()
    except NativeUnavailableError as error:
        if is_required:
            raise SettingError(KERNELS_VARIABLE, "native", where="here", because=str(error)) from error
        return TorchKernels()
