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
        value = (value.to(tl.float32) + tl.load(delta + row * size + at, mask=mask, other=0.0).to(tl.float32)).to(
            value.dtype
        )
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
def place_heads_kernel(
    projected,  # [rows, queries | keys | values | ...]
    queries,  # [rows, heads, head_dim]
    keys,  # the cache: [tokens, kv_heads, head_dim]
    values,
    places,  # [num_tokens], where the rows go in the cache
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
    BLOCK: tl.constexpr,
):
    """A head of a row: a query, a key or a value."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    mask = at < HEAD_DIM
    source = projected + row * row_stride + head * HEAD_DIM
    value = tl.load(source + at, mask=mask, other=0.0)
    if head >= NUM_HEADS + NUM_KV_HEADS:
        if row < num_tokens:
            place = tl.load(places + row)
            own = (place * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
            tl.store(values + own + at, value, mask=mask)
        return
    # The other half of the pair that a value is turned in.
    HALF: tl.constexpr = ROTARY_DIM // 2
    is_turned = at < ROTARY_DIM
    partner = tl.where(at < HALF, at + HALF, at - HALF)
    other = tl.load(source + partner, mask=is_turned, other=0.0)
    if HAS_NORM:
        own = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(own * own, axis=0) / HEAD_DIM + eps)
        weight = query_norm
        if head >= NUM_HEADS:
            weight = key_norm
        first = tl.load(weight + at, mask=mask, other=0.0)
        second = tl.load(weight + partner, mask=is_turned, other=0.0)
        if IS_NORM_FLOAT32:
            value = (own * scale * first).to(value.dtype)
            other = (other.to(tl.float32) * scale * second).to(value.dtype)
        else:
            value = ((own * scale).to(value.dtype).to(tl.float32) * first.to(tl.float32)).to(value.dtype)
            other = (
                (other.to(tl.float32) * scale).to(value.dtype).to(tl.float32) * second.to(tl.float32)
            ).to(value.dtype)
    cosine = tl.load(cos + row * ROTARY_DIM + at, mask=is_turned, other=1.0).to(tl.float32)
    sine = tl.load(sin + row * ROTARY_DIM + at, mask=is_turned, other=0.0).to(tl.float32)
    turned = (value.to(tl.float32) * cosine + other.to(tl.float32) * sine).to(value.dtype)
    if head < NUM_HEADS:
        tl.store(queries + (row * NUM_HEADS + head) * HEAD_DIM + at, turned, mask=mask)
    elif row < num_tokens:
        place = tl.load(places + row)
        tl.store(keys + (place * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM + at, turned, mask=mask)


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
