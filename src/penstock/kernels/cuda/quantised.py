"""Weights that stay quantised on a GPU: from a file's blocks to words that load fast, and products with those."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from penstock.kernels.cuda import fp8
from penstock.kernels.cuda.launch import early
from penstock.kernels.cuda.launch_sizes import Launch, shared_out, summed
from penstock.kernels.device import device_kind
from penstock.kernels.quantised import (
    FLOAT_FORMS,
    GROUP,
    HOST_FORMS,
    LEVELS,
    BlockForm,
    QuantisedWeight,
    Weight,
)
from penstock.kernels.triton.blocks import block_row_kernel, block_rows_kernel, block_values_kernel
from penstock.plan.grids import GPU_HEAD_ROWS

# Up to so many rows, blocks are multiplied as they lie; beyond, they are made values first.
MOST_ROWS = 64
_FLOAT8_CAPABILITY = (8, 9)  # that has units for 8-bit floats
_WHOLE = 256  # inputs to a scale of scales
_ALIGNED = 16  # bytes


class _Unpacked(NamedTuple):
    """Rows of blocks: quants [rows, inputs] from 0 up; bytes of each group that its scale is made of [rows, groups *
    bytes]; of each 256 inputs, those that scales are multiples of."""

    quants: Tensor
    factors: Tensor
    wholes: Tensor | None = None


@dataclass(frozen=True)
class _Layout:
    """How a form lies in a GPU's memory, as `triton/blocks.py` reads it."""

    bits: int
    factor: torch.dtype  # what a group's scale is made of
    unpack: Callable[[Tensor], _Unpacked]
    group: int = GROUP
    has_wholes: bool = False
    like: str = ""  # the form whose layout it is, if not its own

    @property
    def slots(self) -> int:
        """Quants to a word, and groups to a tile."""
        return 2 if self.bits == 8 else 4

    @property
    def part(self) -> int:
        """Inputs to two tiles."""
        return 2 * self.slots * self.group

    @property
    def high(self) -> torch.dtype | None:
        """Of the bits of quants that words have no room for."""
        return {5: torch.uint8, 6: torch.int16}.get(self.bits)

    def planes(self, num_out: int, num_in: int) -> list[tuple[torch.dtype, int]]:
        """Of each plane of a weight, in the order of `_Planes`, its dtype and how many numbers it has."""
        num_parts = -(-num_in // self.part)
        counts = (
            (torch.int16, num_parts * 2 * self.group),
            (self.high or torch.uint8, num_parts * self.group if self.high else 0),
            (self.factor, num_parts * 2 * self.slots),
            (torch.int32, -(-num_in // _WHOLE) if self.has_wholes else 0),
        )
        return [(dtype, num_out * count) for dtype, count in counts]

    @property
    def constants(self) -> dict[str, Any]:
        return {"BITS": self.bits, "GROUP": self.group}


def _aligned(dtype: torch.dtype, count: int) -> int:
    return -(-count * dtype.itemsize // _ALIGNED) * _ALIGNED


# From a file's blocks [rows, blocks, bytes]


def _split(last: Tensor, *sizes: int) -> Tensor:
    return last.reshape(*last.shape[:-1], *sizes)


def _padded(rows: Tensor, size: int) -> Tensor:
    """With zeros after them, to a multiple of a size."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % size))


def _nibbles(both: Tensor) -> Tensor:
    """Low ones, then high ones, of bytes [..., n]."""
    return torch.cat((both & 15, both >> 4), dim=-1)


def _unpack_q4_0(blocks: Tensor) -> _Unpacked:
    return _Unpacked(_nibbles(blocks[..., 2:]), blocks[..., :2])


def _unpack_q4_1(blocks: Tensor) -> _Unpacked:
    return _Unpacked(_nibbles(blocks[..., 4:]), blocks[..., :4])


def _unpack_q8_0(blocks: Tensor) -> _Unpacked:
    return _Unpacked(blocks[..., 2:] ^ 128, blocks[..., :2])


def _k_scales(packed: Tensor) -> Tensor:
    """Eight pairs of a scale and a minimum of 6 bits, out of 12 bytes [..., 12]."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return torch.stack((scales, minimums), dim=-1).flatten(-2)


def _k_quants(found: Tensor) -> Tensor:
    """Nibbles of groups two by two, out of 128 bytes [..., 128]."""
    return _nibbles(_split(found, 4, 32)).flatten(-2)


def _unpack_q4_k(blocks: Tensor) -> _Unpacked:
    return _Unpacked(_k_quants(blocks[..., 16:]), _k_scales(blocks[..., 4:16]), blocks[..., :4])


def _unpack_q5_k(blocks: Tensor) -> _Unpacked:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[..., None, 16:48] >> shifts & 1).flatten(-2)
    quants = _k_quants(blocks[..., 48:]) | fifth << 4
    return _Unpacked(quants, _k_scales(blocks[..., 4:16]), blocks[..., :4])


def _fifths(found: Tensor) -> Tensor:
    """32 bits of bytes [..., 4]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=found.device)
    return (found[..., None] >> shifts & 1).flatten(-2)


def _unpack_q5_0(blocks: Tensor) -> _Unpacked:
    quants = _nibbles(blocks[..., 6:]) | _fifths(blocks[..., 2:6]) << 4
    return _Unpacked(quants + (128 - 16), blocks[..., :2])


def _unpack_iq4_nl(blocks: Tensor) -> _Unpacked:
    levels = torch.tensor([level + 128 for level in LEVELS], dtype=torch.uint8, device=blocks.device)
    return _Unpacked(levels[_nibbles(blocks[..., 2:]).long()], blocks[..., :2])


def _unpack_q3_k(blocks: Tensor) -> _Unpacked:
    """256 third bits, then 2 bits of each, then 16 scales of 6 bits."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    thirds = (blocks[..., None, :32] >> shifts & 1).flatten(-2)
    quants = (_split(blocks[..., 32:96], 2, 1, 32) >> shifts[::2] & 3).flatten(-3) | thirds << 2
    high = (blocks[..., None, 104:108] >> shifts[::2] & 3).flatten(-2)
    scales = (_nibbles(blocks[..., 96:104]) | high << 4) - 32  # with a sign
    return _Unpacked(quants + (32 - 4), scales, torch.nn.functional.pad(blocks[..., 108:], (0, 2)))


def _unpack_q6_k(blocks: Tensor) -> _Unpacked:
    low, high = _split(blocks[..., :128], 2, 64), _split(blocks[..., 128:192], 2, 1, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    quants = _nibbles(low) | (high >> shifts & 3).flatten(-2) << 4  # [..., halves, 128]
    wholes = torch.nn.functional.pad(blocks[..., 208:], (0, 2))
    return _Unpacked(quants.flatten(-2), blocks[..., 192:208], wholes)


_LAYOUTS: Mapping[str, _Layout] = {
    "Q4_0": _Layout(4, torch.int16, _unpack_q4_0),
    "Q4_1": _Layout(4, torch.int32, _unpack_q4_1),
    "Q4_Z": _Layout(4, torch.int32, _unpack_q4_1),
    "Q8_0": _Layout(8, torch.int16, _unpack_q8_0),
    "Q4_K": _Layout(4, torch.int16, _unpack_q4_k, has_wholes=True),  # a scale and a minimum
    "Q5_K": _Layout(5, torch.int16, _unpack_q5_k, has_wholes=True),
    "Q6_K": _Layout(6, torch.int8, _unpack_q6_k, group=16, has_wholes=True),
    "Q5_0": _Layout(8, torch.int16, _unpack_q5_0, like="Q8_0"),
    "IQ4_NL": _Layout(8, torch.int16, _unpack_iq4_nl, like="Q8_0"),
    "Q3_K": _Layout(6, torch.int8, _unpack_q3_k, group=16, has_wholes=True, like="Q6_K"),
}


def _num_bytes(form: BlockForm, num_out: int, num_in: int) -> int:
    return sum(_aligned(dtype, count) for dtype, count in _LAYOUTS[form.name].planes(num_out, num_in))


class _Planes(NamedTuple):
    """A weight's parts, in one piece of memory; rows are outputs."""

    quants: Tensor
    high: Tensor | None
    factors: Tensor
    wholes: Tensor | None


# Made once for a weight, and kept as long.
_PLANES: WeakKeyDictionary[QuantisedWeight, _Planes] = WeakKeyDictionary()


def _planes(weight: QuantisedWeight) -> _Planes:
    if weight not in _PLANES:
        found: list[Tensor | None] = []
        start, panels = 0, weight.panels
        for dtype, count in _LAYOUTS[weight.form.name].planes(*weight.shape):
            part = panels[start : start + count * dtype.itemsize].view(dtype)
            found.append(part.view(weight.shape[0], -1) if count else None)
            start += _aligned(dtype, count)
        _PLANES[weight] = _Planes(*found)  # type: ignore[arg-type]
    return _PLANES[weight]


class Operand(NamedTuple):
    """A weight as a kernel takes it: values or words, what belongs to them, and what they are."""

    tensors: tuple[Tensor | None, ...]
    constants: dict[str, Any]


def operand(weight: Weight) -> Operand:
    if isinstance(weight, Tensor):
        return Operand((weight, None, None, None), _NO_BLOCKS | {"FORM": ""})
    name = weight.form.name
    if weight.form in FLOAT_FORMS:
        values, scales = fp8.parts(weight)
        return Operand((values, None, scales, None), _NO_BLOCKS | {"FORM": name})
    layout = _LAYOUTS[name]
    return Operand(_planes(weight), layout.constants | {"FORM": layout.like or name})


_NO_BLOCKS = {"BITS": 0, "GROUP": GROUP}
_VALUES = Launch(16, 256, 1, 4)
# Up to so many rows, quants are multiplied before they have their scales.
_MOST_UNSCALED = 4
_UNSCALED_OUTPUTS = 16  # of a program
# Of a row alone, by its outputs at least: a program's warps, and whether each loads two parts at once. All programs
# of a small product run at the same time.
_ROW_WARPS = {5120: (4, True), 2048: (8, True), 0: (16, False)}
_PAIR_WARPS = 8, True  # likewise, of two weights side by side
_ROWS = Launch(128, 256, 1, 4, least_programs=396)
_LEAST_ROWS = 8  # the matrix units take no fewer


class GpuProducts:
    """Makes quantised weights on a GPU, and multiplies with them, as `NativeProducts` does on a processor."""

    def takes(self, form: BlockForm, device: torch.device) -> bool:
        """Whether there are kernels for such weights there."""
        capability = device_kind(device).capability
        is_known = form not in FLOAT_FORMS or capability is None or capability >= _FLOAT8_CAPABILITY
        return is_known and form not in HOST_FORMS

    def zeros(
        self, form: BlockForm, num_out: int, num_in: int, device: torch.device | None = None
    ) -> QuantisedWeight:
        """A weight [out, in] of zeros, to be filled by `place`; inputs in whole groups."""
        if num_in % max(GROUP, form.block_size):
            raise ValueError(f"{num_in} inputs are not a multiple of {max(GROUP, form.block_size)}")
        is_float = form in FLOAT_FORMS
        num_bytes = (fp8.num_bytes if is_float else _num_bytes)(form, num_out, num_in)
        return QuantisedWeight(
            form, (num_out, num_in), torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        )

    def place(self, weight: QuantisedWeight, outputs: Tensor, blocks: Tensor) -> None:
        """Rows of blocks [rows, bytes] become those `outputs` [rows]; inputs that they do not have stay zero."""
        if weight.form in FLOAT_FORMS:
            fp8.place(weight, outputs, blocks)
            return
        layout, planes, device = _LAYOUTS[weight.form.name], _planes(weight), weight.panels.device
        outputs, blocks = outputs.to(device), blocks.to(device)
        found = layout.unpack(blocks.view(len(blocks), -1, weight.form.block_bytes))
        num_rows = len(blocks)
        # Tiles are whole: what is left of the last two is zero, and so are its scales.
        quants = _padded(found.quants.reshape(num_rows, -1), layout.part)
        groups = quants.view(num_rows, -1, 2 * layout.slots, layout.group)
        low = groups if layout.bits == 8 else groups[:, :, ::2] & 15 | groups[:, :, 1::2] << 4
        low = low.view(num_rows, -1, 2, layout.group).transpose(2, 3)  # bytes of a word
        high = None
        if layout.high is not None:
            shifts = torch.arange(0, 8 * (layout.bits - 4), layout.bits - 4, device=device)[:, None]
            high = ((groups >> 4).int() << shifts).sum(dim=2).to(layout.high)
        factors = _padded(found.factors.reshape(num_rows, -1), 2 * layout.slots * layout.factor.itemsize)
        for plane, part in zip(planes, (low, high, factors, found.wholes), strict=True):
            if plane is not None and part is not None:
                rows = part.contiguous().view(num_rows, -1).view(plane.dtype)
                plane[outputs, : rows.shape[1]] = rows

    def rows(self, weight: QuantisedWeight, outputs: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Rows [n, in] of the weight, those of the outputs [n], or all."""
        if weight.form in FLOAT_FORMS:
            return fp8.rows(weight, outputs, dtype)
        num_rows = weight.shape[0] if outputs is None else len(outputs)
        out = torch.empty(num_rows, weight.shape[1], dtype=dtype, device=weight.panels.device)
        layout = _LAYOUTS[weight.form.name]
        num_parts = triton.cdiv(weight.shape[1], layout.part)
        found = operand(weight)
        block_values_kernel[(triton.cdiv(num_rows, _VALUES.outputs), num_parts)](
            *found.tensors,
            outputs,
            out,
            num_rows,
            weight.shape[1],
            **found.constants,
            OUTPUTS=_VALUES.outputs,
            num_warps=_VALUES.warps,
        )
        return out

    def linear(
        self,
        x: Tensor,
        weight: QuantisedWeight,
        bias: Tensor | None,
        is_canonical: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """x [rows, in] of bfloat16 times a weight, plus bias [out]: a few rows as the weight lies, more by cuBLAS.
        Rows that are canonical are as many as the head has at a time, or more than a few."""
        num_rows, is_float = len(x), weight.form in FLOAT_FORMS
        if num_rows > (GPU_HEAD_ROWS if is_canonical else MOST_ROWS):
            multiply = fp8.multiply if is_float else self._multiply
            found = multiply(x, weight, bias)
            return found if out is None else out.copy_(found)
        out = x.new_empty(num_rows, weight.shape[0]) if out is None else out
        if not num_rows:
            return out
        x = x if x.stride(1) == 1 else x.contiguous()
        if is_float:
            fp8.multiply_few(x, weight, bias, out)
        elif num_rows <= _MOST_UNSCALED:
            _multiply_unscaled(x, weight, bias, out)
        else:
            _multiply_rows(x, weight, bias, out)
        return out

    def joins(self, parts: Sequence[Weight]) -> bool:
        """Whether `row_of_pair` takes such weights."""
        return len(parts) == 2 and all(
            isinstance(part, QuantisedWeight) and part.form not in FLOAT_FORMS for part in parts
        )

    def row_of_pair(self, x: Tensor, parts: Sequence[Weight], biases: Sequence[Tensor | None]) -> Tensor:
        """One row [1, in] times two weights, side by side."""
        out = x.new_empty(1, sum(part.shape[0] for part in parts))
        warps, is_double = _PAIR_WARPS
        first, second = (
            _row_operand(part, bias, warps, is_double)
            for part, bias in zip(parts, biases, strict=True)
            if isinstance(part, QuantisedWeight)
        )
        _launch_unscaled(x if x.stride(1) == 1 else x.contiguous(), first, second, out, warps)
        return out

    def _multiply(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        """With the weight's values, which take as much as they do in bfloat16 for that long."""
        return linear(x, self.rows(weight, None, x.dtype), bias)


@dataclass(frozen=True)
class _RowOperand:
    """A weight as `block_row_kernel` takes it."""

    tensors: tuple[Tensor | None, ...]
    num_out: int
    constants: dict[str, Any]


_NO_OPERAND = _RowOperand((None,) * 5, 0, _NO_BLOCKS | {"FORM": "", "IS_WHOLE": False, "IS_DOUBLE": False})


def _row_operand(weight: QuantisedWeight, bias: Tensor | None, warps: int, is_double: bool) -> _RowOperand:
    (num_out, num_in), found = weight.shape, operand(weight)
    step = 8 * found.constants["GROUP"] * warps
    shares = {"IS_WHOLE": num_in % step == 0, "IS_DOUBLE": is_double and num_in % (2 * step) == 0}
    return _RowOperand((*found.tensors, bias), num_out, found.constants | shares)


def _multiply_unscaled(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, out: Tensor) -> None:
    warps, is_double = 4, False
    if len(x) == 1:
        warps, is_double = next(own for least, own in _ROW_WARPS.items() if weight.shape[0] >= least)
    _launch_unscaled(x, _row_operand(weight, bias, warps, is_double), _NO_OPERAND, out, warps)


def _launch_unscaled(x: Tensor, first: _RowOperand, second: _RowOperand, out: Tensor, warps: int) -> None:
    num_lots = sum(triton.cdiv(own.num_out, _UNSCALED_OUTPUTS) for own in (first, second))
    block_row_kernel[(num_lots,)](
        x,
        *first.tensors,
        *second.tensors,
        out,
        x.stride(0),
        out.stride(0),
        len(x),
        first.num_out,
        second.num_out,
        x.shape[1],
        HAS_BIAS=first.tensors[-1] is not None,
        **first.constants,
        **{f"OTHER_{name}": value for name, value in second.constants.items()},
        ROWS=int(triton.next_power_of_2(len(x))),
        OUTPUTS=_UNSCALED_OUTPUTS,
        WARPS=warps,
        num_warps=warps,
        num_stages=1,  # the kernel itself says what is on its way
        **early(x.device, len(x)),
    )


def _multiply_rows(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, out: Tensor) -> None:
    num_out, num_in = weight.shape
    grid, share_in = shared_out(_ROWS, num_out, num_in)
    found = operand(weight)
    with summed(grid[1], bias, out) as (own_bias, sums, stride, has_bias):
        block_rows_kernel[grid](
            x,
            *found.tensors,
            own_bias,
            sums,
            x.stride(0),
            stride,
            len(x),
            num_out,
            num_in,
            share_in,
            HAS_BIAS=has_bias,
            IS_WHOLE=num_in % _LAYOUTS[weight.form.name].part == 0,
            **found.constants,
            ROWS=max(_LEAST_ROWS, int(triton.next_power_of_2(len(x)))),
            OUTPUTS=_ROWS.outputs // _ROWS.warps,
            WARPS=_ROWS.warps,
            num_warps=_ROWS.warps,
            num_stages=_ROWS.stages,
            **early(x.device, len(x)),
        )
