"""Kernels of our own for processors with AVX2, AVX-512 or NEON, beside torch's products.

Attention needs no grid: a query's sums are formed in one order whatever its chunk (see `native/attention.cpp`).
Decodes of all sequences, and chunks beside them, are one call.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from penstock.cache.tensors import KV
from penstock.kernels.elementwise import ElementWise
from penstock.kernels.experts import GroupedExperts, Router
from penstock.kernels.native.build import allows_tiles, native_library
from penstock.kernels.native.experts import NativeExperts
from penstock.kernels.native.layers import NativeLayers
from penstock.kernels.native.quantised import NativeProducts
from penstock.kernels.quantised import PACKED, DenseLayer, QuantisedWeight, Weight
from penstock.kernels.reference.kernels import TorchKernels
from penstock.kernels.spans import AttentionWork, HeadLayout, Scoring, WrittenPlaces
from penstock.kernels.threads import native_threads
from penstock.machine import AMX, ISA_VARIABLE, has_fast_bfloat16, instruction_set, processor_flags
from penstock.plan.grids import EXPERT_PLACES, ROUNDED_BYTES, ROUNDED_ROWS, TILE
from penstock.plan.step import KernelKind

_DTYPES = (torch.float32, torch.bfloat16)
_MOST_HEAD_DIM = 1024

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class _Heads(ctypes.Structure):
    _fields_ = (
        ("queries", _pointer),
        ("out", _pointer),
        ("keys", _pointer),
        ("values", _pointer),
        ("query_stride", _long),
        ("out_stride", _long),
        ("key_stride", _long),
        ("value_stride", _long),
        ("num_kv_heads", _long),
        ("group", _long),
        ("value_dim", _long),
        ("window", _long),
        ("sinks", _pointer),
        ("scale", _float),
        ("soft_cap", _float),
    )


class _HeadRows(ctypes.Structure):
    _fields_ = (
        ("projected", _pointer),
        ("queries", _pointer),
        ("keys", _pointer),
        ("values", _pointer),
        ("cos", _pointer),
        ("sin", _pointer),
        ("query_norm", _pointer),
        ("key_norm", _pointer),
        ("places", _pointer),
        ("num_rows", _long),
        ("num_tokens", _long),
        ("row_stride", _long),
        ("num_heads", _long),
        ("num_kv_heads", _long),
        ("head_dim", _long),
        ("rotary_dim", _long),
        ("norm_is_float32", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("eps", _float),
    )


def _instructions(library: ctypes.CDLL) -> str:
    return Path(library._name).stem.split("-")[1]


@cache
def _is_right(library: ctypes.CDLL) -> bool:
    """Whether it needs no proof, or has given it: its tiles may never have run on such a processor."""
    return _instructions(library) != AMX or NativeProducts(library).are_right()


def _why_lower(instructions: str) -> str | None:
    """Why the library has not the best set of instructions that the processor has."""
    best = instruction_set(processor_flags(), environ={})
    if instructions == best:
        return None
    if instructions == instruction_set(processor_flags()):
        return f"{ISA_VARIABLE}={instructions} keeps them from {best}, which the processor has"
    if not allows_tiles():
        return f"the system does not let this process use the tiles of {best}: {instructions} runs"
    return (
        f"products by the tiles of {best} are wrong on this processor, please report it: {instructions} runs"
    )


class NativeKernels(TorchKernels):
    """What the library has no code for (other dtypes and head sizes) and products with plain weights are torch's."""

    name = "native"
    quantised: NativeProducts | None
    expert_places = EXPERT_PLACES
    keeps_expert_blocks = True

    def __init__(self, tile_size: int = TILE, row_slab: int = 0) -> None:
        super().__init__(tile_size, row_slab)
        library = native_library()
        if not _is_right(library):
            library = native_library(with_tiles=False)
        self._library = library
        self.libraries = Path(library._name).stem  # stands for its instructions, its sources and its compiler
        self.instructions = _instructions(library)
        self.slower = _why_lower(self.instructions)
        products = NativeProducts(library)
        self.quantised = products if products.is_available else None
        has_bfloat16 = self.instructions in (AMX, "avx512_bf16") and not has_fast_bfloat16(processor_flags())
        self._packs_bfloat16 = self.quantised is not None and has_bfloat16
        self._can_attend: dict[tuple[torch.dtype, int, int], bool] = {}
        self._attend = library.penstock_attend
        self._attend.argtypes = [_int, _long, _pointer, _pointer, _long, _pointer, _int]
        self._norm = library.penstock_norm
        self._norm.argtypes = [_int, _pointer, _pointer, *[_long] * 5, _pointer, _int, _float, _int]
        self._add_norm = library.penstock_add_norm
        self._add_norm.argtypes = [_int, *[_pointer] * 4, _long, _long, _pointer, _int, _float, _int]
        self._silu_and_mul = library.penstock_silu_and_mul
        self._silu_and_mul.argtypes = [_int, _pointer, _pointer, _long, _long, _int]
        self._place_heads = library.penstock_place_heads
        self._place_heads.argtypes = [_int, _pointer]
        for function in (self._norm, self._add_norm, self._silu_and_mul, self._place_heads):
            function.restype = None

    def memory_kind(self, dtype: torch.dtype, head_dim: int) -> KernelKind:
        return (
            "native" if self.can_attend(dtype, head_dim) else "torch"
        )  # what it has no code for is left to torch

    def can_attend(self, dtype: torch.dtype, head_dim: int, value_dim: int | None = None) -> bool:
        """Whether the library has code for such heads, whose values are as large as their keys unless said."""
        key = (dtype, head_dim, value_dim or head_dim)
        if key not in self._can_attend:
            # Without spans, it does nothing but tell.
            heads = _Heads(value_dim=key[2])
            self._can_attend[key] = dtype in _DTYPES and bool(
                self._attend(dtype == torch.bfloat16, head_dim, ctypes.byref(heads), None, 0, None, 1)
            )
        return self._can_attend[key]

    def pack(self, weight: Tensor) -> Weight:
        # Pieces of a product are then claimed by threads: none waits for one that the system has put aside.
        if self._packs_bfloat16 and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0:
            assert self.quantised is not None
            return self.quantised.packed(weight, PACKED)
        return super().pack(weight)

    def round_rows(self) -> bool:
        if self.quantised is None:
            return False
        self.quantised.rounds_rows, self.activations = True, "int8"
        return True

    def unpacked_bytes(self, weight: Weight) -> int:
        is_rounded = isinstance(weight, QuantisedWeight) and weight.rounds_rows
        return round(ROUNDED_ROWS * ROUNDED_BYTES * weight.shape[1]) if is_rounded else 0

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, is_canonical: bool = True
    ) -> Tensor:
        if self.quantised is None or not isinstance(weight, QuantisedWeight):
            return super().linear(x, weight, bias, is_canonical=is_canonical)
        return self.quantised.linear(x, weight, bias, is_canonical)

    def dense_layers(self, layers: Sequence[DenseLayer]) -> NativeLayers | None:
        if self.quantised is None or not self.can_attend(torch.bfloat16, layers[0].heads.head_dim):
            return None
        return NativeLayers(self._library, layers)

    def stacks_experts(self, dtype: torch.dtype, activation: ElementWise | None = None) -> bool:
        if self.quantised is None or dtype != torch.bfloat16 or activation is not None:
            return False
        return not has_fast_bfloat16(processor_flags())  # then torch's are several times faster

    def stacked_experts(
        self,
        router: Router,
        gate_up: Weight,
        down: Weight,
        activation: ElementWise | None = None,
    ) -> GroupedExperts:
        assert self.quantised is not None
        assert activation is None
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        packed = self.quantised.packed
        return self.quantised_experts(router, [*map(packed, gate_up)], [*map(packed, down)])

    def quantised_experts(
        self, router: Router, gate_up: Sequence[QuantisedWeight], down: Sequence[QuantisedWeight]
    ) -> GroupedExperts:
        return NativeExperts(self._library, router, tuple(gate_up), tuple(down))

    def embed(self, token_ids: Tensor, embedding: Weight) -> Tensor:
        if self.quantised is None or not isinstance(embedding, QuantisedWeight):
            return super().embed(token_ids, embedding)
        return self.quantised.rows(embedding, token_ids, torch.bfloat16)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in _DTYPES or x.stride(-1) != 1 or x.dim() not in (2, 3):
            return super().rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        num_parts, part_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        self._norm(
            x.dtype == torch.bfloat16,
            x.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            num_parts,
            x.stride(0),
            part_stride,
            x.shape[-1],
            weight.data_ptr(),
            weight.dtype == torch.float32,
            eps,
            native_threads(),
        )
        return out

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor,
        weight: Tensor,
        eps: float,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if x.dtype not in _DTYPES:
            return super().add_norm(x, delta, weight, eps, into)
        x, delta = x.contiguous(), delta.contiguous()
        total, normed = into or (torch.empty_like(x), torch.empty_like(x))
        self._add_norm(
            x.dtype == torch.bfloat16,
            x.data_ptr(),
            delta.data_ptr(),
            total.data_ptr(),
            normed.data_ptr(),
            x.shape[0],
            x.shape[1],
            weight.data_ptr(),
            weight.dtype == torch.float32,
            eps,
            native_threads(),
        )
        return total, normed

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in _DTYPES:
            return super().silu_and_mul(gate_up)
        gate_up = gate_up.contiguous()
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype)
        is_bfloat16 = gate_up.dtype == torch.bfloat16
        self._silu_and_mul(is_bfloat16, gate_up.data_ptr(), out.data_ptr(), *out.shape, native_threads())
        return out

    def place_heads(
        self, projected: Tensor, heads: HeadLayout, cos: Tensor, sin: Tensor, kv: KV, places: WrittenPlaces
    ) -> Tensor:
        if projected.dtype not in _DTYPES or heads.head_dim > _MOST_HEAD_DIM:
            return super().place_heads(projected, heads, cos, sin, kv, places)
        queries = torch.empty((projected.shape[0], heads.num_heads, heads.head_dim), dtype=projected.dtype)
        query_norm, key_norm = heads.query_norm, heads.key_norm
        rows = _HeadRows(
            projected.data_ptr(),
            queries.data_ptr(),
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            places.array.ctypes.data,
            projected.shape[0],
            places.num_tokens,
            projected.stride(0),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            cos.shape[1],
            query_norm is not None and query_norm.dtype == torch.float32,
            native_threads(),
            heads.norm_eps,
        )
        self._place_heads(projected.dtype == torch.bfloat16, ctypes.byref(rows))
        return queries

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        num_heads, head_dim = x.shape[1:]
        are_rows = x.stride()[1:] == (head_dim, 1) and cos.is_contiguous() and sin.is_contiguous()
        if x.dtype not in _DTYPES or head_dim > _MOST_HEAD_DIM or not are_rows:
            return super().rotate(x, cos, sin)
        rows = x.as_strided((len(x), num_heads * head_dim), (x.stride(0), 1))
        return self.place_heads(
            rows, HeadLayout(num_heads, 0, head_dim), cos, sin, KV(x, x), WrittenPlaces(())
        )

    def attend(self, queries: Tensor, work: AttentionWork, kv: KV, scoring: Scoring) -> Tensor:
        head_dim, value_dim = queries.shape[2], kv.values.shape[2]
        if not self.can_attend(queries.dtype, head_dim, value_dim):
            return super().attend(queries, work, kv, scoring)
        out = torch.empty((queries.shape[0], queries.shape[1] * value_dim), dtype=queries.dtype)
        num_kv_heads = kv.keys.shape[1]
        heads = _Heads(
            queries.data_ptr(),
            out.data_ptr(),
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            queries.stride(0),
            out.stride(0),
            kv.keys.stride(0),
            kv.values.stride(0),
            num_kv_heads,
            queries.shape[1] // num_kv_heads,
            value_dim,
            scoring.window,
            None if scoring.sinks is None else scoring.sinks.data_ptr(),
            scoring.scale,
            scoring.soft_cap,
        )
        spans, places = work.arrays
        self._attend(
            queries.dtype == torch.bfloat16,
            head_dim,
            ctypes.byref(heads),
            spans.ctypes.data,
            len(spans),
            places.ctypes.data,
            native_threads(),
        )
        if work.end < out.shape[0]:
            out[work.end :] = 0
        return out
