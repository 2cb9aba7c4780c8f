"""All layers of a decode as one call of the native library."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.cache.tensors import KV
from penstock.kernels.native.experts import NativeExperts
from penstock.kernels.native.quantised import WeightStruct, struct_of
from penstock.kernels.quantised import DenseLayer, DenseProduct
from penstock.kernels.spans import AttentionWork, WrittenPlaces
from penstock.kernels.threads import native_threads

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _Product(ctypes.Structure):
    _fields_ = (("parts", ctypes.POINTER(WeightStruct)), ("num_parts", _long), ("bias", _pointer))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", _Product),
        ("out", _Product),
        ("gate_up", _Product),
        ("down", _Product),
        ("router", _Product),
        ("experts", _pointer),
        ("query_norm", _pointer),
        ("key_norm", _pointer),
        ("mlp_norm", _pointer),
        ("next_norm", _pointer),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        ("x", _pointer),
        ("normed", _pointer),
        ("cos", _pointer),
        ("sin", _pointer),
        ("keys", _pointer),
        ("values", _pointer),
        ("written", _pointer),
        ("spans", _pointer),
        ("places", _pointer),
        ("num_spans", _long),
        ("num_rows", _long),
        ("num_heads", _long),
        ("num_kv_heads", _long),
        ("head_dim", _long),
        ("rotary_dim", _long),
        ("norm_is_float32", _int),
        ("num_threads", _int),
        ("eps", _float),
        ("scale", _float),
        ("spent", _pointer),
    )


class NativeLayers:
    """All layers of a model as one call, for steps of a few rows."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[DenseLayer]) -> None:
        self._run = library.penstock_run_layers
        self._run.argtypes, self._run.restype = [_pointer, _long, _pointer], None
        self._layers = tuple(layers)  # keeps what the table points to
        self._table = (_Layer * len(layers))(*map(_layer_struct, layers))
        # Nanoseconds of products, attention and the rest, added up where somebody wants to know.
        self.spent: npt.NDArray[np.int64] | None = None

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
        heads = self._layers[0].heads
        pointers = _pointer * len(caches)
        spans, span_places = work.arrays
        step = _Pass(
            x.data_ptr(),
            normed.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            ctypes.addressof(keys := pointers(*[kv.keys.data_ptr() for kv in caches])),
            ctypes.addressof(values := pointers(*[kv.values.data_ptr() for kv in caches])),
            places.array.ctypes.data,
            spans.ctypes.data,
            span_places.ctypes.data,
            len(spans),
            x.shape[0],
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            cos.shape[1],
            self._layers[0].mlp_norm.dtype == torch.float32,
            native_threads(),
            heads.norm_eps,
            heads.head_dim**-0.5,
            None if self.spent is None else self.spent.ctypes.data,
        )
        self._run(self._table, len(self._layers), ctypes.byref(step))
        del keys, values  # until now, the call has read them
        return normed


def _layer_struct(layer: DenseLayer) -> _Layer:
    products = (layer.qkv, layer.out, layer.gate_up, layer.down, layer.router)
    norms = (layer.heads.query_norm, layer.heads.key_norm, layer.mlp_norm, layer.next_norm)
    experts = ctypes.addressof(layer.experts.struct) if isinstance(layer.experts, NativeExperts) else None
    return _Layer(*map(_product_struct, products), experts, *map(_pointer_to, norms))


def _product_struct(product: DenseProduct | None) -> _Product:
    if product is None:
        return _Product()
    parts = (WeightStruct * len(product.parts))(*map(struct_of, product.parts))
    return _Product(parts, len(parts), _pointer_to(product.bias))


def _pointer_to(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
