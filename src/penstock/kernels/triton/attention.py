"""Attention on a GPU, in Triton: of a chunk to its own tile, and of decodes to all that they see.

Keys and values are read where they lie, in blocks of 64 tokens that a table of places names. A query's sums
are formed in the order of its sequence's blocks, in one and the same way whatever stands beside it. Blocks before a
window are not read.
"""

import triton
import triton.language as tl

from penstock.kernels.triton.overlap import await_others

# Where nothing was seen yet, that is the largest score: less than any, and not so little that nothing is less.
LEAST = tl.constexpr(-1e30)


@triton.jit
def _scores(query, keys, scale, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """And what makes them powers of two."""
    scores = tl.dot(query, keys, input_precision=PRECISION)
    if SOFT_CAP > 0:  # the scale makes them parts of the cap
        scores = scores * scale
        shrunk = tl.exp2(tl.abs(scores) * -2.8853900817779268)
        capped = (1.0 - shrunk) / (1.0 + shrunk) * (SOFT_CAP * 1.4426950408889634)
        scores = tl.where(scores < 0, -capped, capped)
        scale = 1.0
    return scores, scale


@triton.jit
def _weights(scores, scale, largest, total):
    """Of a block's tokens, 0 where a score is -inf; by how much what was summed before shrinks; the largest and the
    total so far."""
    now = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - now[:, None])
    shrink = tl.exp2(largest - now)
    return weights, shrink, now, total * shrink + tl.sum(weights, axis=1)


@triton.jit(do_not_specialize=["first", "end", "tile_start"])
def tile_attention_kernel(
    queries,  # [rows, heads, head_dim], of positions [first, end)
    keys,  # the cache: [tokens, kv_heads, head_dim]
    values,  # [tokens, kv_heads, value_dim]
    table,  # where the blocks from `tile_start` on begin in the cache
    past_out,  # [parts, rows, heads, value_dim], what the queries saw before the tile; or none
    past_lse,  # [parts, heads, rows]
    sinks,  # [heads], or none
    out,  # [rows, heads, value_dim]
    first,
    end,
    tile_start,
    scale,  # for powers of two, or for parts of the cap
    query_stride,
    past_part_stride,
    past_stride,
    past_head_stride,
    lse_part_stride,
    lse_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # HEAD_DIM, or the next power of two
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # of the past; 0: there is none
    IS_CONTIGUOUS: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a query sees up to its own; 0: all
    SOFT_CAP: tl.constexpr,  # 0: none
    HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    POSITIONS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a block, or of a part of it
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries of POSITIONS positions, which begin on a multiple of that, of HEADS heads that have their keys in
    common."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    ROWS: tl.constexpr = HEADS * POSITIONS
    # The last see the most: those of all heads begin first, so that the short ones fill what is left at the end.
    start = (first // POSITIONS + tl.num_programs(1) - 1 - tl.program_id(1)) * POSITIONS
    row = tl.arange(0, ROWS)
    heads = tl.program_id(0) * HEADS + row // POSITIONS
    positions = start + row % POSITIONS
    rows = (positions - first).to(tl.int64)
    is_own = (positions >= first) & (positions < end)
    columns = tl.arange(0, COLUMNS)
    in_head = columns < HEAD_DIM
    value_columns = tl.arange(0, VALUE_COLUMNS)
    in_value = value_columns < VALUE_DIM
    at = rows[:, None] * query_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    query = tl.load(queries + at, mask=is_own[:, None] & in_head[None, :], other=0.0)
    if HAS_SINKS:
        largest = tl.load(sinks + heads) * 1.4426950408889634
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        largest = tl.full([ROWS], LEAST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    tokens = tl.arange(0, TOKENS)
    KEY_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    VALUE_STRIDE: tl.constexpr = NUM_KV_HEADS * VALUE_DIM
    kv_head = tl.program_id(0) * HEADS // GROUP
    first_place = tl.load(table).to(tl.int64)
    # Tokens come so many at a time. What all rows see lies between these two.
    num_hidden = 0
    num_seen = (start - tile_start) // TOKENS
    first_step = 0
    if WINDOW:
        num_hidden = (start + POSITIONS - WINDOW - tile_start + TOKENS - 1) // TOKENS
        # What none of those here sees may be gone: it is not read.
        first_step = tl.maximum(tl.maximum(start, first) - WINDOW + 1 - tile_start, 0) // TOKENS
    num_steps = (tl.minimum(start + POSITIONS, end) - tile_start + TOKENS - 1) // TOKENS
    for step in range(first_step, num_steps):
        behind = step * TOKENS  # the tile's start
        token = tile_start + behind + tokens
        if IS_CONTIGUOUS:
            place = first_place + behind + tokens
        else:
            place = tl.load(table + behind // BLOCK).to(tl.int64) + behind % BLOCK + tokens
        is_key = (token < end)[None, :]
        is_value = (token < end)[:, None]
        if COLUMNS != HEAD_DIM:
            is_key = is_key & in_head[:, None]
        if VALUE_COLUMNS != VALUE_DIM:
            is_value = is_value & in_value[None, :]
        own_keys = place * KEY_STRIDE + kv_head * HEAD_DIM
        key = tl.load(keys + own_keys[None, :] + columns[:, None], mask=is_key, other=0.0)
        scores, powers = _scores(query, key, scale, SOFT_CAP, PRECISION)
        if (step < num_hidden) | (step >= num_seen):
            seen = token[None, :] <= positions[:, None]
            if WINDOW:
                seen = seen & (token[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        weights, shrink, largest, total = _weights(scores, powers, largest, total)
        # Loaded here, values are waited for here: they come while the scores are computed.
        own_values = place * VALUE_STRIDE + kv_head * VALUE_DIM
        value = tl.load(values + own_values[:, None] + value_columns[None, :], mask=is_value, other=0.0)
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision=PRECISION)
    if NUM_PARTS:  # one after the other: all at once would not fit into registers
        for part in range(NUM_PARTS):
            own_lse = past_lse + part * lse_part_stride + heads * lse_stride
            lse = tl.load(own_lse + rows, mask=is_own, other=0.0) * 1.4426950408889634
            now = tl.maximum(largest, lse)
            weight = tl.exp2(lse - now)
            shrink = tl.exp2(largest - now)
            own_past = past_out + part * past_part_stride + heads[:, None] * past_head_stride
            past = rows[:, None] * past_stride + value_columns[None, :]
            seen_before = tl.load(own_past + past, mask=is_own[:, None] & in_value[None, :], other=0.0).to(
                tl.float32
            )
            total = total * shrink + weight
            sums = sums * shrink[:, None] + seen_before * weight[:, None]
            largest = now
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    own = rows[:, None] * (NUM_HEADS * VALUE_DIM) + heads[:, None] * VALUE_DIM + value_columns[None, :]
    tl.store(out + own, result, mask=is_own[:, None] & in_value[None, :])


@triton.jit
def _first_block(length, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Of those that a decode sees."""
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0) // BLOCK
    return first


@triton.jit(do_not_specialize=["table_stride"])
def decode_attention_kernel(
    queries,  # [..., heads, head_dim]
    rows,  # which of them each is
    keys,  # the cache: [tokens, kv_heads, head_dim]
    values,  # [tokens, kv_heads, value_dim]
    tables,  # [rows, blocks], where the blocks of each row's sequence begin in the cache
    lengths,  # [rows], tokens that each row sees
    part_out,  # [rows, heads, splits, value_dim], float32
    part_lse,  # [rows, heads, splits], in powers of two
    scale,  # for powers of two, or for parts of the cap
    query_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # HEAD_DIM, or the next power of two
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a query sees up to its own; 0: all
    SOFT_CAP: tl.constexpr,  # 0: none
    GROUP_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr = False,
):
    """A part of a row's past, for the query heads of one KV head."""
    await_others(IS_EARLY)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    num_blocks = (length + BLOCK - 1) // BLOCK
    before = _first_block(length, WINDOW, BLOCK)
    size = tl.maximum((num_blocks - before + SPLITS - 1) // SPLITS, LEAST_BLOCKS)
    first = before + split * size
    if first >= num_blocks:
        return
    last = tl.minimum(first + size, num_blocks)
    group = tl.arange(0, GROUP_ROWS)
    is_own = group < GROUP
    columns = tl.arange(0, COLUMNS)
    in_head = columns < HEAD_DIM
    value_columns = tl.arange(0, VALUE_COLUMNS)
    in_value = value_columns < VALUE_DIM
    heads = kv_head * GROUP + group
    query = tl.load(
        queries
        + tl.load(rows + row).to(tl.int64) * query_stride
        + heads[:, None] * HEAD_DIM
        + columns[None, :],
        mask=is_own[:, None] & in_head[None, :],
        other=0.0,
    )
    largest = tl.full([GROUP_ROWS], LEAST, tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    sums = tl.zeros([GROUP_ROWS, VALUE_COLUMNS], tl.float32)
    tokens = tl.arange(0, BLOCK)
    for block in range(first, last):
        place = tl.load(tables + row * table_stride + block).to(tl.int64)
        is_there = block * BLOCK + tokens < length
        if WINDOW:
            is_there = is_there & (block * BLOCK + tokens >= length - WINDOW)
        key_offsets = (place + tokens) * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        value_offsets = (place + tokens) * (NUM_KV_HEADS * VALUE_DIM) + kv_head * VALUE_DIM
        # Of a block all keys are read: what is not seen is hidden below, and a mask takes as long as the arithmetic.
        key_at = keys + key_offsets[None, :] + columns[:, None]
        key = tl.load(key_at) if COLUMNS == HEAD_DIM else tl.load(key_at, mask=in_head[:, None], other=0.0)
        is_value = is_there[:, None]
        if VALUE_COLUMNS != VALUE_DIM:
            is_value = is_value & in_value[None, :]
        scores, powers = _scores(query, key, scale, SOFT_CAP, PRECISION)
        scores = tl.where(is_there[None, :], scores, -float("inf"))
        weights, shrink, largest, total = _weights(scores, powers, largest, total)
        value = tl.load(values + value_offsets[:, None] + value_columns[None, :], mask=is_value, other=0.0)
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision=PRECISION)
    part = (row * NUM_HEADS + heads) * SPLITS + split
    own_part = part_out + part[:, None] * VALUE_DIM + value_columns[None, :]
    tl.store(own_part, sums / total[:, None], mask=is_own[:, None] & in_value[None, :])
    tl.store(part_lse + part, largest + tl.log2(total), mask=is_own)


@triton.jit
def join_parts_kernel(
    part_out,  # [rows, heads, splits, value_dim], float32
    part_lse,  # [rows, heads, splits]
    rows,  # which row of `out` each is
    lengths,  # [rows], tokens that each row sees
    sinks,  # [heads], or none
    out,  # [..., heads, value_dim]
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # VALUE_DIM, or the next power of two
    SPLITS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,  # parts that are read at a time
    IS_EARLY: tl.constexpr = False,
):
    """What the parts of a row's past gave for one head."""
    await_others(IS_EARLY)
    at = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, COLUMNS)
    in_head = columns < VALUE_DIM
    length = tl.load(lengths + tl.program_id(0))
    num_blocks = (length + BLOCK - 1) // BLOCK - _first_block(length, WINDOW, BLOCK)
    size = tl.maximum((num_blocks + SPLITS - 1) // SPLITS, LEAST_BLOCKS)
    is_there = splits * size < num_blocks
    lse = tl.load(part_lse + at * SPLITS + splits, mask=is_there, other=-float("inf"))
    largest = tl.max(lse, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
    is_empty = largest == -float("inf")
    weights = tl.exp2(lse - tl.where(is_empty, 0.0, largest))
    total = tl.sum(weights, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - largest)
    joined = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, (num_blocks + size - 1) // size, TOGETHER):
        split = first + tl.arange(0, TOGETHER)
        is_part = split * size < num_blocks
        own_lse = tl.load(part_lse + at * SPLITS + split, mask=is_part, other=-float("inf"))
        own_parts = part_out + (at * SPLITS + split[:, None]) * VALUE_DIM + columns[None, :]
        parts = tl.load(own_parts, mask=is_part[:, None] & in_head[None, :], other=0.0)
        joined += tl.sum(parts * tl.exp2(own_lse - tl.where(is_empty, 0.0, largest))[:, None], axis=0)
    result = joined / tl.where(is_empty, 1.0, total)
    row = tl.load(rows + tl.program_id(0)).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    tl.store(out + row * VALUE_DIM + columns, result.to(out.dtype.element_ty), mask=in_head)
