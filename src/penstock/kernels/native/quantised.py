"""The native library's products with quantised weights."""

import ctypes
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from penstock.kernels.quantised import GROUP, BlockForm, QuantisedWeight

_pointer, _int, _long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class WeightStruct(ctypes.Structure):
    _fields_ = (
        ("panels", _pointer),
        ("num_out", _long),
        ("num_in", _long),
        ("form", ctypes.c_int32),
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

    def zeros(self, form: BlockForm, num_out: int, num_in: int) -> QuantisedWeight:
        """A weight [out, in] of zeros, to be filled by `place`; inputs in whole groups."""
        if num_in % GROUP:
            raise ValueError(f"{num_in} inputs are not a multiple of {GROUP}")
        num_bytes = self._bytes(ctypes.byref(WeightStruct(None, num_out, num_in, form.number)))
        return QuantisedWeight(form, (num_out, num_in), torch.zeros(num_bytes, dtype=torch.uint8))

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
            torch.get_num_threads(),
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
            torch.get_num_threads(),
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
            torch.get_num_threads(),
        )
        return out


def struct_of(weight: QuantisedWeight) -> WeightStruct:
    """What the library is told of a weight; it does not keep the weight's memory."""
    return WeightStruct(weight.panels.data_ptr(), *weight.shape, weight.form.number)


def _address(weight: QuantisedWeight) -> int:
    if weight not in _STRUCTS:
        _STRUCTS[weight] = struct_of(weight)
    return ctypes.addressof(_STRUCTS[weight])


# Made once for a weight, and kept as long.
_STRUCTS: WeakKeyDictionary[QuantisedWeight, WeightStruct] = WeakKeyDictionary()
