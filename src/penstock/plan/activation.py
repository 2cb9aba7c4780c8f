"""What lives at the high-water mark of one step's activations, by arithmetic from the model's shape.

The parts follow the pass as `penstock.models.decoder` runs it, tensor by tensor. A layer has two phases that never
live at the same time, mixing (attention or delta net) and feed-forward; after the last comes the output head. The
mark of a step is that of its largest phase.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from penstock.plan.checks import check_int
from penstock.plan.config import STATE_GRID
from penstock.plan.shape import DeltaNetShape, ExpertsShape, ModelShape
from penstock.plan.step_shape import StepShape, Workspace

Phase = Literal["start", "attention", "delta_net", "mlp", "head"]

REFERENCE = Workspace()
_FLOAT32 = 4
_INT64 = 8
# As the layers and kernels have them; `tests/plan/test_activation.py` holds the two together.
FEW_ROWS, ROW_GRID, HEAD_ROWS = 16, 8, 8
LANES = 64
ROTARY_PAGE = 1024
QUERY_GRID, SQUARE, NORM_ROWS = 64, 256, 256
ELEMENTS_PER_THREAD, MOST_BLOCKS = 2048, 8
JOINED_TOKENS = 1024
# What is too small to be named: sums of norms, indices, lists of numbers.
SMALL_BYTES = 256 << 10
# Random and trained routers do not send every expert the same share of tokens: the busiest gets about so much of the
# mean. All that an expert holds is a small part of the phase.
_BUSIEST = 2


@dataclass(frozen=True, slots=True)
class ModelWorkspace(Workspace):
    """What computes a step of a certain model: what its memory depends on besides sizes.

    The defaults are those of most models. Without `num_active_experts`, one expert may get every token.
    """

    row_floor: int = 1
    row_slab: int = 0
    expert_slab: int = 0
    head_norm: bool = False  # queries and keys are normed
    float32_norm: bool = False  # norms have their weights in float32
    rotary_dim: int = 0  # elements of each head that are rotated; 0: all
    num_active_experts: int = 0  # that a token is sent to; 0: not known
    joins_past: bool = False  # a past may lie in several places, and is copied together


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


def step_memory(
    shape: ModelShape, step: StepShape, *, dtype_bytes: int, workspace: Workspace = REFERENCE
) -> StepMemory:
    """The high-water mark of a step's activations: the largest of its phases."""
    phases = step_phases(shape, step, dtype_bytes=dtype_bytes, workspace=workspace)
    return max(phases, key=lambda phase: phase.peak_bytes, default=StepMemory("start"))


def step_phases(
    shape: ModelShape,
    step: StepShape,
    *,
    dtype_bytes: int,
    workspace: Workspace = REFERENCE,
    logits_dtype_bytes: int = _FLOAT32,
) -> tuple[StepMemory, ...]:
    """The mark of each phase that a step has. Without rows there is none."""
    check_int("dtype_bytes", dtype_bytes, 1)
    check_int("logits_dtype_bytes", logits_dtype_bytes, 1)
    if not step.num_rows:
        return ()
    marks: dict[Phase, StepMemory] = {}
    for mark in _Pass(shape, step, dtype_bytes, _of_model(workspace), logits_dtype_bytes).marks():
        if mark.phase not in marks or mark.peak_bytes > marks[mark.phase].peak_bytes:
            marks[mark.phase] = mark
    return tuple(marks.values())


def padded_rows(num_rows: int, row_floor: int, row_slab: int) -> int:
    """As `penstock.kernels.protocol` has it, which this package must not import."""
    grid = row_slab or (ROW_GRID if num_rows > FEW_ROWS else 1)
    return max(row_floor, _rounded_up(num_rows, grid))


def _of_model(workspace: Workspace) -> ModelWorkspace:
    if isinstance(workspace, ModelWorkspace):
        return workspace
    return ModelWorkspace(workspace.kernels, workspace.tile_size, workspace.num_threads)


class _Pass:
    """One pass through the layers. Sizes are elements of a row; results are bytes."""

    def __init__(
        self,
        shape: ModelShape,
        step: StepShape,
        dtype_bytes: int,
        workspace: ModelWorkspace,
        logits_dtype_bytes: int,
    ) -> None:
        self.shape = shape
        self.step = step
        self.dtype_bytes = dtype_bytes
        self.workspace = workspace
        self.logits_dtype_bytes = logits_dtype_bytes
        self.is_native = workspace.kernels == "native"
        # Decodes alone run in whatever shape is fastest.
        self.rows = (
            padded_rows(step.num_rows, workspace.row_floor, workspace.row_slab)
            if step.num_prompt_tokens
            else step.num_rows
        )
        self.query = shape.num_heads * shape.head_dim
        self.kv = shape.num_kv_heads * shape.head_dim
        self.projected = (2 if shape.gated_attention else 1) * self.query + 2 * self.kv
        # Rotated queries; in plain torch one tensor with the keys, where no norm parts them.
        is_alone = self.is_native or workspace.head_norm
        self.rotated = self.query if is_alone else self.query + self.kv

    def marks(self) -> Iterator[StepMemory]:
        """The points at which a phase may need the most."""
        yield self.start()
        if self.shape.num_attention_layers:
            yield from self.attention()
        if self.shape.delta_net:
            yield from self.delta_net(self.shape.delta_net)
        yield from self.feed_forward()
        if self.step.num_logits:
            yield self.head()

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
        is_half = not self.is_native and self.dtype_bytes < _FLOAT32 and self.workspace.float32_norm
        return self.bytes(2 * width if is_half else width)

    def norm_peak(self, width: int) -> int:
        """While a norm is computed: its output and what it is made of."""
        if self.is_native:
            return self.bytes(width)
        if self.dtype_bytes >= _FLOAT32:
            return self.bytes(2 * width)  # the scaled input, the output
        # (x, -x), its layer norm, the half of it times the weight
        return self.bytes((4 if self.workspace.float32_norm else 5) * width)

    # What lives throughout

    @property
    def inputs(self) -> int:
        ids = self.rows * 2 * _INT64
        return SMALL_BYTES + ids + self.bytes(2 * self.rotary_width) + self.rotary_tables

    @property
    def rotary_width(self) -> int:
        if not self.shape.num_attention_layers:
            return 0
        return self.workspace.rotary_dim or self.shape.head_dim

    @property
    def rotary_tables(self) -> int:
        """Cosines and sines of every position so far, made a page at a time and kept."""
        longest = self.step.longest_past + self.step.num_prompt_tokens
        return self.bytes(2 * self.rotary_width, _rounded_up(longest, ROTARY_PAGE))

    @property
    def held(self) -> StepMemory:
        """What a layer's mixing gave stays until the next layer's has given something."""
        attention = self.bytes(self.rotated + (self.projected if self.shape.gated_attention else 0))
        net = self.bytes(self.shape.delta_net.value_size) if self.shape.delta_net else 0
        is_net = net > attention or not self.shape.num_attention_layers
        return StepMemory(
            "start",
            input_bytes=self.inputs,
            attention_bytes=0 if is_net else attention,
            delta_net_bytes=net if is_net else 0,
        )

    def start(self) -> StepMemory:
        """Tables grow by a page: first the cosines are copied into a longer table, then the sines. A page is made in
        float32: angles, both functions of them, and both scaled."""
        hidden, width = self.shape.hidden_size, self.rotary_width
        page = ROTARY_PAGE * (_FLOAT32 * 5 * width // 2 + self.dtype_bytes * 2 * width)
        return StepMemory(
            "start",
            input_bytes=self.inputs + self.rotary_tables // 2 + page,
            hidden_bytes=self.bytes(hidden) + self.norm_held(hidden),
        )

    # Mixing

    def attention(self) -> Iterator[StepMemory]:
        shape, held = self.shape, self.held
        hidden = self.bytes(shape.hidden_size) + self.norm_held(shape.hidden_size)
        taking = replace(
            held, phase="attention", hidden_bytes=hidden, projection_bytes=self.bytes(self.projected)
        )
        yield replace(taking, projection_bytes=self.product(self.projected))
        yield replace(taking, attention_bytes=held.attention_bytes + self.rotating())
        # Queries, what they attend to; then its gates, in one piece and activated, and the product.
        queries = self.bytes(self.rotated + (self.projected if shape.gated_attention else 0))
        gating = self.bytes(2 * self.query if shape.gated_attention else 0)
        most = max(self.attending(), gating, self.product(shape.hidden_size))
        yield replace(
            held,
            phase="attention",
            hidden_bytes=hidden,
            delta_net_bytes=0,
            attention_bytes=queries + self.bytes(self.query) + most,
        )

    def rotating(self) -> int:
        """From the projections to rotated queries and keys."""
        if self.is_native:
            return self.bytes(self.query)
        both = self.query + self.kv
        share = self.rotary_width / self.shape.head_dim

        def rotate(width: int) -> int:
            """Both products of the part that is rotated; or that part and the whole head."""
            part = self.bytes(round(share * width))
            return max(2 * part, part + self.bytes(width) if share < 1 else 0)

        if not self.workspace.head_norm:
            return rotate(both)
        queries, keys = self.norm_held(self.query), self.norm_held(self.kv)
        return max(
            self.norm_peak(self.query),
            queries + self.norm_peak(self.kv),
            queries + keys + rotate(self.query),
            queries + keys + self.bytes(self.query) + rotate(self.kv),
        )

    def attending(self) -> int:
        """The work space of attention, beside queries and output."""
        step, num_heads = self.step, self.shape.num_heads
        if self.is_native:
            return 0
        if not step.num_prompt_tokens:
            return self.decoding()
        tile = self.workspace.tile_size or step.num_prompt_tokens
        rows = min(step.num_prompt_tokens, tile)
        end = step.longest_past + step.num_prompt_tokens
        # Without a grid only a first chunk has none, which is left aside: a longer chunk never needs less.
        has_past = not self.workspace.tile_size or end > tile
        own = self.bytes(2 * self.kv, tile)  # the tile's keys and values, copied and filled up
        # The last tile's past has the chunk's tiles before it, too.
        past = self.bytes(2 * self.kv, end) if self.workspace.joins_past else 0
        padded = _rounded_up(rows, QUERY_GRID)
        lse = _FLOAT32 * num_heads  # of a row
        # Attention to the past: queries filled up and stacked, the output, that in the order of rows.
        piece = self.bytes(self.query, padded) + lse * padded if has_past else 0
        attending_past = self.bytes(3 * self.query, padded) + 2 * lse * padded if has_past else 0
        # A square: filled up, stacked and attended to what is before it, then to itself; merged in float32.
        square = min(SQUARE, tile)
        few = min(rows, square)
        pieces = self.bytes(self.query, _rounded_up(few, QUERY_GRID) + square) + 2 * lse * square
        merging = _FLOAT32 * 2 * self.query * few + 6 * lse * square
        out = self.bytes(self.query, rows)
        return max(self.decoding(), own + past + max(attending_past, piece + out + pieces + merging))

    def decoding(self) -> int:
        """Pasts of decodes, which are copied together one after the other."""
        step = self.step
        if not step.num_decodes or not self.workspace.joins_past:
            return 0
        return self.bytes(2 * self.kv, min(JOINED_TOKENS, step.decode_pasts))

    def delta_net(self, net: DeltaNetShape) -> Iterator[StepMemory]:
        held, hidden = self.held, self.shape.hidden_size
        lanes = _rounded_up(net.num_value_heads, LANES)
        width = net.conv_size + net.value_size + 2 * lanes
        projection = self.bytes(width)
        gates = _FLOAT32 * self.rows * 2 * lanes
        out = self.bytes(net.value_size)  # of all rows
        begun = replace(
            held,
            phase="delta_net",
            hidden_bytes=self.bytes(hidden) + self.norm_held(hidden),
            projection_bytes=projection + gates,
        )
        yield replace(begun, projection_bytes=self.product(width))
        base = held.delta_net_bytes + out
        mixed = self.bytes(net.conv_size)  # out of the convolution
        attended = _FLOAT32 * self.rows * net.value_size  # out of the rule
        yield replace(begun, delta_net_bytes=base + mixed + self.convolving(net))
        yield replace(begun, delta_net_bytes=base + mixed + attended + self.applying_rule(net))
        # The norm's output, and a few rows in float32: the gate, its activation, the norm and what it is made of.
        few = _FLOAT32 * min(NORM_ROWS, self.rows) * 4 * net.value_size
        yield replace(begun, delta_net_bytes=base + attended + out + few)

    def convolving(self, net: DeltaNetShape) -> int:
        """Some blocks at once, in float32: the window, the sum over the taps, its activation."""
        return _FLOAT32 * 3 * self.rows_at_once(net.conv_size) * net.conv_size

    def applying_rule(self, net: DeltaNetShape) -> int:
        """Some blocks are prepared while those before them are still held."""
        blocks = self.rows_at_once(net.value_size)  # in tokens
        group = net.num_value_heads // net.num_key_heads
        keys = _FLOAT32 * blocks * net.num_value_heads * net.key_head_dim  # for each value head
        values = _FLOAT32 * blocks * net.value_size
        square = _FLOAT32 * blocks * net.num_value_heads * STATE_GRID  # tokens of a block by each other
        prepared = 3 * keys + values + 2 * square  # pairs of keys and queries, writers; inverse, attention
        # Pairs, values, decays, products, the system, attention, and the inverse on its way
        preparing = 2 * keys + values + 3 * square + 2 * square // group + 2 * square
        if group > 1:
            preparing += 2 * keys // group
        # Through one block goes the state: what it holds of the tokens, what they write twice, the state once more.
        of_block = _FLOAT32 * STATE_GRID * net.value_size
        state = _FLOAT32 * net.num_value_heads * net.key_head_dim * net.value_head_dim
        carrying = prepared + values + 4 * of_block + max(of_block, state)
        is_repeated = self.step.num_prompt_tokens > blocks
        return max(carrying, preparing + (prepared + values if is_repeated else 0))

    def rows_at_once(self, width: int) -> int:
        num_blocks = max(1, min(ELEMENTS_PER_THREAD * self.workspace.num_threads // width, MOST_BLOCKS))
        return min(num_blocks * STATE_GRID, _rounded_up(self.rows, STATE_GRID))

    # Feed-forward

    def feed_forward(self) -> Iterator[StepMemory]:
        hidden = self.shape.hidden_size
        begun = replace(self.held, phase="mlp", hidden_bytes=self.bytes(hidden) + self.norm_held(hidden))
        # A block's output is added to the residual and normed, with all three still there.
        yield replace(
            begun, hidden_bytes=begun.hidden_bytes + self.bytes(2 * hidden) + self.norm_peak(hidden)
        )
        if self.shape.num_dense_layers:
            yield replace(begun, mlp_bytes=self.feeding(self.shape.intermediate_size, self.rows))
        if self.shape.experts:
            yield replace(begun, mlp_bytes=self.experts(self.shape.experts))

    def feeding(self, width: int, rows: int) -> int:
        """One block: gate and up, then their product; or that and the output."""
        width = _rounded_up(width, LANES)
        return max(
            self.product(2 * width, rows),
            self.bytes(3 * width, rows),
            self.bytes(width, rows) + self.product(self.shape.hidden_size, rows),
        )

    def experts(self, experts: ExpertsShape) -> int:
        """At the busiest expert, or at the shared one."""
        hidden, rows = self.shape.hidden_size, self.rows
        shared = experts.shared_intermediate_size
        num_scores = experts.num_experts + (LANES if shared else 0)
        active = self.workspace.num_active_experts
        # Scores and chances; then a token's experts, their order, its own number and the weights.
        routing = _FLOAT32 * rows * (num_scores + experts.num_experts)
        routing += rows * (active or 1) * (3 * _INT64 + _FLOAT32)
        total = _FLOAT32 * rows * hidden
        group = rows
        if active:
            group = min(rows, -(-_BUSIEST * rows * active // experts.num_experts))
        slab = self.workspace.expert_slab or self.workspace.row_slab
        padded = padded_rows(group, slab or self.workspace.row_floor, slab)
        # The output of the expert before, a group's input, the same filled up, the block
        feeding = self.bytes(2 * hidden, group) + self.bytes(hidden, padded)
        feeding += self.feeding(experts.intermediate_size, min(padded, slab) if slab else padded)
        # The group's output, in slabs and as one, then in float32
        adding = self.bytes((3 if slab else 2) * hidden, padded) + _FLOAT32 * group * hidden
        marks = [feeding, adding, self.bytes(hidden)]  # the last: the sum in the model's dtype
        if shared:
            last = self.bytes(hidden, group)
            gate = _FLOAT32 * rows * LANES
            # The shared block; then its output, in float32 too, to be added
            block = max(self.feeding(shared, rows), self.bytes(hidden) + _FLOAT32 * rows * hidden)
            marks.append(last + gate + block)
        return routing + total + max(marks)

    # The output head

    def head(self) -> StepMemory:
        """Rows run in slabs, in the model's dtype, are joined where there are several, and become float32."""
        vocab, wanted = self.shape.vocab_size, self.step.num_logits
        slabs = _rounded_up(wanted, HEAD_ROWS) if self.step.num_prompt_tokens else wanted
        joined = slabs if slabs > HEAD_ROWS else 0
        return StepMemory(
            "head",
            input_bytes=self.inputs,
            hidden_bytes=self.bytes(2 * self.shape.hidden_size, slabs),
            logits_bytes=max(
                self.bytes(vocab, slabs + joined),
                self.bytes(vocab, joined or slabs) + self.logits_dtype_bytes * vocab * wanted,
            ),
        )


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
