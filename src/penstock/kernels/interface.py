"""What a device must be able to compute, and the back ends that there are. Plain tensors in, plain tensors out; of a
cache, kernels see a layer's keys, values and states."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.cache.kv import KV
from penstock.cache.recurrent import LayerStates
from penstock.errors import PenstockError, SettingError
from penstock.kernels.device import DEVICE_KINDS, device_kind
from penstock.kernels.quantised import BlockForm, QuantisedWeight, Weight
from penstock.kernels.spans import AttentionWork, StateWork, Work, WrittenPlaces
from penstock.plan.grids import RowLaw
from penstock.plan.settings import KERNELS, KERNELS_VARIABLE
from penstock.plan.step import KernelKind

_log = logging.getLogger("penstock.kernels")


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


@dataclass(frozen=True)
class DenseProduct:
    """A weight [out, in] in parts, each with the outputs after those of the one before, and a bias [out]."""

    parts: tuple[QuantisedWeight, ...]
    bias: Tensor | None


@dataclass(frozen=True)
class DenseLayer:
    """A layer of attention and one feed-forward block, all of whose matrices are quantised."""

    qkv: DenseProduct
    out: DenseProduct
    gate_up: DenseProduct
    down: DenseProduct
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    next_norm: Tensor


@dataclass(frozen=True)
class DenseHeads:
    """What the layers have in common. Every norm is of one dtype."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    norm_is_float32: bool


class DenseLayers(Protocol):
    """All layers of a model as one call."""

    spent: NDArray[np.int64] | None  # nanoseconds of products, attention and the rest are added to it

    def run(
        self,
        x: Tensor,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        caches: Sequence[KV],
        places: WrittenPlaces,
        work: AttentionWork,
    ) -> Tensor:
        """x [rows, hidden] and the first layer's norm of it to the last norm; both are overwritten. Every row is a
        token's."""


class QuantisedProducts(Protocol):
    """Makes quantised weights, and multiplies with them."""

    def zeros(self, form: BlockForm, num_out: int, num_in: int) -> QuantisedWeight:
        """A weight [out, in] of zeros, to be filled by `place`; inputs in whole groups."""

    def place(self, weight: QuantisedWeight, outputs: Tensor, blocks: Tensor) -> None:
        """Rows of blocks [rows, bytes] become those `outputs` [rows]; inputs that they do not have stay zero."""

    def rows(self, weight: QuantisedWeight, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [n, in] of the weight, those of the outputs [n]."""

    def linear(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None, is_canonical: bool) -> Tensor:
        """x [rows, in] of bfloat16 times a weight, plus bias [out]."""


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

    def memory_kind(self, dtype: torch.dtype, head_dim: int) -> KernelKind:
        """What a step's memory is estimated as, with heads of such a size."""

    def prepare(self, work: Work, device: torch.device) -> Work:
        """The work of a pass with what the device needs of it, for all layers at once. What was not prepared is taken
        as well: every call then prepares it for itself."""

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


class KernelsUnavailableError(PenstockError):
    """Why a back end cannot be had here."""


@dataclass(frozen=True)
class BackEnd:
    """Kernels that are imported when they are chosen."""

    place: str  # module:class
    package: str = ""  # that it needs beside torch
    falls_back: bool = False  # to the reference, where `auto` chose it and it cannot be had


REFERENCE: KernelKind = "torch"
# Which of them is a device's, its `DeviceKind` says.
BACK_ENDS: dict[KernelKind, BackEnd] = {
    "native": BackEnd("penstock.kernels.native.kernels:NativeKernels", falls_back=True),
    "cuda": BackEnd("penstock.kernels.cuda.kernels:CudaKernels", package="triton"),
    REFERENCE: BackEnd("penstock.kernels.reference.kernels:TorchKernels"),
}


def select_kernels(device: torch.device, choice: str | None = None) -> Kernels:
    """The kernels for a device; a device without any is an error.

    `choice`, without it `PENSTOCK_KERNELS`, may be `torch`, which is the reference on every device, `auto`, which is
    the device's own, or one that `auto` may fall back from (`native`, on a CPU): then it is an error where it cannot
    be had."""
    choice = KERNELS.resolve().effective if choice is None else choice
    own, optional = device_kind(device).kernels, [name for name, end in BACK_ENDS.items() if end.falls_back]
    if choice not in ("auto", REFERENCE, *optional):
        raise SettingError(KERNELS_VARIABLE, choice, f"auto, {', '.join(optional)} or {REFERENCE}")
    name = next((name for name in (REFERENCE, *optional) if name == choice), own)
    if name not in (REFERENCE, own):
        accepted, where = f"auto or {REFERENCE}", f"on {device_kind(device).name}"
        owner = next(kind.name for kind in DEVICE_KINDS.values() if kind.kernels == name)
        because = f"they are a {owner.upper()}'s"
        raise SettingError(KERNELS_VARIABLE, choice, accepted, where=where, because=because)
    try:
        return _made(name, device)
    except KernelsUnavailableError as error:
        if choice == "auto":
            _log.warning("the %s kernels are not used, and torch computes everything: %s", name, error)
            return _made(REFERENCE, device)
        raise SettingError(KERNELS_VARIABLE, choice, where="here", because=str(error)) from error


def _made(name: KernelKind, device: torch.device) -> Kernels:
    end = BACK_ENDS[name]
    module, _, kernels = end.place.partition(":")
    try:
        made: Kernels = getattr(import_module(module), kernels)()
    except ModuleNotFoundError as error:
        if error.name != end.package:
            raise
        raise SettingError(
            "device",
            device_kind(device).name,
            f"{KERNELS_VARIABLE}={REFERENCE} for the reference kernels",
            because=f"it needs {end.package}, which is not installed: pip install {end.package}",
        ) from error
    return made
