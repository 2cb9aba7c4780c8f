"""The experts of a layer as one call of the native library."""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from penstock.kernels.experts import Router
from penstock.kernels.native.quantised import WeightStruct, struct_of
from penstock.kernels.quantised import BFLOAT16, QuantisedWeight, Weight
from penstock.kernels.threads import native_threads
from penstock.plan.grids import EXPERT_PLACES

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class ExpertsStruct(ctypes.Structure):
    _fields_ = (
        ("gate_up", _pointer),
        ("down", _pointer),
        ("choice_bias", _pointer),
        ("expert_scales", _pointer),
        ("num_experts", _long),
        ("num_active", _long),
        ("num_groups", _long),
        ("num_active_groups", _long),
        ("group_best", _long),
        ("is_softmax", _int),
        ("is_normalised", _int),
        ("gates_shared", _int),
        ("scale", _float),
        ("most_places", _long),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        ("x", _pointer),
        ("scores", _pointer),
        ("shared", _pointer),
        ("out", _pointer),
        ("totals", _pointer),
        ("room", _pointer),
        ("num_rows", _long),
        ("score_stride", _long),
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
    def struct(self) -> ExpertsStruct:
        """What the library is told of them; it does not keep their memory."""
        router, config = self.router, self.router.config
        given = (router.choice_bias, router.expert_scales)
        return ExpertsStruct(
            *map(ctypes.addressof, self._tables),
            *(None if each is None else each.data_ptr() for each in given),
            config.num_experts,
            config.num_active,
            config.num_groups,
            config.num_active_groups,
            config.group_best,
            config.scores == "softmax",
            config.normalised,
            config.shared_gate,
            config.scale,
            EXPERT_PLACES,
        )

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers [rows, active] of the experts that each row goes to, as `run` finds them."""
        shape = (len(scores), self.router.config.num_active)
        weights, chosen = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
        function = self.library.penstock_route
        function.argtypes = [_pointer, _pointer, _long, _long, _pointer, _pointer, _int]
        function(
            ctypes.addressof(self.struct),
            scores.data_ptr(),
            len(scores),
            scores.stride(0),
            chosen.data_ptr(),
            weights.data_ptr(),
            native_threads(),
        )
        return weights, chosen

    def run(self, x: Tensor, scores: Tensor, shared: Tensor | None, *, is_canonical: bool = True) -> Tensor:
        num_rows, hidden = x.shape
        x, out = x.contiguous(), torch.empty((num_rows, hidden), dtype=x.dtype)
        num_places = min(num_rows * self.router.config.num_active, max(num_rows, EXPERT_PLACES))
        room = torch.empty(num_places, 2 * hidden + 3 * self.down[0].shape[1], dtype=x.dtype)
        totals = torch.empty((num_rows, hidden), dtype=torch.float32)
        self.library.penstock_experts(
            ctypes.byref(self.struct),
            ctypes.byref(
                _Pass(
                    x.data_ptr(),
                    scores.data_ptr(),
                    None if shared is None else shared.data_ptr(),
                    out.data_ptr(),
                    totals.data_ptr(),
                    room.data_ptr(),
                    num_rows,
                    scores.stride(0),
                    0 if shared is None else shared.stride(0),
                    is_canonical,
                    native_threads(),
                )
            ),
        )
        return out
