"""A gated delta net's work on a GPU, beside the rule over blocks of a prompt. In Triton.

The columns of a row of `projected` are queries | keys | values | gates of the output | beta | decay. What happens to
a row does not depend on how many others there are. A slot below 0 is none: its state is zero, and it is not written.
"""

import triton
import triton.language as tl

_UNIT_EPS = tl.constexpr(1e-6)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)). The device's logarithm is poor around 1: here it is a series, 2 artanh(z / (2 + z))."""
    z = tl.exp(-tl.abs(x))
    s = z / (2.0 + z)
    square = s * s
    total = 1.0 / 15.0 + square * (1.0 / 17.0)
    total = 1.0 / 13.0 + square * total
    total = 1.0 / 11.0 + square * total
    total = 1.0 / 9.0 + square * total
    total = 1.0 / 7.0 + square * total
    total = 1.0 / 5.0 + square * total
    total = 1.0 / 3.0 + square * total
    return tl.maximum(x, 0.0) + 2.0 * (s + s * square * total)


@triton.jit
def _mixed(
    own,
    tail,
    next_tail,
    weight,
    channels,
    mask,
    is_read,
    is_written,
    CONV_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
):
    """One token through the convolution and silu, in float32 after rounding; the tail moves on by it."""
    token = tl.load(own + channels, mask=mask, other=0.0)
    total = tl.zeros(channels.shape, tl.float32)
    for tap in tl.static_range(TAPS - 1):
        before = tl.load(tail + tap * CONV_SIZE + channels, mask=mask & is_read, other=0.0)
        total += before.to(tl.float32) * tl.load(weight + tap * CONV_SIZE + channels, mask=mask, other=0.0)
        if tap > 0:
            tl.store(next_tail + (tap - 1) * CONV_SIZE + channels, before, mask=mask & is_written)
    if TAPS > 1:
        tl.store(next_tail + (TAPS - 2) * CONV_SIZE + channels, token, mask=mask & is_written)
    total += token.to(tl.float32) * tl.load(weight + (TAPS - 1) * CONV_SIZE + channels, mask=mask, other=0.0)
    return (total * _sigmoid(total)).to(token.dtype).to(tl.float32)


@triton.jit
def decode_states_kernel(
    projected,
    rows,  # [n], which rows of `projected` and `out`
    read,  # [n], slots
    write,  # [n], slots
    conv_weight,  # [taps, conv_size]
    decay_rate,  # [lanes]
    decay_bias,  # [lanes]
    norm,  # [value_dim]
    tails,  # [slots, taps - 1, conv_size]
    matrices,  # [slots, value_heads, key_dim, value_dim]
    out,  # [rows, value_heads * value_dim]
    row_stride,
    tail_stride,
    matrix_stride,
    scale,
    norm_eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LANES: tl.constexpr,
    TAPS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """A value head of one token each: convolution, delta rule, gated norm."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(rows + index)
    read_slot = tl.load(read + index)
    write_slot = tl.load(write + index)
    is_read = read_slot >= 0
    is_written = write_slot >= 0
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEY_SIZE: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CONV_SIZE: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    own = projected + row * row_stride
    tail = tails + read_slot * tail_stride
    next_tail = tails + write_slot * tail_stride
    key_at = tl.arange(0, KEY_BLOCK)
    value_at = tl.arange(0, VALUE_BLOCK)
    in_key = key_at < KEY_DIM
    in_value = value_at < VALUE_DIM

    # A key head's channels are its first value head's to write.
    is_first = is_written & (head % GROUP == 0)
    channels = (head // GROUP) * KEY_DIM + key_at
    query = _mixed(own, tail, next_tail, conv_weight, channels, in_key, is_read, is_first, CONV_SIZE, TAPS)
    channels += KEY_SIZE
    key = _mixed(own, tail, next_tail, conv_weight, channels, in_key, is_read, is_first, CONV_SIZE, TAPS)
    channels = 2 * KEY_SIZE + head * VALUE_DIM + value_at
    value = _mixed(
        own, tail, next_tail, conv_weight, channels, in_value, is_read, is_written, CONV_SIZE, TAPS
    )
    query *= tl.rsqrt(tl.sum(query * query, axis=0) + _UNIT_EPS) * scale
    key *= tl.rsqrt(tl.sum(key * key, axis=0) + _UNIT_EPS)

    gates = own + CONV_SIZE + VALUE_SIZE + head
    beta = _sigmoid(tl.load(gates).to(tl.float32))
    step = _softplus(tl.load(gates + LANES).to(tl.float32) + tl.load(decay_bias + head))
    decay = tl.exp(tl.load(decay_rate + head) * step)

    at = key_at[:, None] * VALUE_DIM + value_at[None, :]
    mask = in_key[:, None] & in_value[None, :]
    source = matrices + read_slot * matrix_stride + head * (KEY_DIM * VALUE_DIM)
    state = tl.load(source + at, mask=mask & is_read, other=0.0) * decay
    written = (value - tl.sum(state * key[:, None], axis=0)) * beta
    state += key[:, None] * written[None, :]
    target = matrices + write_slot * matrix_stride + head * (KEY_DIM * VALUE_DIM)
    tl.store(target + at, state, mask=mask & is_written)
    attended = tl.sum(state * query[:, None], axis=0)

    gate = tl.load(own + CONV_SIZE + head * VALUE_DIM + value_at, mask=in_value, other=0.0)
    normed = attended * tl.rsqrt(tl.sum(attended * attended, axis=0) / VALUE_DIM + norm_eps)
    normed *= tl.load(norm + value_at, mask=in_value, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(
        out + row * VALUE_SIZE + head * VALUE_DIM + value_at,
        (normed * wide * _sigmoid(wide)).to(gate.dtype),
        mask=in_value,
    )


@triton.jit(do_not_specialize=["start", "end", "num_tokens"])
def prepare_span_kernel(
    projected,  # from the span's first row on
    queries,  # [end - start, key_heads, key_dim]
    keys,  # the same
    values,  # [end - start, value_heads, value_dim]
    log_decay,  # [end - start, value_heads], float32
    beta,  # the same
    conv_weight,  # [taps, conv_size]
    decay_rate,  # [lanes]
    decay_bias,  # [lanes]
    tails,  # [slots, taps - 1, conv_size]
    read,  # [1], the slot of the tail before the span
    write,  # [1], the slot of the tail after it
    row_stride,
    tail_stride,
    start,
    end,
    num_tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LANES: tl.constexpr,
    TAPS: tl.constexpr,
    IS_SUMMED: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    LANE_BLOCK: tl.constexpr,
):
    """Tokens [start, end) of a span of `num_tokens`: some rows of one head's convolution, with queries and keys
    scaled to unit length, or of the gates. `log_decay` is summed up over blocks and to the base of 2, if so."""
    first = start + tl.program_id(0) * ROWS
    part = tl.program_id(1)
    KEY_SIZE: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CONV_SIZE: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    at_rows = first + tl.arange(0, ROWS).to(tl.int64)
    in_rows = at_rows < end
    if part < 2 * KEY_HEADS + VALUE_HEADS:
        is_value = part >= 2 * KEY_HEADS
        head = part - tl.where(is_value, 2 * KEY_HEADS, 0)
        dim = tl.where(is_value, VALUE_DIM, KEY_DIM)
        at = tl.arange(0, HEAD_BLOCK)
        in_head = at < dim
        channels = tl.where(is_value, 2 * KEY_SIZE, 0) + head * dim + at
        read_slot = tl.load(read)
        tail = tails + read_slot * tail_stride
        total = tl.zeros([ROWS, HEAD_BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            token = at_rows + (tap - TAPS + 1)
            source = projected + token[:, None] * row_stride + channels[None, :]
            mask = in_rows[:, None] & in_head[None, :]
            value = tl.load(source, mask=mask & (token >= 0)[:, None], other=0.0)
            if tap < TAPS - 1:
                is_before = (token < 0) & (read_slot >= 0)
                source = tail + (token + TAPS - 1)[:, None] * CONV_SIZE + channels[None, :]
                value = tl.where(
                    (token < 0)[:, None], tl.load(source, mask=mask & is_before[:, None], other=0.0), value
                )
            taps = tl.load(conv_weight + tap * CONV_SIZE + channels, mask=in_head, other=0.0)
            total += value.to(tl.float32) * taps[None, :]
        mixed = (total * _sigmoid(total)).to(projected.dtype.element_ty)
        to = at_rows - start
        mask = in_rows[:, None] & in_head[None, :]
        if part < 2 * KEY_HEADS:
            wide = mixed.to(tl.float32)
            unit = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) + _UNIT_EPS)[:, None]
            if part < KEY_HEADS:
                to_at = (to[:, None] * KEY_HEADS + part) * KEY_DIM + at[None, :]
                tl.store(queries + to_at, unit.to(mixed.dtype), mask=mask)
            else:
                to_at = (to[:, None] * KEY_HEADS + part - KEY_HEADS) * KEY_DIM + at[None, :]
                tl.store(keys + to_at, unit.to(mixed.dtype), mask=mask)
        else:
            tl.store(values + (to[:, None] * VALUE_HEADS + head) * VALUE_DIM + at[None, :], mixed, mask=mask)
        if (end == num_tokens) & (first + ROWS >= end):
            write_slot = tl.load(write)
            next_tail = tails + write_slot * tail_stride
            for tap in tl.static_range(TAPS - 1):
                last = num_tokens.to(tl.int64) + (tap - TAPS + 1)
                kept = tl.load(
                    projected + last * row_stride + channels, mask=in_head & (last >= 0), other=0.0
                )
                older = tl.load(
                    tail + (last + TAPS - 1) * CONV_SIZE + channels,
                    mask=in_head & (last < 0) & (read_slot >= 0),
                    other=0.0,
                )
                kept = tl.where(last < 0, older, kept)
                tl.store(next_tail + tap * CONV_SIZE + channels, kept, mask=in_head & (write_slot >= 0))
    else:
        lane = tl.arange(0, LANE_BLOCK)
        is_lane = in_rows[:, None] & (lane < VALUE_HEADS)[None, :]
        gates = projected + at_rows[:, None] * row_stride + CONV_SIZE + VALUE_SIZE + lane[None, :]
        gate_at = (at_rows - start)[:, None] * VALUE_HEADS + lane[None, :]
        tl.store(
            beta + gate_at, _sigmoid(tl.load(gates, mask=is_lane, other=0.0).to(tl.float32)), mask=is_lane
        )
        bias = tl.load(decay_bias + lane, mask=lane < VALUE_HEADS, other=0.0)
        rate = tl.load(decay_rate + lane, mask=lane < VALUE_HEADS, other=0.0)
        logs = rate * _softplus(tl.load(gates + LANES, mask=is_lane, other=0.0).to(tl.float32) + bias)
        if IS_SUMMED:
            logs = tl.cumsum(tl.where(is_lane, logs, 0.0), axis=0) * _LOG2_E
        tl.store(log_decay + gate_at, logs, mask=is_lane)


@triton.jit(do_not_specialize=["num_tokens"])
def delta_steps_kernel(
    queries,  # [n, key_heads, key_dim], of unit length
    keys,  # the same
    values,  # [n, value_heads, value_dim]
    log_decay,  # [n, value_heads], float32
    beta,  # the same
    state,  # [value_heads, key_dim, value_dim], float32
    next_state,  # the same
    out,  # [n, value_heads, value_dim], float32
    num_tokens,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """The delta rule of some columns of a head's state, one token after the other."""
    head = tl.program_id(0)
    value_at = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    key_at = tl.arange(0, KEY_BLOCK)
    in_key = key_at < KEY_DIM
    in_value = value_at < VALUE_DIM
    mask = in_key[:, None] & in_value[None, :]
    at = head * (KEY_DIM * VALUE_DIM) + key_at[:, None] * VALUE_DIM + value_at[None, :]
    held = tl.load(state + at, mask=mask, other=0.0)
    for token in range(num_tokens):
        key_row = (token * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + key_at
        value_row = (token * VALUE_HEADS + head) * VALUE_DIM + value_at
        query = tl.load(queries + key_row, mask=in_key, other=0.0).to(tl.float32) * scale
        key = tl.load(keys + key_row, mask=in_key, other=0.0).to(tl.float32)
        value = tl.load(values + value_row, mask=in_value, other=0.0).to(tl.float32)
        held *= tl.exp(tl.load(log_decay + token * VALUE_HEADS + head))
        written = (value - tl.sum(held * key[:, None], axis=0)) * tl.load(beta + token * VALUE_HEADS + head)
        held += key[:, None] * written[None, :]
        tl.store(out + value_row, tl.sum(held * query[:, None], axis=0), mask=in_value)
    tl.store(next_state + at, held, mask=mask)


@triton.jit
def read_state_kernel(matrices, slot, state, matrix_stride, size, BLOCK: tl.constexpr):
    """A slot's matrices to `state` [size]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    from_slot = tl.load(slot)
    found = tl.load(matrices + from_slot * matrix_stride + at, mask=(at < size) & (from_slot >= 0), other=0.0)
    tl.store(state + at, found, mask=at < size)


@triton.jit
def write_state_kernel(state, matrices, slot, matrix_stride, size, BLOCK: tl.constexpr):
    """`state` [size] to a slot's matrices."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    to_slot = tl.load(slot)
    found = tl.load(state + at, mask=at < size, other=0.0)
    tl.store(matrices + to_slot * matrix_stride + at, found, mask=(at < size) & (to_slot >= 0))


@triton.jit
def gated_norm_kernel(
    x,  # [n, heads, dim]
    gates,  # [n, heads * dim], in rows that are `gate_stride` apart
    weight,  # [dim]
    out,  # [n, heads * dim]
    gate_stride,
    norm_eps,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The norm of some heads of a row, times silu of their gates."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask = (head < NUM_HEADS) & (at < DIM)
    value = tl.load(x + (row * NUM_HEADS + head) * DIM + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * gate_stride + head * DIM + at, mask=mask, other=0.0)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=1) / DIM + norm_eps)[:, None]
    normed *= tl.load(weight + at, mask=at < DIM, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(
        out + (row * NUM_HEADS + head) * DIM + at, (normed * wide * _sigmoid(wide)).to(gate.dtype), mask=mask
    )
