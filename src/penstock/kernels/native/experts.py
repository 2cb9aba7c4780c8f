"""The experts of a layer as one call of the native library."""

import ctypes
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from penstock.kernels.elementwise import in_shares
from penstock.kernels.experts import Router, route
from penstock.kernels.native.quantised import WeightStruct, struct_of
from penstock.kernels.quantised import BFLOAT16, QuantisedWeight, Weight
from penstock.kernels.threads import native_threads
from penstock.plan.grids import EXPERT_PLACES

_pointer, _int, _long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_sigmoid = partial(in_shares, torch.ops.aten.sigmoid.out)


class _Experts(ctypes.Structure):
    _fields_ = (("gate_up", _pointer), ("down", _pointer), ("num_experts", _long), ("num_active", _long))


class _Pass(ctypes.Structure):
    _fields_ = (
        ("x", _pointer),
        ("chosen", _pointer),
        ("weights", _pointer),
        ("shared", _pointer),
        ("gates", _pointer),
        ("out", _pointer),
        ("totals", _pointer),
        ("room", _pointer),
        ("num_rows", _long),
        ("num_places", _long),
        ("shared_stride", _long),
        ("is_canonical", _int),
        ("num_threads", _int),
    )


@dataclass(frozen=True)
class NativeExperts:
    """`GroupedExperts` with silu, whose weights are in panels."""

    library: ctypes.CDLL
    router: Router
    gate_up: tuple[QuantisedWeight, ...]  # [2 * width, hidden] of each
    down: tuple[QuantisedWeight, ...]  # [hidden, width]

    @property
    def one(self) -> tuple[Weight, Weight]:
        return self.gate_up[0], self.down[0]

    @property
    def has_own_law(self) -> bool:
        return self.down[0].form is BFLOAT16

    @cached_property
    def _tables(self) -> tuple[ctypes.Array[WeightStruct], ...]:
        weights = (self.gate_up, self.down)
        return tuple((WeightStruct * len(each))(*map(struct_of, each)) for each in weights)

    @cached_property
    def _struct(self) -> _Experts:
        tables = map(ctypes.addressof, self._tables)
        config = self.router.config
        return _Experts(*tables, config.num_experts, config.num_active)

    def run(self, x: Tensor, scores: Tensor, shared: Tensor | None, *, is_canonical: bool = True) -> Tensor:
        config, (num_rows, hidden) = self.router.config, x.shape
        wide = scores.float()
        weights, chosen = route(wide[:, : config.num_experts].contiguous(), self.router, _sigmoid)
        gates = None
        if shared is not None and config.shared_gate:
            gates = _sigmoid(wide[:, config.num_experts :])[:, 0].contiguous()
        x, out = x.contiguous(), torch.empty((num_rows, hidden), dtype=x.dtype)
        num_places = min(max(EXPERT_PLACES, num_rows), chosen.numel())
        room = torch.empty(num_places, 2 * hidden + 3 * self.down[0].shape[1], dtype=x.dtype)
        totals = torch.empty((num_rows, hidden), dtype=torch.float32)
        self.library.penstock_experts(
            ctypes.byref(self._struct),
            ctypes.byref(
                _Pass(
                    x.data_ptr(),
                    chosen.data_ptr(),
                    weights.data_ptr(),
                    None if shared is None else shared.data_ptr(),
                    None if gates is None else gates.data_ptr(),
                    out.data_ptr(),
                    totals.data_ptr(),
                    room.data_ptr(),
                    num_rows,
                    num_places,
                    0 if shared is None else shared.stride(0),
                    is_canonical,
                    native_threads(),
                )
            ),
        )
        return out
