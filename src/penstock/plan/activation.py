"""What lives at the high-water mark of one step's activations, by arithmetic from the model's shape.

The parts follow the pass as `penstock.models.decoder` runs it, tensor by tensor. A layer has two phases that never
live at the same time, mixing (attention or delta net) and feed-forward; after the last comes the output head. The
mark of a step is that of its largest phase.
"""

from collections.abc import Iterator
from dataclasses import replace

from penstock.plan.activation_mixing import attention_marks, delta_net_marks, mixed
from penstock.plan.activation_parts import (
    FLOAT32,
    INT64,
    REFERENCE,
    PassSizes,
    Phase,
    StepMemory,
    rounded_up,
)
from penstock.plan.checks import check_int
from penstock.plan.grids import LANES, ROTARY_PAGE
from penstock.plan.model import ExpertsShape, ModelShape
from penstock.plan.step import StepShape, Workspace

# Random and trained routers do not send every expert the same share of tokens: the busiest gets about so much of the
# mean. All that an expert holds is a small part of the phase.
_BUSIEST = 2


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
    if sizes.shape.delta_net:
        yield from delta_net_marks(sizes, sizes.shape.delta_net)
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
    hidden = sizes.shape.hidden_size
    begun = StepMemory(
        "mlp",
        input_bytes=sizes.inputs + sizes.graphs,
        hidden_bytes=sizes.bytes(hidden) + sizes.norm_held(hidden),
    )
    feed_rows = sizes.workspace.feed_rows
    is_in_slabs = 0 < feed_rows < sizes.rows
    if sizes.shape.num_dense_layers and is_in_slabs:
        # Sums and norms are written over what they are made of.
        yield replace(
            begun,
            hidden_bytes=sizes.bytes(2 * hidden) + sizes.bytes(2 * hidden, feed_rows),
            mlp_bytes=_feeding(sizes, sizes.shape.intermediate_size, feed_rows),
        )
        if not sizes.shape.experts:
            return
    # A block's output is added to the residual and normed, with all three still there: and beside mixing's what it
    # was made of, beside this block's what it was fed with.
    adding = sizes.bytes(3 * hidden) + sizes.norm_peak(hidden)
    yield replace(mixed(sizes), phase="mlp", hidden_bytes=adding)
    yield replace(begun, hidden_bytes=adding + sizes.norm_held(hidden))
    if sizes.shape.num_dense_layers and not is_in_slabs:
        yield replace(begun, mlp_bytes=_feeding(sizes, sizes.shape.intermediate_size, sizes.rows))
    if sizes.shape.experts:
        yield replace(begun, mlp_bytes=_experts(sizes, sizes.shape.experts))


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


def _experts(sizes: PassSizes, experts: ExpertsShape) -> int:
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
    head_rows = sizes.workspace.head_rows
    slabs = rounded_up(wanted, head_rows) if sizes.step.num_prompt_tokens else wanted
    joined = slabs if slabs > head_rows else 0
    return StepMemory(
        "head",
        input_bytes=sizes.inputs + sizes.graphs,
        hidden_bytes=sizes.bytes(2 * sizes.shape.hidden_size, slabs),
        logits_bytes=max(
            sizes.bytes(vocab, slabs + joined),
            sizes.bytes(vocab, joined or slabs) + sizes.logits_dtype_bytes * vocab * wanted,
        ),
    )
