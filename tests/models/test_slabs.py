"""The second half of a layer on a few rows at a time: the same answers, in little memory."""

import pytest
import torch
from torch import Tensor

from penstock.engine.batch import Canon
from penstock.kernels.torch_kernels import TorchKernels
from penstock.models.decoder import Decoder
from penstock.models.folder import HfFolder
from penstock.models.loading import load_decoder
from tests.oracle import make_oracle, random_prompt, run_prompt

CPU = torch.device("cpu")
AS_IT_IS = Canon(tile_size=512, row_floor=1, row_slab=0, row_grid=1)


class Watched(TorchKernels):
    """Notes how many rows are activated at a time."""

    def __init__(self, feed_rows: int) -> None:
        super().__init__()
        self.feed_rows = feed_rows
        self.seen: list[int] = []

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        self.seen.append(len(gate_up))
        return super().silu_and_mul(gate_up)


def model_of(family: str, kernels: Watched) -> Decoder:
    return load_decoder(HfFolder(make_oracle(family).folder), kernels, torch.float32, CPU)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize("num_tokens", [64, 127, 128, 129, 300])
def test_slabs_change_no_answer(family: str, num_tokens: int) -> None:
    prompt = random_prompt(num_tokens)
    slabs = Watched(64)
    ours = run_prompt(model_of(family, slabs), prompt, canon=AS_IT_IS).logits
    assert ours is not None
    theirs = make_oracle(family).logits(prompt)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4
    sizes = [64] * (num_tokens // 64 - 1) + [64 + num_tokens % 64]
    assert slabs.seen[: len(sizes)] == sizes


def test_numbers_of_rows_that_are_avoided_are_not_made() -> None:
    kernels = Watched(64)
    model = model_of("llama", kernels)
    kernels.avoided_rows = (64 + 300 % 64,)
    run_prompt(model, random_prompt(300), canon=AS_IT_IS)
    assert kernels.seen[0] == 300
