"""What happens to each row on a GPU, fused: norms, rotation with the write to the cache, activation. In Triton.

A row is one program's, or several's that share nothing: its bits do not depend on how many others there are.
"""

import triton
import triton.language as tl


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
):
    """The norm of each row, or of its sum with another."""
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
    BLOCK: tl.constexpr,
):
    """Some heads of a row, each a query, a key or a value."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    in_head = at < HEAD_DIM
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & in_head
    source = projected + row * row_stride + head * HEAD_DIM
    plain = tl.load(source + at, mask=mask, other=0.0)
    # The other half of the pair that a value is turned in.
    HALF: tl.constexpr = ROTARY_DIM // 2
    is_turned = at < ROTARY_DIM
    partner = tl.where(at < HALF, at + HALF, at - HALF)
    value = plain
    other = tl.load(source + partner, mask=mask & is_turned, other=0.0)
    if HAS_NORM:
        own = plain.to(tl.float32)
        scale = tl.rsqrt(tl.sum(own * own, axis=1) / HEAD_DIM + eps)[:, None]
        first = tl.where(
            is_query,
            tl.load(query_norm + at, mask=in_head, other=0.0),
            tl.load(key_norm + at, mask=in_head, other=0.0),
        )
        second = tl.where(
            is_query,
            tl.load(query_norm + partner, mask=is_turned, other=0.0),
            tl.load(key_norm + partner, mask=is_turned, other=0.0),
        )
        value = _normed(plain, first, scale, IS_NORM_FLOAT32)
        other = _normed(other, second, scale, IS_NORM_FLOAT32)
    cosine = tl.load(cos + row * ROTARY_DIM + at, mask=is_turned, other=1.0).to(tl.float32)
    sine = tl.load(sin + row * ROTARY_DIM + at, mask=is_turned, other=0.0).to(tl.float32)
    turned = (value.to(tl.float32) * cosine + other.to(tl.float32) * sine).to(plain.dtype)
    tl.store(queries + (row * NUM_HEADS + head) * HEAD_DIM + at, turned, mask=is_query & in_head)
    place = tl.load(places + row, mask=row < num_tokens, other=-1)
    is_kept = (place >= 0) & in_head
    key_at = (place * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM + at
    tl.store(keys + key_at, turned, mask=is_key & is_kept)
    tl.store(values + key_at - NUM_KV_HEADS * HEAD_DIM, plain, mask=is_value & is_kept)


@triton.jit
def silu_and_mul_kernel(gate_up, out, row_stride, width, BLOCK: tl.constexpr):
    """silu(gate) * up, of a part of a row [gate | up]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up + row * row_stride + at, mask=mask, other=0.0)
    up = tl.load(gate_up + row * row_stride + width + at, mask=mask, other=0.0)
    own = gate.to(tl.float32)
    activated = (own / (1.0 + tl.exp(-own))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + at, (activated * up.to(tl.float32)).to(gate.dtype), mask=mask)


@triton.jit
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
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some outputs of a product of a few rows: as fast as the weight can be read."""
    rows = tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, BLOCK)
    is_row, is_output = rows < num_rows, outputs < num_out
    row_at = rows[:, None].to(tl.int64) * x_stride
    weight_at = outputs[None, :].to(tl.int64) * num_in
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_in, BLOCK):
        at = start + columns
        is_in = at < num_in
        own = tl.load(x + row_at + at[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
        part = tl.load(weight + weight_at + at[:, None], mask=is_output[None, :] & is_in[:, None], other=0.0)
        total = tl.dot(own, part, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out + rows[:, None].to(tl.int64) * num_out + outputs[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
