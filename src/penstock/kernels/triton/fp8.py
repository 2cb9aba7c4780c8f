"""Products with weights of 8-bit floats on a GPU, in Triton: rows made 8-bit floats, and products of a few rows."""

import triton
import triton.language as tl

from penstock.kernels.triton.rows import store_sums


@triton.jit
def scale_rows_kernel(
    x,  # [rows, num_in]
    values,  # [rows, num_in], 8-bit floats
    scales,  # [blocks, rows], float32
    x_stride,
    num_in,
    num_blocks,
    num_rows,
    MOST: tl.constexpr,  # the largest 8-bit float
    WIDTH: tl.constexpr,  # of a block
    BLOCKS: tl.constexpr,
):
    """Some blocks of a row as 8-bit floats, of which the largest is MOST, and what they are multiples of."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    own = tl.load(x + row * x_stride + at, mask=at < num_in, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(own), axis=1), 1e-12) / MOST
    found = tl.clamp(own / scale[:, None], -MOST, MOST).to(values.dtype.element_ty)
    tl.store(values + row * num_in + at, found, mask=at < num_in)
    tl.store(scales + block * num_rows + row, scale, mask=block < num_blocks)


@triton.jit(do_not_specialize=["num_rows"])
def few_scaled_rows_kernel(
    x,  # [num_rows, num_in]
    weight,  # [num_out, num_in], 8-bit floats
    scales,  # [num_out, blocks], float32
    bias,  # [num_out], or none
    out,  # [num_rows, num_out]; or sums of float32 [parts, num_rows, num_out]
    x_stride,
    out_stride,
    num_rows,
    num_out,
    num_in,
    num_blocks,
    part_in,
    HAS_BIAS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,  # of BLOCK inputs each; else one scale for a row
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some outputs of a part of a product of a few rows: as fast as the weight can be read."""
    rows = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows < num_rows, output < num_out
    own = output.to(tl.int64)
    row_at = rows.to(tl.int64)[None, :] * x_stride
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first = tl.program_id(1) * part_in
    end = tl.minimum(first + part_in, num_in)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        is_in = at < end
        values = tl.load(
            weight + own[:, None] * num_in + at[None, :], mask=is_output[:, None] & is_in[None, :], other=0.0
        )
        here = tl.load(x + row_at + at[:, None], mask=is_in[:, None] & is_row[None, :], other=0.0)
        values = values.to(tl.float32).to(here.dtype)
        if HAS_BLOCKS:
            scale = tl.load(scales + own * num_blocks + start // BLOCK, mask=is_output, other=0.0)
            total += tl.dot(values, here) * scale[:, None]
        else:
            total = tl.dot(values, here, total)
    if not HAS_BLOCKS:
        total *= tl.load(scales + own, mask=is_output, other=0.0)[:, None]
    store_sums(total, bias, out, rows, output, out_stride, num_rows, num_out, HAS_BIAS)


@triton.jit
def scaled_row_kernel(
    x,  # [num_in]
    weight,  # [num_out, num_in], 8-bit floats
    scales,  # [num_out, blocks], float32
    bias,  # [num_out], or none
    out,  # [num_out]
    num_out,
    num_in,
    num_blocks,
    HAS_BIAS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,  # of 128 inputs each; else one scale for a row
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same of one row."""
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = own < num_out
    output = own.to(tl.int64)[:, None]
    total = tl.zeros([OUTPUTS, BLOCKS * 128], tl.float32)
    for start in tl.range(0, num_in, BLOCKS * 128, num_stages=STAGES):
        at = start + tl.arange(0, BLOCKS * 128)[None, :]
        is_in = at < num_in
        values = tl.load(weight + output * num_in + at, mask=is_output[:, None] & is_in, other=0.0)
        products = values.to(tl.float32) * tl.load(x + at, mask=is_in, other=0.0).to(tl.float32)
        if HAS_BLOCKS:
            block = start // 128 + tl.arange(0, BLOCKS)[None, :]
            mask = is_output[:, None] & (block < num_blocks)
            scale = tl.load(scales + output * num_blocks + block, mask=mask, other=0.0)
            scaled = tl.reshape(products, [OUTPUTS, BLOCKS, 128]) * scale[:, :, None]
            products = tl.reshape(scaled, [OUTPUTS, BLOCKS * 128])
        total += products
    found = tl.sum(total, axis=1)
    if not HAS_BLOCKS:
        found *= tl.load(scales + own, mask=is_output, other=0.0)
    if HAS_BIAS:
        found += tl.load(bias + own, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + own, found.to(out.dtype.element_ty), mask=is_output)
