"""The bytes of a step by what holds them, and the sizes that all phases of a pass share."""

from dataclasses import dataclass, fields
from typing import Literal

from penstock.plan.grids import GRAPH_ROWS, ROTARY_PAGE
from penstock.plan.model import ModelShape
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
        shape: ModelShape,
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
        self.rows = workspace.law.padded_rows(step.num_rows) if step.num_prompt_tokens else step.num_rows
        self.query = shape.num_heads * shape.head_dim
        self.kv = shape.num_kv_heads * shape.head_dim
        self.projected = (2 if shape.gated_attention else 1) * self.query + 2 * self.kv
        # Rotated queries; in plain torch one tensor with the keys, where no norm parts them.
        is_alone = self.is_fused or workspace.head_norm
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

    # What lives throughout

    @property
    def inputs(self) -> int:
        ids = self.rows * (3 if self.kernels == "cuda" else 2) * INT64  # and places, on a GPU
        kept = SMALL_BYTES + self.workspace.library_bytes + self.rotary_tables
        return kept + ids + self.bytes(2 * self.rotary_width)

    @property
    def graphs(self) -> int:
        """What chunks that a GPU has recorded attend into, which is kept."""
        can_record = self.kernels == "cuda" and not self.shape.delta_net and not self.shape.experts
        return self.bytes(self.query, min(self.rows, GRAPH_ROWS)) if can_record else 0

    @property
    def rotary_width(self) -> int:
        if not self.shape.num_attention_layers:
            return 0
        return self.workspace.rotary_dim or self.shape.head_dim

    @property
    def rotary_tables(self) -> int:
        """Cosines and sines of every position so far, made a page at a time and kept."""
        longest = self.step.longest_past + self.step.num_prompt_tokens
        return self.bytes(2 * self.rotary_width, rounded_up(longest, ROTARY_PAGE))
