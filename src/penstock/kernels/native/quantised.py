"""The native library's products with quantised weights."""

import ctypes
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.quantised import (
    BFLOAT16,
    BLOCK_FORMS,
    GROUP,
    BlockForm,
    QuantisedWeight,
)
from penstock.kernels.threads import native_threads
from penstock.plan.grids import VECTOR_BYTES

_pointer, _int, _long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


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
