"""The second half of a layer on a few rows at a time: the same answers, in little memory."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.quantised import Weight
from penstock.kernels.reference.kernels import TorchKernels
from penstock.models.hf.folder import HfFolder
from penstock.models.loading import load_decoder
from penstock.plan.grids import RowLaw
from tests.oracle import make_oracle, random_prompt, run_prompt

CPU = torch.device("cpu")
AS_IT_IS = RowLaw(tile_size=512, row_floor=1, row_slab=0, row_grid=1)


class Watched(TorchKernels):
    """Notes how many rows are activated at a time. All goes row by row, so that only what is wrong changes bits."""

    def __init__(self, feed_rows: int) -> None:
        super().__init__()
        self.feed_rows = feed_rows
        self.seen: list[int] = []

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        self.seen.append(len(gate_up))
        return torch.cat([super(Watched, self).silu_and_mul(row) for row in gate_up.split(1)])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.cat([super(Watched, self).rms_norm(row, weight, eps) for row in x.split(1)])

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None = None, *, is_canonical: bool = True
    ) -> Tensor:
        return torch.cat([super(Watched, self).linear(row, weight, bias) for row in x.split(1)])


def logits_of(family: str, kernels: Watched, num_tokens: int) -> Tensor:
    model = load_decoder(HfFolder(make_oracle(family).folder), kernels, torch.float32, CPU)
    logits = run_prompt(model, random_prompt(num_tokens), canon=AS_IT_IS).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize(
    ("num_tokens", "sizes"), [(64, [64]), (65, [64, 1]), (128, [64, 64]), (170, [64, 64, 42])]
)
def test_slabs_change_no_bit(family: str, num_tokens: int, sizes: list[int]) -> None:
    slabs, whole = Watched(64), Watched(0)
    ours = logits_of(family, slabs, num_tokens)
    assert torch.equal(ours, logits_of(family, whole, num_tokens))
    theirs = make_oracle(family).logits(random_prompt(num_tokens))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4
    assert slabs.seen[: len(sizes)] == sizes
    assert whole.seen[0] == num_tokens


def test_models_of_experts_feed_all_rows() -> None:
    assert torch.equal(logits_of("qwen3_moe", Watched(16), 40), logits_of("qwen3_moe", Watched(0), 40))
