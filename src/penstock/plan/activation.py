"""What lives at the high-water mark of one step's activations, by arithmetic from the model's shape.

The parts follow the pass as `penstock.models.decoder` runs it, tensor by tensor. A layer has two phases that never
live at the same time, mixing (attention or delta net) and feed-forward; after the last comes the output head. The
mark of a step is that of its largest phase.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from penstock.plan.checks import check_int
from penstock.plan.grids import (
    ELEMENTS_PER_THREAD,
    GRAPH_ROWS,
    HEADS_AND_PARTS,
    JOINED_TOKENS,
    LANES,
    LONG_PAST,
    MOST_STATE_BLOCKS,
    NORM_ROWS,
    PIECE_TOKENS,
    QUERY_BUCKETS,
    QUERY_GRID,
    ROTARY_PAGE,
    ROUNDED_BYTES,
    SPLITS,
    SQUARE,
    STATE_GRID,
)
from penstock.plan.model import (
    DeltaNetConfig,
    ExpertsConfig,
    MambaConfig,
    ModelConfig,
    RecurrentConfig,
    ShortConvConfig,
    input_size,
)
from penstock.plan.step import StepShape, Workspace

Phase = Literal["start", "attention", "delta_net", "mlp", "head"]

REFERENCE = Workspace()
FLOAT32 = 4
INT64 = 8
# What is too small to be named: sums of norms, indices, lists of numbers.
SMALL_BYTES = 256 << 10


@dataclass(frozen=True)
class StepMemory:
    """The bytes that live at the high-water mark of a step, or of one of its phases, by what holds them.

    No weights, no keys and values, no recurrent state are counted.
    """

    phase: Phase
    input_bytes: int = 0  # token ids, positions, rotary tables
    hidden_bytes: int = 0  # the residual stream and its norm
    projection_bytes: int = 0
    attention_bytes: int = 0  # queries that are rotated, what they attend to, and the kernel's work space
    delta_net_bytes: int = 0
    mlp_bytes: int = 0
    logits_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name, without the ending."""
        return {
            field.name.removesuffix("_bytes"): getattr(self, field.name)
            for field in fields(self)
            if field.name.endswith("_bytes")
        }


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class PassSizes:
    """One pass through the layers. Sizes are elements of a row; results are bytes."""

    def __init__(
        self,
        shape: ModelConfig,
        step: StepShape,
        dtype_bytes: int,
        workspace: Workspace,
        logits_dtype_bytes: int,
    ) -> None:
        self.shape = shape
        self.step = step
        self.dtype_bytes = dtype_bytes
        self.workspace = workspace
        self.logits_dtype_bytes = logits_dtype_bytes
        self.kernels = workspace.kernels
        self.is_fused = workspace.kernels != "torch"  # norms and rotation are one pass each
        # Decodes alone run in whatever shape is fastest.
        self.rows = workspace.law.prompt_rows(step.num_rows) if step.num_prompt_tokens else step.num_rows
        self.query = shape.num_heads * shape.largest_head
        self.kv = max(math.prod(shape.kv_heads(windowed=windowed)) for windowed in (False, True))
        self.projected = shape.num_projected
        # Rotated queries; in plain torch one tensor with the keys, where no norm parts them.
        is_alone = self.is_fused or workspace.head_norm or shape.latent is not None
        self.rotated = self.query if is_alone else self.query + self.kv

    def bytes(self, width: int, rows: int | None = None) -> int:
        """Of a tensor in the model's dtype, with the batch's rows unless said otherwise."""
        return (self.rows if rows is None else rows) * width * self.dtype_bytes

    def product(self, width: int, rows: int | None = None) -> int:
        """While one is computed. In slabs, all of them are there before they are joined."""
        rows = self.rows if rows is None else rows
        return self.bytes(2 * width if 0 < self.workspace.row_slab < rows else width, rows)

    # Norms

    def norm_held(self, width: int) -> int:
        """A norm's output. In plain torch it is half of a wider tensor where its weight is float32."""
        is_half = not self.is_fused and self.dtype_bytes < FLOAT32 and self.workspace.float32_norm
        return self.bytes(2 * width if is_half else width)

    def norm_peak(self, width: int) -> int:
        """While a norm is computed: its output and what it is made of."""
        if self.is_fused:
            return self.bytes(width)
        if self.dtype_bytes >= FLOAT32:
            return self.bytes(2 * width)  # the scaled input, the output
        # (x, -x), its layer norm, the half of it times the weight
        return self.bytes((4 if self.workspace.float32_norm else 5) * width)

    def entered(self, phase: Phase) -> StepMemory:
        """What a layer's block begins with: the residual stream, and the norm of it."""
        hidden = self.shape.hidden_size
        return StepMemory(
            phase,
            input_bytes=self.inputs + self.graphs,
            hidden_bytes=self.bytes(hidden) + self.norm_held(hidden),
        )

    # What lives throughout

    @property
    def inputs(self) -> int:
        ids = self.rows * (3 if self.kernels == "cuda" else 2) * INT64  # and places, on a GPU
        num_rotaries = 1 if self.shape.other_rotary is None else 2
        num_tables = num_rotaries + (self.shape.rotary.kind == "longrope")
        kept = SMALL_BYTES + self.workspace.library_bytes + self.workspace.unpacked_bytes
        kept += num_tables * self.rotary_tables
        return kept + ids + num_rotaries * self.bytes(2 * self.rotary_width)

    @property
    def graphs(self) -> int:
        """What chunks that a GPU has recorded attend into, which is kept."""
        can_record = self.kernels == "cuda" and not self.shape.recurrent and not self.shape.latent
        return self.bytes(self.query, min(self.rows, GRAPH_ROWS)) if can_record else 0

    @property
    def rotary_width(self) -> int:
        if not self.shape.num_attention_layers:
            return 0
        return self.workspace.rotary_dim or self.shape.largest_head

    @property
    def rotary_tables(self) -> int:
        """Cosines and sines of every position so far, made a page at a time and kept."""
        longest = self.step.longest_past + self.step.num_prompt_tokens
        return self.bytes(2 * self.rotary_width, rounded_up(longest, ROTARY_PAGE))


def attention_marks(sizes: PassSizes) -> Iterator[StepMemory]:
    shape, begun = sizes.shape, sizes.entered("attention")
    yield replace(begun, projection_bytes=sizes.product(sizes.projected))
    yield replace(begun, projection_bytes=sizes.bytes(sizes.projected), attention_bytes=_rotating(sizes))
    # Queries, what they attend to; then its gates, in one piece and activated, and the product.
    gating = sizes.bytes(2 * sizes.query if shape.gated_attention else 0)
    values = sizes.bytes(shape.num_heads * shape.latent.value_dim) if shape.latent else 0
    most = max(_attending(sizes), gating, values + sizes.product(shape.hidden_size))
    yield StepMemory(
        "attention",
        input_bytes=sizes.inputs,
        hidden_bytes=sizes.bytes(shape.hidden_size),
        attention_bytes=_queries(sizes) + sizes.bytes(sizes.query) + most,
    )


def mixed(sizes: PassSizes) -> StepMemory:
    """What a layer's output is made of, until that is added to the residual stream: of whichever layer has more."""
    attention = _queries(sizes) if sizes.shape.num_attention_layers else 0
    net = sizes.bytes(sizes.shape.recurrent.value_size) if sizes.shape.recurrent else 0
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
    if latent := sizes.shape.latent:
        # Normed latents, queries, their products with keys' weights, all of them rotated, and joined to those.
        own = latent.query_rank + latent.query_size(sizes.shape.num_heads) + 2 * sizes.shape.head_dim
        return sizes.bytes(own + 2 * sizes.query + 2 * sizes.shape.num_heads * latent.rotary_dim)
    if sizes.is_fused:
        return sizes.bytes(sizes.query)
    both = sizes.query + sizes.kv
    share = sizes.rotary_width / sizes.shape.largest_head

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
    """The past of a tile, and of the rest of one beside it: queries filled up, what they attend to there and its
    logarithms, in parts. All else is read in place."""
    step, num_heads = sizes.step, sizes.shape.num_heads
    tile = sizes.workspace.tile_size or step.num_prompt_tokens
    end = step.longest_past + step.num_prompt_tokens
    if not step.num_prompt_tokens or (sizes.workspace.tile_size and end <= tile):
        return 0
    rest = -step.longest_past % tile if step.longest_past >= LONG_PAST else 0
    rest = rest if rest < step.num_prompt_tokens else 0
    rows = _filled(min(step.num_prompt_tokens - rest, tile)) + (_filled(rest) if rest else 0)
    parts = max(HEADS_AND_PARTS // num_heads, 1)
    joined = sizes.bytes(2 * sizes.kv, end) if sizes.workspace.joins_past else 0
    # There is no kernel for grouped heads in float32: keys and values are repeated for each.
    repeated = sizes.bytes(2 * sizes.query, end) if sizes.dtype_bytes >= FLOAT32 else 0
    pieces = sizes.bytes((1 + parts) * sizes.query, rows) + FLOAT32 * parts * num_heads * rows
    return joined + repeated + pieces


def _filled(num_rows: int) -> int:
    """Queries that cuDNN is given."""
    largest = QUERY_BUCKETS[-1]
    return next((size for size in QUERY_BUCKETS if num_rows <= size), rounded_up(num_rows, largest))


def _decoding_on_gpu(sizes: PassSizes) -> int:
    """What the programs that share a decode's past have found, in float32, and its logarithms."""
    return FLOAT32 * sizes.step.num_decodes * SPLITS * (sizes.query + sizes.shape.num_heads)


def _decoding(sizes: PassSizes) -> int:
    """Pasts of decodes, which are copied together one after the other."""
    step = sizes.step
    if not step.num_decodes or not sizes.workspace.joins_past:
        return 0
    return sizes.bytes(2 * sizes.kv, min(JOINED_TOKENS, step.decode_pasts))


def recurrent_marks(sizes: PassSizes, net: RecurrentConfig) -> Iterator[StepMemory]:
    width = input_size(net)
    projection = sizes.bytes(width)
    out, convolved = sizes.bytes(net.value_size), sizes.bytes(net.conv_size)  # of all rows
    if isinstance(net, ShortConvConfig):
        begun = replace(sizes.entered("delta_net"), projection_bytes=projection)
        yield replace(begun, projection_bytes=sizes.product(width))
        yield replace(begun, delta_net_bytes=out + 2 * convolved + _convolving(sizes, net))
        return
    if sizes.kernels == "cuda" and isinstance(net, DeltaNetConfig):
        yield _carrying_on_gpu(sizes, net, projection)
        return
    gates = FLOAT32 * sizes.rows * 2 * rounded_up(net.num_value_heads, LANES)
    begun = replace(sizes.entered("delta_net"), projection_bytes=projection + gates)
    if isinstance(net, MambaConfig) and net.beside_attention:
        begun = replace(begun, attention_bytes=_queries(sizes))
    yield replace(begun, projection_bytes=sizes.product(width))
    attended = FLOAT32 * sizes.rows * net.value_size  # out of the rule
    yield replace(begun, delta_net_bytes=out + convolved + _convolving(sizes, net))
    yield replace(begun, delta_net_bytes=out + convolved + attended + _applying_rule(sizes, net))
    # The norm's output, and a few rows in float32: the gate, its activation, the norm and what it is made of.
    few = FLOAT32 * min(NORM_ROWS, sizes.rows) * 4 * net.value_size
    yield replace(begun, delta_net_bytes=attended + 2 * out + few)


def _carrying_on_gpu(sizes: PassSizes, net: DeltaNetConfig, projection: int) -> StepMemory:
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
    return replace(
        sizes.entered("delta_net"),
        projection_bytes=projection,
        delta_net_bytes=sizes.bytes(net.value_size) + FLOAT32 * 2 * matrix + inputs + rule + before,
    )


def _convolving(sizes: PassSizes, net: RecurrentConfig) -> int:
    """Some blocks at once, in float32: the window, the sum over the taps, its activation."""
    return FLOAT32 * 3 * _rows_at_once(sizes, net.conv_size) * net.conv_size


def _applying_rule(sizes: PassSizes, net: DeltaNetConfig | MambaConfig) -> int:
    """Some blocks are prepared while those before them are still held."""
    blocks = _rows_at_once(sizes, net.value_size)  # in tokens
    group = net.num_value_heads // net.num_key_heads
    keys = FLOAT32 * blocks * net.num_value_heads * net.key_head_dim  # for each value head
    values = FLOAT32 * blocks * net.value_size
    square = FLOAT32 * blocks * net.num_value_heads * STATE_GRID  # tokens of a block by each other
    inverse = square if isinstance(net, DeltaNetConfig) else 0
    prepared = 3 * keys + values + square + inverse  # pairs of keys and queries, writers; attention
    # Pairs, values, decays, products, attention, and the system and its inverse on its way
    preparing = 2 * keys + values + 2 * square + 2 * square // group + 3 * inverse
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


# Random and trained routers do not send every expert the same share of tokens: the busiest gets about so much of the
# mean. All that an expert holds is a small part of the phase.
_BUSIEST = 2


def step_memory(
    shape: ModelConfig, step: StepShape, *, dtype_bytes: int, workspace: Workspace = REFERENCE
) -> StepMemory:
    """The high-water mark of a step's activations: the largest of its phases."""
    phases = step_phases(shape, step, dtype_bytes=dtype_bytes, workspace=workspace)
    return max(phases, key=lambda phase: phase.peak_bytes, default=StepMemory("start"))


def step_phases(
    shape: ModelConfig,
    step: StepShape,
    *,
    dtype_bytes: int,
    workspace: Workspace = REFERENCE,
    logits_dtype_bytes: int = FLOAT32,
) -> tuple[StepMemory, ...]:
    """The mark of each phase that a step has. Without rows there is none."""
    check_int("dtype_bytes", dtype_bytes, 1)
    check_int("logits_dtype_bytes", logits_dtype_bytes, 1)
    if not step.num_rows:
        return ()
    marks: dict[Phase, StepMemory] = {}
    for mark in _marks(PassSizes(shape, step, dtype_bytes, workspace, logits_dtype_bytes)):
        if mark.phase not in marks or mark.peak_bytes > marks[mark.phase].peak_bytes:
            marks[mark.phase] = mark
    return tuple(marks.values())


def _marks(sizes: PassSizes) -> Iterator[StepMemory]:
    """The points at which a phase may need the most."""
    yield _start(sizes)
    if sizes.shape.num_attention_layers:
        yield from attention_marks(sizes)
    if sizes.shape.recurrent:
        yield from recurrent_marks(sizes, sizes.shape.recurrent)
    yield from _feed_forward(sizes)
    if sizes.step.num_logits:
        yield _head(sizes)


def _start(sizes: PassSizes) -> StepMemory:
    """Tables grow by a page: first the cosines are copied into a longer table, then the sines. A page is made in
    float32: angles, both functions of them, and both scaled."""
    hidden, width = sizes.shape.hidden_size, sizes.rotary_width
    made = 0 if sizes.kernels == "cuda" else FLOAT32 * 5 * width // 2  # the host makes what a GPU is given
    page = ROTARY_PAGE * (made + sizes.dtype_bytes * 2 * width)
    return StepMemory(
        "start",
        input_bytes=sizes.inputs + sizes.rotary_tables // 2 + page,
        hidden_bytes=sizes.bytes(hidden) + sizes.norm_held(hidden),
    )


# Feed-forward


def _feed_forward(sizes: PassSizes) -> Iterator[StepMemory]:
    hidden, begun = sizes.shape.hidden_size, sizes.entered("mlp")
    feed_rows = sizes.workspace.feed_rows
    is_in_slabs = 0 < feed_rows < sizes.rows
    experts, is_on_device = sizes.shape.experts, sizes.kernels == "cuda"
    if is_in_slabs and (sizes.shape.num_dense_layers or is_on_device):
        # Sums and norms are written over what they are made of.
        slab = replace(begun, hidden_bytes=sizes.bytes(2 * hidden) + sizes.bytes(2 * hidden, feed_rows))
        if sizes.shape.num_dense_layers:
            yield replace(slab, mlp_bytes=_feeding(sizes, sizes.shape.intermediate_size, feed_rows))
        if experts and is_on_device:
            yield replace(slab, mlp_bytes=_grouped_experts(sizes, experts, feed_rows))
        if not experts or is_on_device:
            return
    # A block's output is added to the residual and normed, with all three still there: and beside mixing's what it
    # was made of, beside this block's what it was fed with.
    adding = sizes.bytes(3 * hidden) + sizes.norm_peak(hidden)
    yield replace(mixed(sizes), phase="mlp", hidden_bytes=adding)
    yield replace(begun, hidden_bytes=adding + sizes.norm_held(hidden))
    if sizes.shape.num_dense_layers and not is_in_slabs:
        yield replace(begun, mlp_bytes=_feeding(sizes, sizes.shape.intermediate_size, sizes.rows))
    if experts and is_on_device:
        yield replace(begun, mlp_bytes=_grouped_experts(sizes, experts, sizes.rows))
    elif experts and sizes.workspace.expert_places and sizes.dtype_bytes < FLOAT32:
        yield replace(begun, mlp_bytes=_native_experts(sizes, experts))
    elif experts:
        yield replace(begun, mlp_bytes=_experts(sizes, experts))


def _feeding(sizes: PassSizes, width: int, rows: int) -> int:
    """One block: gate and up, then their product; or that and the output."""
    width = rounded_up(width, LANES)
    if sizes.kernels == "cuda":  # the product is written over the gate, and lives as long as both
        return sizes.bytes(2 * width, rows) + sizes.product(sizes.shape.hidden_size, rows)
    return max(
        sizes.product(2 * width, rows),
        sizes.bytes(3 * width, rows),
        sizes.bytes(width, rows) + sizes.product(sizes.shape.hidden_size, rows),
    )


def _grouped_experts(sizes: PassSizes, experts: ExpertsConfig, rows: int) -> int:
    """On a GPU, all at once: each row has a place for each of its experts."""
    hidden, shared = sizes.shape.hidden_size, experts.shared_intermediate_size
    num_places = rows * (sizes.workspace.num_active_experts or 1)
    # Scores; then weights, choices, places and their order, and the shared block's output.
    held = sizes.bytes(experts.num_experts + (LANES if shared else 0), rows)
    routing = 4 * FLOAT32 * num_places + (sizes.bytes(hidden, rows) if shared else 0)
    width = rounded_up(experts.intermediate_size, LANES)
    feeding = sizes.bytes(hidden, num_places) + max(sizes.bytes(width, num_places), sizes.bytes(hidden, rows))
    return held + max(routing + feeding, _feeding(sizes, shared, rows) if shared else 0)


def _native_experts(sizes: PassSizes, experts: ExpertsConfig) -> int:
    """On a processor, some at a time: rows' inputs, both products and what is between them. Sums are float32."""
    hidden, shared, rows = sizes.shape.hidden_size, experts.shared_intermediate_size, sizes.rows
    width, active = rounded_up(experts.intermediate_size, LANES), sizes.workspace.num_active_experts or 1
    num_scores = experts.num_experts + (LANES if shared else 0)
    # Scores in both types, chances; weights and choices
    scores = sizes.bytes(num_scores) + FLOAT32 * rows * num_scores
    routing = scores + FLOAT32 * rows * 2 * experts.num_experts + rows * active * (2 * FLOAT32 + INT64)
    places = min(max(sizes.workspace.expert_places, rows), rows * active)
    running = sizes.bytes(2 * hidden + 3 * width, places) + FLOAT32 * rows * hidden + sizes.bytes(hidden)
    if sizes.workspace.rounds_rows:
        running += round(ROUNDED_BYTES * max(hidden, width) * places)
    fed = sizes.bytes(hidden) if shared else 0
    return max(routing + fed + running, scores + (_feeding(sizes, shared, rows) if shared else 0))


def _experts(sizes: PassSizes, experts: ExpertsConfig) -> int:
    """At the busiest expert, or at the shared one."""
    hidden, rows = sizes.shape.hidden_size, sizes.rows
    shared = experts.shared_intermediate_size
    num_scores = experts.num_experts + (LANES if shared else 0)
    active = sizes.workspace.num_active_experts
    # Scores and chances; then a token's experts, their order, its own number and the weights.
    routing = FLOAT32 * rows * (num_scores + experts.num_experts)
    routing += rows * (active or 1) * (3 * INT64 + FLOAT32)
    total = FLOAT32 * rows * hidden
    group = rows
    if active:
        group = min(rows, -(-_BUSIEST * rows * active // experts.num_experts))
    slab = sizes.workspace.expert_slab or sizes.workspace.row_slab
    padded = sizes.workspace.law.padded_expert_rows(group)
    # The output of the expert before, a group's input, the same filled up, the block
    feeding = sizes.bytes(2 * hidden, group) + sizes.bytes(hidden, padded)
    feeding += _feeding(sizes, experts.intermediate_size, min(padded, slab) if slab else padded)
    # The group's output, in slabs and as one, then in float32
    adding = sizes.bytes((3 if slab else 2) * hidden, padded) + FLOAT32 * group * hidden
    marks = [feeding, adding, sizes.bytes(hidden)]  # the last: the sum in the model's dtype
    if shared:
        last = sizes.bytes(hidden, group)
        gate = FLOAT32 * rows * LANES
        # The shared block; then its output, in float32 too, to be added
        block = max(_feeding(sizes, shared, rows), sizes.bytes(hidden) + FLOAT32 * rows * hidden)
        marks.append(last + gate + block)
    return routing + total + max(marks)


# The output head


def _head(sizes: PassSizes) -> StepMemory:
    """Rows run in slabs, in the model's dtype, are joined where there are several, and become float32."""
    vocab, wanted = sizes.shape.vocab_size, sizes.step.num_logits
    few_rows = sizes.workspace.few_rows
    most = few_rows or sizes.workspace.head_rows
    slabs = rounded_up(wanted, most) if sizes.step.num_prompt_tokens and not few_rows else wanted
    joined = slabs if slabs > most else 0
    return StepMemory(
        "head",
        input_bytes=sizes.inputs + sizes.graphs,
        hidden_bytes=sizes.bytes(2 * sizes.shape.hidden_size, slabs),
        logits_bytes=max(
            sizes.bytes(vocab, slabs + joined),
            sizes.bytes(vocab, joined or slabs) + sizes.logits_dtype_bytes * vocab * wanted,
        ),
    )
