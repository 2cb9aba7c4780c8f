"""The native library's work with quantised weights: products, and all layers of a decode as one call."""

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.cache.tensors import KV
from penstock.kernels.quantised import (
    BFLOAT16,
    BLOCK_FORMS,
    GROUP,
    BlockForm,
    DenseLayer,
    DenseProduct,
    QuantisedWeight,
)
from penstock.kernels.spans import AttentionWork, WrittenPlaces
from penstock.kernels.threads import native_threads
from penstock.plan.grids import VECTOR_BYTES

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


PANEL = 32  # outputs that lie together


class WeightStruct(ctypes.Structure):
    _fields_ = (
        ("panels", _pointer),
        ("num_out", _long),
        ("num_in", _long),
        ("form", _int),
        ("rounds_rows", _int),
    )


class NativeProducts:
    """Makes quantised weights, and multiplies with them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._bytes = library.penstock_quantised_bytes
        self._bytes.argtypes, self._bytes.restype = [_pointer], _long
        self._pack = library.penstock_quantised_pack
        self._pack.argtypes, self._pack.restype = [_pointer, _pointer, *[_long] * 3, _pointer, _int], None
        self._rows = library.penstock_quantised_rows
        self._rows.argtypes = [_pointer, _pointer, _long, _int, _pointer, _int]
        self._linear = library.penstock_quantised_linear
        self._linear.argtypes = [*[_pointer] * 4, *[_long] * 3, _int, _int]
        # Without rows, it does nothing but tell.
        self.is_available = bool(self._linear(ctypes.byref(WeightStruct()), None, None, None, 0, 0, 0, 0, 1))
        # Of weights that are made from now on: rows are rounded to 8 bits by group before they are multiplied.
        self.rounds_rows = False

    def takes(self, form: BlockForm, device: torch.device) -> bool:
        """Whether there are kernels for such weights."""
        return form.name in BLOCK_FORMS

    def zeros(
        self, form: BlockForm, num_out: int, num_in: int, device: torch.device | None = None
    ) -> QuantisedWeight:
        """A weight [out, in] of zeros, to be filled by `place`; inputs in whole groups. There is but one device."""
        if num_in % GROUP:
            raise ValueError(f"{num_in} inputs are not a multiple of {GROUP}")
        num_bytes = self._bytes(ctypes.byref(WeightStruct(None, num_out, num_in, form.number)))
        # The system has zeros, which it gives when they are written over: nobody else needs to write them before.
        room = torch.from_numpy(np.zeros(num_bytes + VECTOR_BYTES, np.uint8))
        start = -room.data_ptr() % VECTOR_BYTES
        panels = room[start : start + num_bytes]
        return QuantisedWeight(form, (num_out, num_in), panels, self.rounds_rows)

    def packed(self, weight: Tensor, form: BlockForm = BFLOAT16) -> QuantisedWeight:
        """A weight [out, in] of bfloat16 in panels, which products need not make so."""
        num_out, num_in = weight.shape
        pairs = weight.contiguous().view(torch.int32)
        num_whole, rest = divmod(num_out, PANEL)
        panels = pairs.new_empty(num_whole + (rest > 0), num_in // 2, PANEL)
        end = num_whole * PANEL
        panels[:num_whole] = pairs[:end].view(num_whole, PANEL, num_in // 2).transpose(1, 2)
        if rest:
            panels[num_whole] = torch.nn.functional.pad(pairs[end:].t(), (0, PANEL - rest))
        return QuantisedWeight(form, (num_out, num_in), panels.flatten().view(torch.uint8))

    def place(self, weight: QuantisedWeight, outputs: Tensor, blocks: Tensor) -> None:
        """Rows of blocks [rows, bytes] become those `outputs` [rows]; inputs that they do not have stay zero."""
        num_rows, row_bytes = blocks.shape
        num_in = row_bytes // weight.form.block_bytes * weight.form.block_size
        if outputs.shape != (num_rows,) or num_in > weight.shape[1]:
            raise ValueError(
                f"{num_rows} rows of {num_in} inputs are not {outputs.shape[0]} outputs of {weight.shape}"
            )
        if num_rows and not 0 <= int(outputs.min()) <= int(outputs.max()) < weight.shape[0]:
            raise ValueError(f"outputs up to {int(outputs.max())} are not among {weight.shape[0]}")
        blocks, outputs = blocks.contiguous(), outputs.contiguous()
        self._pack(
            _address(weight),
            blocks.data_ptr(),
            num_rows,
            row_bytes,
            num_in,
            outputs.data_ptr(),
            native_threads(),
        )

    def rows(self, weight: QuantisedWeight, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [n, in] of the weight, those of the outputs [n]."""
        out = torch.empty((outputs.shape[0], weight.shape[1]), dtype=dtype)
        if not self._rows(
            _address(weight),
            outputs.contiguous().data_ptr(),
            outputs.shape[0],
            dtype == torch.bfloat16,
            out.data_ptr(),
            native_threads(),
        ):
            raise IndexError(f"outputs {outputs.tolist()} are not all among {weight.shape[0]}")
        return out

    def linear(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None, is_canonical: bool) -> Tensor:
        """x [rows, in] of bfloat16 times a weight, plus bias [out]."""
        if x.dtype != torch.bfloat16 or x.shape[1] != weight.shape[1]:
            raise ValueError(f"rows are {x.dtype} {list(x.shape)}, not bfloat16 of {weight.shape[1]} inputs")
        if x.stride(1) != 1 or x.stride(0) % 2:  # inputs are read in pairs
            x = x.contiguous()
        num_rows = x.shape[0]
        out = torch.empty((num_rows, weight.shape[0]), dtype=torch.bfloat16)
        self._linear(
            _address(weight),
            x.data_ptr(),
            out.data_ptr(),
            None if bias is None else bias.data_ptr(),
            num_rows,
            x.stride(0),
            out.stride(0),
            is_canonical,
            native_threads(),
        )
        return out

    def are_right(self) -> bool:
        """Whether products of whole numbers are exact, as they are in any order of sums: from one row up, with more
        panels than threads."""
        generator = torch.Generator().manual_seed(0)
        x, weight = (
            torch.randint(-8, 9, (size, 3 * GROUP), generator=generator).bfloat16() for size in (75, 1100)
        )
        exact, packed = (x.float() @ weight.float().T).bfloat16(), self.packed(weight)
        return all(
            torch.equal(self.linear(x[:count], packed, None, is_canonical=True), exact[:count])
            for count in (1, 15, 16, 17, 32, 33, 75)
        )


def struct_of(weight: QuantisedWeight) -> WeightStruct:
    """What the library is told of a weight; it does not keep the weight's memory."""
    return WeightStruct(weight.panels.data_ptr(), *weight.shape, weight.form.number, weight.rounds_rows)


def _address(weight: QuantisedWeight) -> int:
    if weight not in _STRUCTS:
        _STRUCTS[weight] = struct_of(weight)
    return ctypes.addressof(_STRUCTS[weight])


# Made once for a weight, and kept as long.
_STRUCTS: WeakKeyDictionary[QuantisedWeight, WeightStruct] = WeakKeyDictionary()


class _Product(ctypes.Structure):
    _fields_ = (("parts", ctypes.POINTER(WeightStruct)), ("num_parts", _long), ("bias", _pointer))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", _Product),
        ("out", _Product),
        ("gate_up", _Product),
        ("down", _Product),
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
    return _Layer(
        *map(_product_struct, (layer.qkv, layer.out, layer.gate_up, layer.down)),
        *map(_pointer_to, (layer.heads.query_norm, layer.heads.key_norm, layer.mlp_norm, layer.next_norm)),
    )


def _product_struct(product: DenseProduct) -> _Product:
    parts = (WeightStruct * len(product.parts))(*map(struct_of, product.parts))
    return _Product(parts, len(parts), _pointer_to(product.bias))


def _pointer_to(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
