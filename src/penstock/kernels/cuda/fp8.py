"""Weights of 8-bit floats on a GPU, with a scale for each output or for each 128 of its inputs, and their products.

Of many rows, the rows become 8-bit floats, too, and the card multiplies those; a few rows stay as they are.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from penstock.kernels.cuda.launch_sizes import Launch, least_rows, shared_out, summed
from penstock.kernels.quantised import F8_BLOCK, FLOAT8, FLOAT8_MOST, GROUP, BlockForm, QuantisedWeight
from penstock.kernels.triton.fp8 import few_scaled_rows_kernel, scale_rows_kernel, scaled_row_kernel

# Inputs to a scale, where an output has several, as published files have them; outputs, too.
_BLOCK = 128
_ROW, _ROWS = Launch(8, 512, 4, 4), Launch(64, 128, 3, 4)
_ALIGNED = 16  # numbers of outputs and inputs that the library takes
_SCALED_AT_ONCE = 16  # blocks


class Parts(NamedTuple):
    values: Tensor  # [out, in]
    scales: Tensor  # [out, blocks]


# Made once for a weight, and kept as long.
_PARTS: WeakKeyDictionary[QuantisedWeight, Parts] = WeakKeyDictionary()
# Scales of blocks of 128 outputs and inputs; none where a weight's are of other ones.
_SQUARES: WeakKeyDictionary[QuantisedWeight, Tensor | None] = WeakKeyDictionary()


def _num_blocks(form: BlockForm, num_in: int) -> int:
    return -(-num_in // _BLOCK) if form is F8_BLOCK else 1


def num_bytes(form: BlockForm, num_out: int, num_in: int) -> int:
    return num_out * (num_in + 4 * _num_blocks(form, num_in))


def parts(weight: QuantisedWeight) -> Parts:
    if weight not in _PARTS:
        num_out, num_in = weight.shape
        values, scales = weight.panels[: num_out * num_in], weight.panels[num_out * num_in :]
        _PARTS[weight] = Parts(
            values.view(FLOAT8).view(num_out, num_in), scales.view(torch.float32).view(num_out, -1)
        )
    return _PARTS[weight]


def place(weight: QuantisedWeight, outputs: Tensor, blocks: Tensor) -> None:
    """As `GpuProducts.place`."""
    found, device = parts(weight), weight.panels.device
    outputs, blocks = outputs.to(device), blocks.to(device).view(len(blocks), -1, weight.form.block_bytes)
    values = blocks[..., 4:].flatten(1)
    found.values.view(torch.uint8)[outputs, : values.shape[1]] = values
    scales = blocks[..., :4].contiguous().view(torch.float32).squeeze(-1)[:, :: _BLOCK // GROUP]
    num_scales = min(scales.shape[1], found.scales.shape[1])
    found.scales[outputs, :num_scales] = scales[:, :num_scales]


def rows(weight: QuantisedWeight, outputs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `GpuProducts.rows`."""
    values, scales = parts(weight)
    if outputs is not None:
        values, scales = values.view(torch.uint8)[outputs].view(FLOAT8), scales[outputs]
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(_BLOCK, dim=1)[:, : values.shape[1]]
    return (values.float() * scales).to(dtype)


def scale_rows_for(x: Tensor, weight: QuantisedWeight) -> tuple[Tensor, Tensor]:
    """Rows as 8-bit floats, with scales as the weight has them: of a row, or of each block of it."""
    if weight.form is F8_BLOCK:
        return scale_rows(x, _BLOCK, _SCALED_AT_ONCE)
    return scale_rows(x, triton.next_power_of_2(x.shape[1]), 1)


def multiply(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """Of many rows."""
    num_out, num_in = weight.shape
    values, scales = parts(weight)
    squares = _squares(weight) if weight.form is F8_BLOCK else None
    if num_out % _ALIGNED or num_in % _ALIGNED or (weight.form is F8_BLOCK and squares is None):
        return linear(x, rows(weight, None, x.dtype), bias)
    own, own_scales = scale_rows_for(x, weight)
    of_weight = scales.view(1, -1) if squares is None else squares.T
    # What sums lose by being fast is a tenth of what rows lose by having 8 bits.
    out = torch._scaled_mm(
        own,
        values.T,
        scale_a=own_scales,
        scale_b=of_weight,
        out_dtype=x.dtype,
        use_fast_accum=squares is None,
    )
    return out if bias is None else out.add_(bias)


def _squares(weight: QuantisedWeight) -> Tensor | None:
    if weight not in _SQUARES:
        found, scales = None, parts(weight).scales
        if weight.shape[0] % _BLOCK == weight.shape[1] % _BLOCK == 0:
            groups = scales.view(-1, _BLOCK, scales.shape[1])
            found = groups[:, 0].contiguous() if bool((groups == groups[:, :1]).all()) else None
        _SQUARES[weight] = found
    return _SQUARES[weight]


def scale_rows(x: Tensor, width: int, at_once: int) -> tuple[Tensor, Tensor]:
    """Rows [rows, in] as 8-bit floats, and a scale for each `width` inputs [rows, blocks], block by block."""
    num_rows, num_in = x.shape
    num_blocks = triton.cdiv(num_in, width)
    values = torch.empty(num_rows, num_in, dtype=FLOAT8, device=x.device)
    scales = torch.empty(num_blocks, num_rows, dtype=torch.float32, device=x.device)
    scale_rows_kernel[(num_rows, triton.cdiv(num_blocks, at_once))](
        x if x.stride(1) == 1 else x.contiguous(),
        values,
        scales,
        x.stride(0),
        num_in,
        num_blocks,
        num_rows,
        MOST=FLOAT8_MOST,
        WIDTH=width,
        BLOCKS=at_once,
        num_warps=4 if at_once > 1 else min(max(width // 1024, 1), 16),
    )
    return values, scales.T if num_blocks > 1 else scales.view(num_rows, 1)


def multiply_few(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, out: Tensor) -> None:
    """Of a few rows, whose inputs lie side by side."""
    (num_out, num_in), (values, scales) = weight.shape, parts(weight)
    constants: dict[str, Any] = {"HAS_BLOCKS": weight.form is F8_BLOCK}
    if len(x) == 1:
        scaled_row_kernel[(triton.cdiv(num_out, _ROW.outputs),)](
            x,
            values,
            scales,
            bias,
            out,
            num_out,
            num_in,
            scales.shape[1],
            HAS_BIAS=bias is not None,
            **constants,
            OUTPUTS=_ROW.outputs,
            BLOCKS=_ROW.inputs // _BLOCK,
            STAGES=_ROW.stages,
            num_warps=_ROW.warps,
        )
        return
    grid, part_in = shared_out(_ROWS, num_out, num_in)
    with summed(grid[1], bias, out) as (own_bias, sums, stride, has_bias):
        few_scaled_rows_kernel[grid](
            x,
            values,
            scales,
            own_bias,
            sums,
            x.stride(0),
            stride,
            len(x),
            num_out,
            num_in,
            scales.shape[1],
            part_in,
            HAS_BIAS=has_bias,
            **constants,
            ROWS=least_rows(len(x)),
            OUTPUTS=_ROWS.outputs,
            BLOCK=_ROWS.inputs,
            STAGES=_ROWS.stages,
            num_warps=_ROWS.warps,
        )
