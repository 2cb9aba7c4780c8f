"""Attention on a GPU, in Triton: of a chunk to its own tile, and of decodes to all that they see.

Keys and values are read where they lie, in blocks of 64 tokens that a table of places names. A query's sums
are formed in the order of its sequence's blocks, in one and the same way whatever stands beside it.
"""

import triton
import triton.language as tl


@triton.jit
def _see(query, keys, values, seen, largest, total, sums, scale, PRECISION: tl.constexpr):
    """One block more, of whose tokens only some are seen: scores are powers of two."""
    scores = tl.where(seen, tl.dot(query, keys, input_precision=PRECISION) * scale, -float("inf"))
    now = tl.maximum(largest, tl.max(scores, axis=1))
    # Where nothing was seen yet there is nothing to shrink.
    against = tl.where(now == -float("inf"), 0.0, now)
    weights = tl.exp2(scores - against[:, None])
    shrink = tl.exp2(largest - against)
    total = total * shrink + tl.sum(weights, axis=1)
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    return now, total, sums


@triton.jit(do_not_specialize=["first", "end", "tile_start"])
def tile_attention_kernel(
    queries,  # [rows, heads, head_dim], of positions [first, end)
    keys,  # the cache: [tokens, kv_heads, head_dim]
    values,
    table,  # where the blocks of the tile begin in the cache
    past_out,  # [parts, rows, heads, head_dim], what the queries saw before the tile; or none
    past_lse,  # [parts, heads, rows]
    out,  # [rows, heads, head_dim]
    first,
    end,
    tile_start,
    scale,  # for powers of two
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
    NUM_PARTS: tl.constexpr,  # of the past; 0: there is none
    IS_CONTIGUOUS: tl.constexpr,
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
    at = rows[:, None] * query_stride + head * HEAD_DIM + columns[None, :]
    query = tl.load(queries + at, mask=is_own[:, None] & in_head[None, :], other=0.0)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    tokens = tl.arange(0, BLOCK)
    STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    own_head = head // GROUP * HEAD_DIM
    place = tl.load(table).to(tl.int64)
    # Which blocks need a mask depends on where the rows stand alone: their sums may be rounded in another way.
    num_seen = (start - tile_start) // BLOCK
    for block in range(num_seen):
        if IS_CONTIGUOUS:
            offsets = (place + block * BLOCK + tokens) * STRIDE + own_head
        else:
            offsets = (tl.load(table + block).to(tl.int64) + tokens) * STRIDE + own_head
        if COLUMNS == HEAD_DIM:
            key = tl.load(keys + offsets[None, :] + columns[:, None])
            value = tl.load(values + offsets[:, None] + columns[None, :])
        else:
            key = tl.load(keys + offsets[None, :] + columns[:, None], mask=in_head[:, None], other=0.0)
            value = tl.load(values + offsets[:, None] + columns[None, :], mask=in_head[None, :], other=0.0)
        scores = tl.dot(query, key, input_precision=PRECISION) * scale
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
        if IS_CONTIGUOUS:
            offsets = (place + block * BLOCK + tokens) * STRIDE + own_head
        else:
            offsets = (tl.load(table + block).to(tl.int64) + tokens) * STRIDE + own_head
        is_key = is_there[None, :] & in_head[:, None]
        is_value = is_there[:, None] & in_head[None, :]
        key = tl.load(keys + offsets[None, :] + columns[:, None], mask=is_key, other=0.0)
        value = tl.load(values + offsets[:, None] + columns[None, :], mask=is_value, other=0.0)
        seen = token[None, :] <= positions[:, None]
        largest, total, sums = _see(query, key, value, seen, largest, total, sums, scale, PRECISION)
    for part in tl.static_range(NUM_PARTS):
        own_lse = past_lse + part * lse_part_stride + head * lse_stride
        lse = tl.load(own_lse + rows, mask=is_own, other=0.0) * 1.4426950408889634
        now = tl.maximum(largest, lse)
        weight = tl.exp2(lse - now)
        shrink = tl.exp2(largest - now)
        own_past = past_out + part * past_part_stride + head * past_head_stride
        past = rows[:, None] * past_stride + columns[None, :]
        seen_before = tl.load(own_past + past, mask=is_own[:, None] & in_head[None, :], other=0.0).to(
            tl.float32
        )
        total = total * shrink + weight
        sums = sums * shrink[:, None] + seen_before * weight[:, None]
        largest = now
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    own = rows[:, None] * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + columns[None, :]
    tl.store(out + own, result, mask=is_own[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["table_stride"])
def decode_attention_kernel(
    queries,  # [..., heads, head_dim]
    rows,  # which of them each is
    keys,  # the cache: [tokens, kv_heads, head_dim]
    values,
    tables,  # [rows, blocks], where the blocks of each row's sequence begin in the cache
    lengths,  # [rows], tokens that each row sees
    part_out,  # [rows, heads, splits, head_dim], float32
    part_lse,  # [rows, heads, splits], in powers of two
    scale,  # for powers of two
    query_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # HEAD_DIM, or the next power of two
    SPLITS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A part of a row's past, for the query heads of one KV head."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    num_blocks = (length + BLOCK - 1) // BLOCK
    size = tl.maximum((num_blocks + SPLITS - 1) // SPLITS, LEAST_BLOCKS)
    first = split * size
    if first >= num_blocks:
        return
    last = tl.minimum(first + size, num_blocks)
    group = tl.arange(0, GROUP_ROWS)
    is_own = group < GROUP
    columns = tl.arange(0, COLUMNS)
    in_head = columns < HEAD_DIM
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
    sums = tl.zeros([GROUP_ROWS, COLUMNS], tl.float32)
    tokens = tl.arange(0, BLOCK)
    STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    for block in range(first, last):
        place = tl.load(tables + row * table_stride + block).to(tl.int64)
        is_there = block * BLOCK + tokens < length
        offsets = (place + tokens) * STRIDE + kv_head * HEAD_DIM
        is_key = is_there[None, :] & in_head[:, None]
        is_value = is_there[:, None] & in_head[None, :]
        key = tl.load(keys + offsets[None, :] + columns[:, None], mask=is_key, other=0.0)
        value = tl.load(values + offsets[:, None] + columns[None, :], mask=is_value, other=0.0)
        largest, total, sums = _see(
            query, key, value, is_there[None, :], largest, total, sums, scale, PRECISION
        )
    part = (row * NUM_HEADS + heads) * SPLITS + split
    own_part = part_out + part[:, None] * HEAD_DIM + columns[None, :]
    tl.store(own_part, sums / total[:, None], mask=is_own[:, None] & in_head[None, :])
    tl.store(part_lse + part, largest + tl.log2(total), mask=is_own)


@triton.jit
def join_parts_kernel(
    part_out,  # [rows, heads, splits, head_dim], float32
    part_lse,  # [rows, heads, splits]
    rows,  # which row of `out` each is
    lengths,  # [rows], tokens that each row sees
    out,  # [..., heads, head_dim]
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # HEAD_DIM, or the next power of two
    SPLITS: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the parts of a row's past gave for one head."""
    at = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, COLUMNS)
    in_head = columns < HEAD_DIM
    num_blocks = (tl.load(lengths + tl.program_id(0)) + BLOCK - 1) // BLOCK
    size = tl.maximum((num_blocks + SPLITS - 1) // SPLITS, LEAST_BLOCKS)
    is_there = splits * size < num_blocks
    lse = tl.load(part_lse + at * SPLITS + splits, mask=is_there, other=-float("inf"))
    largest = tl.max(lse, axis=0)
    is_empty = largest == -float("inf")
    weights = tl.exp2(lse - tl.where(is_empty, 0.0, largest))
    own_parts = part_out + (at * SPLITS + splits[:, None]) * HEAD_DIM + columns[None, :]
    parts = tl.load(own_parts, mask=is_there[:, None] & in_head[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.where(is_empty, 1.0, tl.sum(weights, axis=0))
    row = tl.load(rows + tl.program_id(0)).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    tl.store(out + row * HEAD_DIM + columns, result.to(out.dtype.element_ty), mask=in_head)
