"""What lives while a layer mixes tokens: attention and its kernels' work space, or the delta net."""

from collections.abc import Iterator
from dataclasses import replace

from penstock.plan.activation_parts import FLOAT32, PassSizes, StepMemory, rounded_up
from penstock.plan.grids import (
    ELEMENTS_PER_THREAD,
    HEADS_AND_PARTS,
    JOINED_TOKENS,
    LANES,
    MOST_STATE_BLOCKS,
    NORM_ROWS,
    PIECE_TOKENS,
    QUERY_BUCKETS,
    QUERY_GRID,
    SPLITS,
    SQUARE,
    STATE_GRID,
)
from penstock.plan.model import DeltaNetShape


def attention_marks(sizes: PassSizes) -> Iterator[StepMemory]:
    shape, hidden = sizes.shape, sizes.bytes(sizes.shape.hidden_size)
    taking = StepMemory(
        "attention",
        input_bytes=sizes.inputs + sizes.graphs,
        hidden_bytes=hidden + sizes.norm_held(shape.hidden_size),
        projection_bytes=sizes.bytes(sizes.projected),
    )
    yield replace(taking, projection_bytes=sizes.product(sizes.projected))
    yield replace(taking, attention_bytes=_rotating(sizes))
    # Queries, what they attend to; then its gates, in one piece and activated, and the product.
    gating = sizes.bytes(2 * sizes.query if shape.gated_attention else 0)
    most = max(_attending(sizes), gating, sizes.product(shape.hidden_size))
    yield StepMemory(
        "attention",
        input_bytes=sizes.inputs,
        hidden_bytes=hidden,
        attention_bytes=_queries(sizes) + sizes.bytes(sizes.query) + most,
    )


def mixed(sizes: PassSizes) -> StepMemory:
    """What a layer's output is made of, until that is added to the residual stream: of whichever layer has more."""
    attention = _queries(sizes) if sizes.shape.num_attention_layers else 0
    net = sizes.bytes(sizes.shape.delta_net.value_size) if sizes.shape.delta_net else 0
    return StepMemory(
        "attention" if attention >= net else "delta_net",
        input_bytes=sizes.inputs,
        attention_bytes=attention if attention >= net else 0,
        delta_net_bytes=net if net > attention else 0,
    )


def _queries(sizes: PassSizes) -> int:
    """Rotated, and their gates, which are a part of the projections."""
    return sizes.bytes(sizes.rotated + (sizes.projected if sizes.shape.gated_attention else 0))


def _rotating(sizes: PassSizes) -> int:
    """From the projections to rotated queries and keys."""
    if sizes.is_fused:
        return sizes.bytes(sizes.query)
    both = sizes.query + sizes.kv
    share = sizes.rotary_width / sizes.shape.head_dim

    def rotate(width: int) -> int:
        """Both products of the part that is rotated; or that part and the whole head."""
        part = sizes.bytes(round(share * width))
        return max(2 * part, part + sizes.bytes(width) if share < 1 else 0)

    if not sizes.workspace.head_norm:
        return rotate(both)
    queries, keys = sizes.norm_held(sizes.query), sizes.norm_held(sizes.kv)
    return max(
        sizes.norm_peak(sizes.query),
        queries + sizes.norm_peak(sizes.kv),
        queries + keys + rotate(sizes.query),
        queries + keys + sizes.bytes(sizes.query) + rotate(sizes.kv),
    )


def _attending(sizes: PassSizes) -> int:
    """The work space of attention, beside queries and output."""
    step, num_heads = sizes.step, sizes.shape.num_heads
    if sizes.kernels == "native":
        return 0
    if sizes.kernels == "cuda":
        return max(_decoding_on_gpu(sizes), _attending_on_gpu(sizes))
    if not step.num_prompt_tokens:
        return _decoding(sizes)
    tile = sizes.workspace.tile_size or step.num_prompt_tokens
    rows = min(step.num_prompt_tokens, tile)
    end = step.longest_past + step.num_prompt_tokens
    # Without a grid only a first chunk has none, which is left aside: a longer chunk never needs less.
    has_past = not sizes.workspace.tile_size or end > tile
    own = sizes.bytes(2 * sizes.kv, tile)  # the tile's keys and values, copied and filled up
    # The last tile's past has the chunk's tiles before it, too.
    past = sizes.bytes(2 * sizes.kv, end) if sizes.workspace.joins_past else 0
    padded = rounded_up(rows, QUERY_GRID)
    lse = FLOAT32 * num_heads  # of a row
    # Attention to the past: queries filled up and stacked, the output, that in the order of rows.
    piece = sizes.bytes(sizes.query, padded) + lse * padded if has_past else 0
    attending_past = sizes.bytes(3 * sizes.query, padded) + 2 * lse * padded if has_past else 0
    # A square: filled up, stacked and attended to what is before it, then to itself; merged in float32.
    square = min(SQUARE, tile)
    few = min(rows, square)
    pieces = sizes.bytes(sizes.query, rounded_up(few, QUERY_GRID) + square) + 2 * lse * square
    merging = FLOAT32 * 2 * sizes.query * few + 6 * lse * square
    out = sizes.bytes(sizes.query, rows)
    return max(_decoding(sizes), own + past + max(attending_past, piece + out + pieces + merging))


def _attending_on_gpu(sizes: PassSizes) -> int:
    """The past of a tile: its queries filled up, what they attend to there and its logarithms, in parts. All else is
    read in place."""
    step, num_heads = sizes.step, sizes.shape.num_heads
    tile = sizes.workspace.tile_size or step.num_prompt_tokens
    end = step.longest_past + step.num_prompt_tokens
    if not step.num_prompt_tokens or (sizes.workspace.tile_size and end <= tile):
        return 0
    rows = min(step.num_prompt_tokens, tile)
    largest = QUERY_BUCKETS[-1]
    rows = next((size for size in QUERY_BUCKETS if rows <= size), rounded_up(rows, largest))
    parts = max(HEADS_AND_PARTS // num_heads, 1)
    joined = sizes.bytes(2 * sizes.kv, end) if sizes.workspace.joins_past else 0
    # There is no kernel for grouped heads in float32: keys and values are repeated for each.
    repeated = sizes.bytes(2 * sizes.query, end) if sizes.dtype_bytes >= FLOAT32 else 0
    pieces = sizes.bytes((1 + parts) * sizes.query, rows) + FLOAT32 * parts * num_heads * rows
    return joined + repeated + pieces


def _decoding_on_gpu(sizes: PassSizes) -> int:
    """What the programs that share a decode's past have found, in float32, and its logarithms."""
    return FLOAT32 * sizes.step.num_decodes * SPLITS * (sizes.query + sizes.shape.num_heads)


def _decoding(sizes: PassSizes) -> int:
    """Pasts of decodes, which are copied together one after the other."""
    step = sizes.step
    if not step.num_decodes or not sizes.workspace.joins_past:
        return 0
    return sizes.bytes(2 * sizes.kv, min(JOINED_TOKENS, step.decode_pasts))


def delta_net_marks(sizes: PassSizes, net: DeltaNetShape) -> Iterator[StepMemory]:
    hidden = sizes.shape.hidden_size
    lanes = rounded_up(net.num_value_heads, LANES)
    width = net.conv_size + net.value_size + 2 * lanes
    projection = sizes.bytes(width)
    if sizes.kernels == "cuda":
        yield _carrying_on_gpu(sizes, net, projection)
        return
    gates = FLOAT32 * sizes.rows * 2 * lanes
    out = sizes.bytes(net.value_size)  # of all rows
    begun = StepMemory(
        "delta_net",
        input_bytes=sizes.inputs,
        hidden_bytes=sizes.bytes(hidden) + sizes.norm_held(hidden),
        projection_bytes=projection + gates,
    )
    yield replace(begun, projection_bytes=sizes.product(width))
    convolved = sizes.bytes(net.conv_size)
    attended = FLOAT32 * sizes.rows * net.value_size  # out of the rule
    yield replace(begun, delta_net_bytes=out + convolved + _convolving(sizes, net))
    yield replace(begun, delta_net_bytes=out + convolved + attended + _applying_rule(sizes, net))
    # The norm's output, and a few rows in float32: the gate, its activation, the norm and what it is made of.
    few = FLOAT32 * min(NORM_ROWS, sizes.rows) * 4 * net.value_size
    yield replace(begun, delta_net_bytes=attended + 2 * out + few)


def _carrying_on_gpu(sizes: PassSizes, net: DeltaNetShape, projection: int) -> StepMemory:
    """At a piece of a span, with the output of the piece before: its inputs, and what carries the state through it,
    by blocks or, in float32, token by token."""
    rows = min(sizes.rows, PIECE_TOKENS)
    keys = net.num_value_heads * net.key_head_dim
    matrix = keys * net.value_head_dim
    inputs = sizes.bytes(net.conv_size, rows) + FLOAT32 * 2 * rows * net.num_value_heads
    if sizes.dtype_bytes < FLOAT32:
        # inverses of blocks, what is erased, what is written twice, the output; the state before each block
        rule = sizes.bytes(net.num_value_heads * STATE_GRID + keys + 3 * net.value_size, rows)
        rule += sizes.bytes(matrix, -(-rows // STATE_GRID))
    else:
        rule = FLOAT32 * rows * net.value_size
    before = sizes.bytes(net.value_size, rows) if sizes.rows > PIECE_TOKENS else 0
    hidden = sizes.shape.hidden_size
    return StepMemory(
        "delta_net",
        input_bytes=sizes.inputs,
        hidden_bytes=sizes.bytes(hidden) + sizes.norm_held(hidden),
        projection_bytes=projection,
        delta_net_bytes=sizes.bytes(net.value_size) + FLOAT32 * 2 * matrix + inputs + rule + before,
    )


def _convolving(sizes: PassSizes, net: DeltaNetShape) -> int:
    """Some blocks at once, in float32: the window, the sum over the taps, its activation."""
    return FLOAT32 * 3 * _rows_at_once(sizes, net.conv_size) * net.conv_size


def _applying_rule(sizes: PassSizes, net: DeltaNetShape) -> int:
    """Some blocks are prepared while those before them are still held."""
    blocks = _rows_at_once(sizes, net.value_size)  # in tokens
    group = net.num_value_heads // net.num_key_heads
    keys = FLOAT32 * blocks * net.num_value_heads * net.key_head_dim  # for each value head
    values = FLOAT32 * blocks * net.value_size
    square = FLOAT32 * blocks * net.num_value_heads * STATE_GRID  # tokens of a block by each other
    prepared = 3 * keys + values + 2 * square  # pairs of keys and queries, writers; inverse, attention
    # Pairs, values, decays, products, the system, attention, and the inverse on its way
    preparing = 2 * keys + values + 3 * square + 2 * square // group + 2 * square
    if group > 1:
        preparing += 2 * keys // group
    # Through one block goes the state: what it holds of the tokens, what they write twice, the state once more.
    of_block = FLOAT32 * STATE_GRID * net.value_size
    state = FLOAT32 * net.num_value_heads * net.key_head_dim * net.value_head_dim
    carrying = prepared + values + 4 * of_block + max(of_block, state)
    is_repeated = sizes.step.num_prompt_tokens > blocks
    return max(carrying, preparing + (prepared + values if is_repeated else 0))


def _rows_at_once(sizes: PassSizes, width: int) -> int:
    num_blocks = max(1, min(ELEMENTS_PER_THREAD * sizes.workspace.num_threads // width, MOST_STATE_BLOCKS))
    return min(num_blocks * STATE_GRID, rounded_up(sizes.rows, STATE_GRID))
