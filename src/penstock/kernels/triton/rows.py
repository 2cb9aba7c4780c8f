"""What happens to each row on a GPU, fused: norms, rotation with the write to the cache, activation. In Triton.

A row is one program's, or several's that share nothing: its bits do not depend on how many others there are.
"""

import triton
import triton.language as tl

from penstock.kernels.triton.overlap import await_others


@triton.jit
def add_norm_kernel(
    x,  # [rows, size]
    delta,  # [rows, size], or none
    total,  # [rows, size], the sum; or none
    out,  # [rows, size]
    weight,  # [size]
    x_stride,
    size,
    eps,
    HAS_DELTA: tl.constexpr,
    IS_WEIGHT_FLOAT32: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr = False,
):
    """The norm of each row, or of its sum with another."""
    await_others(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    value = tl.load(x + row * x_stride + at, mask=mask, other=0.0)
    if HAS_DELTA:
        value = (
            value.to(tl.float32) + tl.load(delta + row * size + at, mask=mask, other=0.0).to(tl.float32)
        ).to(value.dtype)
        tl.store(total + row * size + at, value, mask=mask)
    own = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(own * own, axis=0) / size + eps)
    weights = tl.load(weight + at, mask=mask, other=0.0)
    if IS_WEIGHT_FLOAT32:
        normed = (own * scale * weights).to(value.dtype)
    else:
        normed = ((own * scale).to(value.dtype).to(tl.float32) * weights.to(tl.float32)).to(value.dtype)
    tl.store(out + row * size + at, normed, mask=mask)


@triton.jit
def _normed(values, weights, scale, IS_FLOAT32: tl.constexpr):
    if IS_FLOAT32:
        return (values.to(tl.float32) * scale * weights).to(values.dtype)
    normed = (values.to(tl.float32) * scale).to(values.dtype)
    return (normed.to(tl.float32) * weights.to(tl.float32)).to(values.dtype)


@triton.jit
def _head_norm(query_norm, key_norm, is_query, at, mask):
    """The norm's weights at some places of each head."""
    of_query = tl.load(query_norm + at, mask=mask, other=0.0)
    of_key = tl.load(key_norm + at, mask=mask, other=0.0)
    return tl.where(is_query, of_query, of_key)


@triton.jit
def _square(values):
    wide = values.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit(do_not_specialize=["num_tokens"])
def place_heads_kernel(
    projected,  # [rows, queries | keys | values | ...]
    queries,  # [rows, heads, head_dim]
    keys,  # the cache: [tokens, kv_heads, head_dim]
    values,
    places,  # [num_tokens], where the rows go in the cache; nowhere, if below 0
    cos,  # [rows, rotary_dim]
    sin,  # with its sign
    query_norm,  # [head_dim], or none
    key_norm,
    row_stride,
    num_tokens,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_NORM_FLOAT32: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,  # half of ROTARY_DIM, or the next power of two
    REST_BLOCK: tl.constexpr,  # what is not turned, the same way; 0: nothing
    IS_EARLY: tl.constexpr = False,
):
    """Some heads of a row, each a query, a key or a value. A pair is turned that lies half of ROTARY_DIM apart."""
    await_others(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    HALF: tl.constexpr = ROTARY_DIM // 2
    at = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = at < HALF
    source = projected + row * row_stride + head * HEAD_DIM
    first = tl.load(source + at, mask=is_head & in_half, other=0.0)
    second = tl.load(source + HALF + at, mask=is_head & in_half, other=0.0)
    own_first, own_second = first, second  # a value stays as it is
    if REST_BLOCK:
        rest_at = ROTARY_DIM + tl.arange(0, REST_BLOCK)[None, :]
        in_rest = rest_at < HEAD_DIM
        rest = tl.load(source + rest_at, mask=is_head & in_rest, other=0.0)
        own_rest = rest
    if HAS_NORM:
        squares = _square(first) + _square(second)
        if REST_BLOCK:
            squares += _square(rest)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = _normed(
            first, _head_norm(query_norm, key_norm, is_query, at, in_half), scale, IS_NORM_FLOAT32
        )
        weights = _head_norm(query_norm, key_norm, is_query, HALF + at, in_half)
        second = _normed(second, weights, scale, IS_NORM_FLOAT32)
        if REST_BLOCK:
            weights_of_rest = _head_norm(query_norm, key_norm, is_query, rest_at, in_rest)
            rest = _normed(rest, weights_of_rest, scale, IS_NORM_FLOAT32)
    angles = row * ROTARY_DIM + at
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    cosine = tl.load(cos + angles, mask=in_half, other=1.0).to(tl.float32)
    sine = tl.load(sin + angles, mask=in_half, other=0.0).to(tl.float32)
    turned_first = (wide_first * cosine + wide_second * sine).to(own_first.dtype)
    cosine = tl.load(cos + HALF + angles, mask=in_half, other=1.0).to(tl.float32)
    sine = tl.load(sin + HALF + angles, mask=in_half, other=0.0).to(tl.float32)
    turned_second = (wide_second * cosine + wide_first * sine).to(own_first.dtype)
    place = tl.load(places + row, mask=row < num_tokens, other=-1)
    is_kept = place >= 0
    to_query = queries + (row * NUM_HEADS + head) * HEAD_DIM
    to_key = keys + (place * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
    to_value = values + (place * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    tl.store(to_query + at, turned_first, mask=is_query & in_half)
    tl.store(to_query + HALF + at, turned_second, mask=is_query & in_half)
    tl.store(to_key + at, turned_first, mask=is_key & is_kept & in_half)
    tl.store(to_key + HALF + at, turned_second, mask=is_key & is_kept & in_half)
    tl.store(to_value + at, own_first, mask=is_value & is_kept & in_half)
    tl.store(to_value + HALF + at, own_second, mask=is_value & is_kept & in_half)
    if REST_BLOCK:
        tl.store(to_query + rest_at, rest, mask=is_query & in_rest)
        tl.store(to_key + rest_at, rest, mask=is_key & is_kept & in_rest)
        tl.store(to_value + rest_at, own_rest, mask=is_value & is_kept & in_rest)


@triton.jit
def silu_and_mul_kernel(gate_up, row_stride, width, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr = False):
    """silu(gate) * up, of a part of a row [gate | up], in place of the gate."""
    await_others(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate_at = gate_up + row * row_stride + at
    gate = tl.load(gate_at, mask=mask, other=0.0)
    up = tl.load(gate_at + width, mask=mask, other=0.0)
    own = gate.to(tl.float32)
    activated = (own / (1.0 + tl.exp(-own))).to(gate.dtype).to(tl.float32)
    tl.store(gate_at, (activated * up.to(tl.float32)).to(gate.dtype), mask=mask)


@triton.jit
def store_sums(total, bias, out, rows, output, out_stride, num_rows, num_out, HAS_BIAS: tl.constexpr):
    """Sums [outputs, rows] of a part of a product, to be joined; of all of it, with a bias."""
    if HAS_BIAS:
        total += tl.load(bias + output, mask=output < num_out, other=0.0).to(tl.float32)[:, None]
    row = (tl.program_id(1) * num_rows + rows).to(tl.int64)[None, :]
    mask = (rows < num_rows)[None, :] & (output < num_out)[:, None]
    tl.store(out + row * out_stride + output[:, None], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def join_sums_kernel(
    sums,  # [parts, rows, num_out], float32
    bias,  # [num_out], or none
    out,  # [rows, num_out]
    out_stride,
    num_out,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr = False,
):
    """The parts of a product's sums together, in their order."""
    await_others(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_out
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + (part * tl.num_programs(0) + row) * num_out + at, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x,  # [rows, num_in]
    weight,  # [num_out, num_in]
    bias,  # [num_out], or none
    out,  # [rows, num_out]
    x_stride,
    num_rows,
    num_out,
    num_in,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # inputs are whole blocks
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_ROWS: tl.constexpr,  # rows are the matrix units' first operand: then there may be few outputs
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr = False,
):
    """Some outputs of a product of a few rows: as fast as the weight can be read. An output is one sum from the first
    input to the last, whatever the sizes here: so are those of large products, whose bits it has."""
    await_others(IS_EARLY)
    ROW: tl.constexpr = 0 if BY_ROWS else 1
    row = tl.expand_dims(tl.arange(0, ROWS), 1 - ROW)
    output = tl.expand_dims(tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), ROW)
    columns = tl.arange(0, BLOCK)
    is_row, row_at = row < num_rows, x + row.to(tl.int64) * x_stride
    # What lies beyond the last is that once more.
    output_at = weight + tl.minimum(output, num_out - 1).to(tl.int64) * num_in
    if BY_ROWS:
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    else:
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, num_in, BLOCK):
        of_row = tl.expand_dims(start + columns, ROW)
        of_output = tl.expand_dims(start + columns, 1 - ROW)
        # Rows that are not there are not read: those of one, once more for each, take a tenth of the time.
        if IS_WHOLE:
            part = tl.load(output_at + of_output)
            own = tl.load(row_at + of_row, mask=is_row, other=0.0)
        else:
            part = tl.load(output_at + of_output, mask=of_output < num_in, other=0.0)
            own = tl.load(row_at + of_row, mask=is_row & (of_row < num_in), other=0.0)
        if BY_ROWS:
            total = tl.dot(own, part, total, input_precision=PRECISION)
        else:
            total = tl.dot(part, own, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=output < num_out, other=0.0).to(tl.float32)
    to = out + row.to(tl.int64) * num_out + output
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row & (output < num_out))
