"""The gated feed-forward block."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.interface import Kernels
from penstock.kernels.quantised import Weight
from penstock.layers.forward_batch import ForwardBatch
from penstock.layers.fused_weight import FusedWeight, project


@dataclass(frozen=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up as one product."""

    gate_up_weight: FusedWeight  # [2 * width, hidden]
    gate_up_bias: Tensor | None
    down_weight: Weight  # [hidden, width]
    down_bias: Tensor | None

    def __call__(self, x: Tensor, num_rows: int, batch: ForwardBatch, kernels: Kernels) -> Tensor:
        """x [rows, hidden] to the block's output; padding after `num_rows` rows is run like any other row."""
        return self.feed(x, batch, kernels)

    def feed(self, x: Tensor, batch: ForwardBatch, kernels: Kernels) -> Tensor:
        activated = kernels.silu_and_mul(project(x, self.gate_up_weight, self.gate_up_bias, batch, kernels))
        return kernels.linear(activated, self.down_weight, self.down_bias, is_canonical=batch.is_canonical)
