"""The second half of a layer on a few rows at a time: the same answers, in little memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.batch import Canon
from penstock.kernels.interface import slabs_of
from penstock.kernels.quantised import Weight
from penstock.kernels.reference.kernels import TorchKernels
from penstock.models.hf.folder import HfFolder
from penstock.models.loading import load_decoder
from tests.oracle import make_oracle, random_prompt, run_prompt

CPU = torch.device("cpu")
AS_IT_IS = Canon(tile_size=512, row_floor=1, row_slab=0, row_grid=1)


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


def test_parts_are_whole_powers_of_two_where_that_may_be() -> None:
    kernels = Watched(2560)
    kernels.row_grid, kernels.row_floor = 64, 192

    def sizes(num_rows: int) -> list[int]:
        return [slab.stop - slab.start for slab in slabs_of(num_rows, kernels)]

    assert sizes(32_768) == [2048] * 16
    assert sizes(3072) == [2048, 1024]
    kernels.avoided_rows = (1024,)
    assert sizes(3072) == [1536, 1536]
    kernels.avoided_rows = ()
    kernels.row_floor = 1100
    assert sizes(3072) == [1536, 1536]


@given(
    st.integers(1, 500).map(lambda blocks: 64 * blocks),
    st.integers(1, 40).map(lambda blocks: 64 * blocks),
    st.sets(st.integers(1, 40).map(lambda blocks: 64 * blocks), max_size=8),
    st.integers(1, 300),
)
def test_parts_are_of_numbers_that_may_be(num_rows: int, most: int, avoided: set[int], floor: int) -> None:
    kernels = Watched(most)
    kernels.row_grid, kernels.row_floor, kernels.avoided_rows = 64, floor, tuple(avoided)
    slabs = slabs_of(num_rows, kernels)
    sizes = [slab.stop - slab.start for slab in slabs]
    assert not avoided & {*sizes}
    assert all(floor <= size <= most for size in sizes)
    if slabs:
        assert [row for slab in slabs for row in range(num_rows)[slab]] == list(range(num_rows))
    elif not avoided and floor <= 64:
        pytest.fail("there are such parts")
