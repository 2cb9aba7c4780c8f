"""Attention on a GPU, in Triton: of a chunk to its own tile, and of decodes to all that they see.

Keys and values are read where they lie, in blocks of 64 tokens that a table of places names. A query's sums
are formed in the order of its sequence's blocks, in one and the same way whatever stands beside it. Blocks before a
window are not read.
"""

import triton
import triton.language as tl


@triton.jit
def _scores(query, keys, scale, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Powers of two."""
    scores = tl.dot(query, keys, input_precision=PRECISION) * scale
    if SOFT_CAP > 0:  # they are parts of the cap
        shrunk = tl.exp2(tl.abs(scores) * -2.8853900817779268)
        capped = (1.0 - shrunk) / (1.0 + shrunk) * (SOFT_CAP * 1.4426950408889634)
        scores = tl.where(scores < 0, -capped, capped)
    return scores


@triton.jit
def _see(
    query,
    keys,
    values,
    seen,
    largest,
    total,
    sums,
    scale,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block more, of whose tokens only some are seen."""
    scores = tl.where(seen, _scores(query, keys, scale, SOFT_CAP, PRECISION), -float("inf"))
    now = tl.maximum(largest, tl.max(scores, axis=1))
    # Where nothing was seen yet there is nothing to shrink.
    against = tl.where(now == -float("inf"), 0.0, now)
    weights = tl.exp2(scores - against[:, None])
    shrink = tl.exp2(largest - against)
    total = total * shrink + tl.sum(weights, axis=1)
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    return now, total, sums


@triton.jit
def _places(table, first_place, block, tokens, IS_CONTIGUOUS: tl.constexpr, BLOCK: tl.constexpr):
    """Of a block's tokens."""
    if IS_CONTIGUOUS:
        return first_place + block * BLOCK + tokens
    return tl.load(table + block).to(tl.int64) + tokens


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries of ROWS positions, which begin on a multiple of that, of one head."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    head = tl.program_id(0)
    # The last see the most: those of all heads begin first, so that the short ones fill what is left at the end.
    start = (first // ROWS + tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    positions = start + tl.arange(0, ROWS)
    rows = (positions - first).to(tl.int64)
    is_own = (positions >= first) & (positions < end)
    columns = tl.arange(0, COLUMNS)
    in_head = columns < HEAD_DIM
    value_columns = tl.arange(0, VALUE_COLUMNS)
    in_value = value_columns < VALUE_DIM
    at = rows[:, None] * query_stride + head * HEAD_DIM + columns[None, :]
    query = tl.load(queries + at, mask=is_own[:, None] & in_head[None, :], other=0.0)
    if HAS_SINKS:
        largest = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head) * 1.4426950408889634
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        largest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    tokens = tl.arange(0, BLOCK)
    KEY_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    VALUE_STRIDE: tl.constexpr = NUM_KV_HEADS * VALUE_DIM
    own_key = head // GROUP * HEAD_DIM
    own_value = head // GROUP * VALUE_DIM
    place = tl.load(table).to(tl.int64)
    # Which blocks need a mask depends on where the rows stand alone: their sums may be rounded in another way.
    num_seen = (start - tile_start) // BLOCK
    num_before = 0
    if WINDOW:
        # Blocks that not all rows see. What none of those here sees may be gone: it is not read.
        num_before = tl.maximum(start - WINDOW + 1 - tile_start, 0) // BLOCK
        num_hidden = tl.maximum(start + ROWS - WINDOW - tile_start + BLOCK - 1, 0) // BLOCK
        num_hidden = tl.minimum(tl.maximum(num_hidden, num_before), num_seen)
        for block in range(num_before, num_hidden):
            token = tile_start + block * BLOCK + tokens
            is_there = token > first - WINDOW
            at_block = _places(table, place, block, tokens, IS_CONTIGUOUS, BLOCK)
            key_offsets = at_block * KEY_STRIDE + own_key
            value_offsets = at_block * VALUE_STRIDE + own_value
            is_key = is_there[None, :] & in_head[:, None]
            is_value = is_there[:, None] & in_value[None, :]
            key = tl.load(keys + key_offsets[None, :] + columns[:, None], mask=is_key, other=0.0)
            value = tl.load(
                values + value_offsets[:, None] + value_columns[None, :], mask=is_value, other=0.0
            )
            seen = token[None, :] > positions[:, None] - WINDOW
            largest, total, sums = _see(
                query, key, value, seen, largest, total, sums, scale, SOFT_CAP, PRECISION
            )
        num_before = num_hidden
    for block in range(num_before, num_seen):
        at_block = _places(table, place, block, tokens, IS_CONTIGUOUS, BLOCK)
        key_offsets = at_block * KEY_STRIDE + own_key
        value_offsets = at_block * VALUE_STRIDE + own_value
        if COLUMNS == HEAD_DIM:
            key = tl.load(keys + key_offsets[None, :] + columns[:, None])
        else:
            key = tl.load(keys + key_offsets[None, :] + columns[:, None], mask=in_head[:, None], other=0.0)
        if VALUE_COLUMNS == VALUE_DIM:
            value = tl.load(values + value_offsets[:, None] + value_columns[None, :])
        else:
            value = tl.load(
                values + value_offsets[:, None] + value_columns[None, :], mask=in_value[None, :], other=0.0
            )
        scores = _scores(query, key, scale, SOFT_CAP, PRECISION)
        now = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - now[:, None])
        shrink = tl.exp2(largest - now)
        total = total * shrink + tl.sum(weights, axis=1)
        sums = tl.dot(weights.to(value.dtype), value, sums * shrink[:, None], input_precision=PRECISION)
        largest = now
    num_blocks = (tl.minimum(start + ROWS, end) - tile_start + BLOCK - 1) // BLOCK
    for block in range(num_seen, num_blocks):
        token = tile_start + block * BLOCK + tokens
        is_there = token < end
        if WINDOW:  # as above, where the rows stand in several blocks
            is_there = is_there & (token > first - WINDOW)
        at_block = _places(table, place, block, tokens, IS_CONTIGUOUS, BLOCK)
        key_offsets = at_block * KEY_STRIDE + own_key
        value_offsets = at_block * VALUE_STRIDE + own_value
        is_key = is_there[None, :] & in_head[:, None]
        is_value = is_there[:, None] & in_value[None, :]
        key = tl.load(keys + key_offsets[None, :] + columns[:, None], mask=is_key, other=0.0)
        value = tl.load(values + value_offsets[:, None] + value_columns[None, :], mask=is_value, other=0.0)
        seen = token[None, :] <= positions[:, None]
        if WINDOW:
            seen = seen & (token[None, :] > positions[:, None] - WINDOW)
        largest, total, sums = _see(query, key, value, seen, largest, total, sums, scale, SOFT_CAP, PRECISION)
    for part in tl.static_range(NUM_PARTS):
        own_lse = past_lse + part * lse_part_stride + head * lse_stride
        lse = tl.load(own_lse + rows, mask=is_own, other=0.0) * 1.4426950408889634
        now = tl.maximum(largest, lse)
        weight = tl.exp2(lse - now)
        shrink = tl.exp2(largest - now)
        own_past = past_out + part * past_part_stride + head * past_head_stride
        past = rows[:, None] * past_stride + value_columns[None, :]
        seen_before = tl.load(own_past + past, mask=is_own[:, None] & in_value[None, :], other=0.0).to(
            tl.float32
        )
        total = total * shrink + weight
        sums = sums * shrink[:, None] + seen_before * weight[:, None]
        largest = now
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    own = rows[:, None] * (NUM_HEADS * VALUE_DIM) + head * VALUE_DIM + value_columns[None, :]
    tl.store(out + own, result, mask=is_own[:, None] & in_value[None, :])


@triton.jit
def _first_block(length, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Of those that a decode sees."""
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0) // BLOCK
    return first


@triton.jit
def _store_part(
    part_out, part_lse, part, largest, total, sums, columns, is_own, in_value, VALUE_DIM: tl.constexpr
):
    own_part = part_out + part[:, None] * VALUE_DIM + columns[None, :]
    tl.store(own_part, sums / total[:, None], mask=is_own[:, None] & in_value[None, :])
    tl.store(part_lse + part, largest + tl.log2(total), mask=is_own)


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
    NUM_EACH: tl.constexpr,  # parts that a program has
    WINDOW: tl.constexpr,  # tokens that a query sees up to its own; 0: all
    SOFT_CAP: tl.constexpr,  # 0: none
    GROUP_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some parts of a row's past, one after the other, for the query heads of one KV head."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2) * NUM_EACH
    length = tl.load(lengths + row)
    num_blocks = (length + BLOCK - 1) // BLOCK
    before = _first_block(length, WINDOW, BLOCK)
    size = tl.maximum((num_blocks - before + SPLITS - 1) // SPLITS, LEAST_BLOCKS)
    first = before + split * size
    if first >= num_blocks:
        return
    last = tl.minimum(first + NUM_EACH * size, num_blocks)
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
    largest = tl.full([GROUP_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    sums = tl.zeros([GROUP_ROWS, VALUE_COLUMNS], tl.float32)
    tokens = tl.arange(0, BLOCK)
    first_part = (row * NUM_HEADS + heads) * SPLITS
    num_left = size  # blocks of the part at hand
    for block in range(first, last):
        place = tl.load(tables + row * table_stride + block).to(tl.int64)
        is_there = block * BLOCK + tokens < length
        if WINDOW:
            is_there = is_there & (block * BLOCK + tokens >= length - WINDOW)
        key_offsets = (place + tokens) * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        value_offsets = (place + tokens) * (NUM_KV_HEADS * VALUE_DIM) + kv_head * VALUE_DIM
        is_key = is_there[None, :] & in_head[:, None]
        is_value = is_there[:, None] & in_value[None, :]
        key = tl.load(keys + key_offsets[None, :] + columns[:, None], mask=is_key, other=0.0)
        value = tl.load(values + value_offsets[:, None] + value_columns[None, :], mask=is_value, other=0.0)
        largest, total, sums = _see(
            query, key, value, is_there[None, :], largest, total, sums, scale, SOFT_CAP, PRECISION
        )
        if NUM_EACH > 1:
            num_left -= 1
            if num_left == 0 and block + 1 < last:
                _store_part(
                    part_out,
                    part_lse,
                    first_part + split,
                    largest,
                    total,
                    sums,
                    value_columns,
                    is_own,
                    in_value,
                    VALUE_DIM,
                )
                largest = tl.full([GROUP_ROWS], -float("inf"), tl.float32)
                total = tl.zeros([GROUP_ROWS], tl.float32)
                sums = tl.zeros([GROUP_ROWS, VALUE_COLUMNS], tl.float32)
                num_left = size
                split += 1
    _store_part(
        part_out,
        part_lse,
        first_part + split,
        largest,
        total,
        sums,
        value_columns,
        is_own,
        in_value,
        VALUE_DIM,
    )


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
):
    """What the parts of a row's past gave for one head."""
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
    own_parts = part_out + (at * SPLITS + splits[:, None]) * VALUE_DIM + columns[None, :]
    parts = tl.load(own_parts, mask=is_there[:, None] & in_head[None, :], other=0.0)
    total = tl.sum(weights, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - largest)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.where(is_empty, 1.0, total)
    row = tl.load(rows + tl.program_id(0)).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    tl.store(out + row * VALUE_DIM + columns, result.to(out.dtype.element_ty), mask=in_head)
