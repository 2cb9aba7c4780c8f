"""The kernels on a GPU: what they compute, and what must not change a row's bits."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from penstock.cache.states import EMPTY
from penstock.cache.tensors import LayerStates, RecurrentCache, RecurrentSpec
from penstock.kernels.cuda.quantised import GpuProducts
from penstock.kernels.interface import select_kernels
from penstock.kernels.probe import Random
from penstock.kernels.quantised import ALL_FORMS, FLOAT_FORMS, HOST_FORMS
from penstock.kernels.reference.kernels import TorchKernels
from penstock.kernels.spans import DeltaHeads, Scoring, StateRows, StateWork
from penstock.plan.model import DeltaNetConfig, ExpertsConfig
from tests.gpu.cases import over
from tests.gpu.models import gpu
from tests.kernels.parity import (
    EPS,
    ROUTERS,
    SCALE,
    ExpertRows,
    Heads,
    Rows,
    Subject,
    check_activation,
    check_attention,
    check_beside,
    check_close,
    check_cuts,
    check_experts,
    check_experts_alone,
    check_norms,
    check_placed_heads,
    in_one_place,
)

DTYPES = (torch.float32, torch.bfloat16)
HEADS = (Heads(6, 2, 64), Heads(32, 8, 128), Heads(4, 4, 128), Heads(16, 2, 256))


@dataclass(frozen=True)
class HeadCase:
    heads: Heads
    dtype: torch.dtype

    def __str__(self) -> str:
        heads = self.heads
        return f"{heads.num_heads}/{heads.num_kv_heads} of {heads.head_dim}, {_name(self.dtype)}"


HEAD_CASES = [HeadCase(heads, dtype) for heads in HEADS for dtype in DTYPES]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def subject_of(dtype: torch.dtype) -> Subject:
    return Subject(select_kernels(gpu()), dtype, gpu())


@over(DTYPES)
def test_norms(case: torch.dtype) -> None:
    for size in (96, 1024, 4096, 5000):
        check_norms(subject_of(case), 65, size)


@over(DTYPES)
def test_sum_is_rounded_once(case: torch.dtype) -> None:
    subject = subject_of(case)
    x, delta = subject.normal(65, 1024), subject.normal(65, 1024, seed=1)
    total, _ = subject.kernels.add_norm(x, delta, subject.normal(1024), EPS)
    assert torch.equal(total, x + delta)


@over(DTYPES)
def test_activation(case: torch.dtype) -> None:
    for width in (40, 1024, 3072, 12288):
        check_activation(subject_of(case), 65, width)


@over(DTYPES)
def test_products_and_embedding(case: torch.dtype) -> None:
    subject = subject_of(case)
    x, bias = subject.normal(300, 512), subject.normal(768, seed=1)
    weight = subject.normal(768, 512, seed=2)
    exact = x.double() @ weight.double().T + bias.double()
    packed = subject.kernels.pack(weight)
    most = 2e-6 if case == torch.float32 else 0.01
    for num_rows in (1, 3, 64, 300):
        check_close(subject.kernels.linear(x[:num_rows], packed, bias), exact[:num_rows], most)
    chosen = torch.tensor([5, 0, 767, 5], device=subject.device)
    assert torch.equal(subject.kernels.embed(chosen, weight), weight[chosen])
    check_close(subject.kernels.sigmoid(x), torch.sigmoid(x.double()), most)


@over(DTYPES)
def test_experts(case: torch.dtype) -> None:
    for config in ROUTERS.values():
        check_experts(ExpertRows(subject_of(case), config, 100))
    config = ROUTERS["softmax"]
    for num_rows in (1, 7, 1000):
        check_experts(ExpertRows(subject_of(case), config, num_rows))
    check_experts_alone(ExpertRows(subject_of(case), config, 1200), (1, 5, 16, 17, 100, 333, 700))


GPU_FORMS = [
    name for name, form in ALL_FORMS.items() if form not in HOST_FORMS
]  # a GPU is given that as plain values


@over(GPU_FORMS)
def test_experts_of_quantised_weights(case: str) -> None:
    config = ExpertsConfig(1, 8, 512, num_active=2)
    for is_canonical in (True, False):
        rows = ExpertRows(
            subject_of(torch.bfloat16), config, 1200, 768, ALL_FORMS[case], is_canonical=is_canonical
        )
        check_experts(rows)
        check_experts_alone(rows, (1, 5, 16, 17, 64, 100, 333, 512, 700, 1000))


@over(GPU_FORMS)
def test_products_with_quantised_weights(case: str) -> None:
    """Of one row, a few and many; rows have the same bits among any number of many."""
    form, products, (num_out, num_in) = ALL_FORMS[case], GpuProducts(), (768, 1024)
    weight = products.zeros(form, num_out, num_in, gpu())
    random = Random(torch.bfloat16, gpu())
    blocks = random.cancelling_blocks(num_out, num_in // form.block_size, form.block_bytes)
    products.place(weight, torch.arange(num_out), blocks)
    x, bias = random.normal(640, num_in), random.normal(num_out)
    exact = x.double() @ products.rows(weight, None, torch.float32).double().T + bias.double()
    many = products.linear(x, weight, bias, True)
    for num_rows in (1, 2, 4, 5, 17, 32, 64):
        check_close(products.linear(x[:num_rows], weight, bias, False), exact[:num_rows], 0.01)
    check_close(many, exact, 0.04 if form in FLOAT_FORMS else 0.01)  # rows become 8-bit floats, too
    for num_rows in (192, 320, 512):
        assert torch.equal(products.linear(x[:num_rows], weight, bias, True), many[:num_rows])


@over(HEAD_CASES)
def test_placed_heads(case: HeadCase) -> None:
    subject, dim = subject_of(case.dtype), case.heads.head_dim
    for norm_dtype in (None, case.dtype, torch.float32):
        for rotary_dim in (dim, dim // 4):
            check_placed_heads(
                subject,
                case.heads,
                rotary_dim=rotary_dim,
                norm_dtype=norm_dtype,
                num_extra=case.heads.num_heads if norm_dtype else 0,
            )


@over(HEAD_CASES)
def test_attention(case: HeadCase) -> None:
    subject = subject_of(case.dtype)
    tile = subject.kernels.law.tile_size
    blocks = tile // 64
    batches = (
        [in_one_place(0, 5)],
        [in_one_place(0, tile + 100)],
        [in_one_place(3 * tile - 60, 3 * tile + 70)],
        # A past and a tile in several places.
        [Rows(2 * tile + 3, 2 * tile + 200, (*range(blocks, 3 * blocks), 2, 0, 1, 4))],
        [in_one_place(0, 1, is_prompt=False)],
        [
            Rows(tile - 10, tile + 10, tuple(range(100, 100 + blocks + 1))),
            in_one_place(5 * tile + 1, 5 * tile + 2, is_prompt=False),
            Rows(0, 33, (1,)),
            Rows(100, 103, (3, 2), is_prompt=False),
        ],
    )
    for batch in batches:
        check_attention(subject, case.heads, batch)


@over(HEAD_CASES)
def test_a_chunk_has_the_bits_of_the_whole(case: HeadCase) -> None:
    subject = subject_of(case.dtype)
    tile = subject.kernels.law.tile_size
    edges = (
        0,
        1,
        63,
        64,
        65,
        200,
        tile - 1,
        tile,
        tile + 1,
        tile + 128,
        2 * tile + 7,
        3 * tile,
        3 * tile + 100,
    )
    successive = list(pairwise(edges))
    # The rest of a tile beside the next one.
    long = [(5 * tile - 30, 5 * tile + 40), (4 * tile + 5, 6 * tile)]
    several = [(100, 2 * tile + 100), (tile + 5, 3 * tile + 6), *long]
    check_cuts(subject, case.heads, 6 * tile, [*successive, *several])


@over(HEAD_CASES)
def test_rows_have_the_bits_that_they_have_alone(case: HeadCase) -> None:
    subject = subject_of(case.dtype)
    tile = subject.kernels.law.tile_size
    blocks = tile // 64
    batch = [
        Rows(2 * tile + 3, 2 * tile + 200, (*range(blocks, 3 * blocks), 2, 0, 1, 4)),
        Rows(100, 103, (3, 5), is_prompt=False),
        Rows(tile - 5, tile + 60, tuple(reversed(range(100, 101 + blocks)))),
        Rows(0, 33, (6,)),
        Rows(4 * tile, 4 * tile + 1, tuple(range(300, 301 + 4 * blocks)), is_prompt=False),
        Rows(63, 64, (7,), is_prompt=False),
    ]
    check_beside(subject, case.heads, batch, num_padding=5)
    check_beside(subject, case.heads, batch[::-1])
    long = Rows(5 * tile - 30, 5 * tile + 40, tuple(range(400, 401 + 5 * blocks)))
    check_beside(subject, case.heads, [long, *batch], num_padding=5)


@over(HEAD_CASES)
def test_windows_have_the_bits_of_the_whole_without_what_is_behind_them(case: HeadCase) -> None:
    subject = subject_of(case.dtype)
    long = Scoring(SCALE, window=600)
    scattered = Rows(700, 900, (*range(8, 15), 20, *range(1, 8)))
    batch = [scattered, in_one_place(1000, 1001, is_prompt=False)]
    for scoring in (long, replace(long, window=700, soft_cap=2.0), *case.heads.scorings(gpu()).values()):
        check_attention(subject, case.heads, batch, scoring=scoring)
        check_beside(subject, case.heads, batch, 5, scoring)
        cuts = [(0, 1), (1, 127), (127, 149), (600, 700), (640, 1300), (1299, 1300)]
        check_cuts(subject, case.heads, 1300, cuts, scoring)


# States of gated delta nets

LANES = 64


@dataclass(frozen=True)
class NetCase:
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.key_dim} and {self.value_dim}, {_name(self.dtype)}"

    def net(self, device: torch.device) -> DeltaHeads:
        cpu = Subject(TorchKernels(), torch.float32)
        return DeltaHeads(
            DeltaNetConfig(1, 2, 4, self.key_dim, self.value_dim, 4),
            norm_eps=1e-6,
            conv_weight=cpu.normal(4, 4 * self.key_dim + 4 * self.value_dim).to(device),
            decay_rate=-cpu.normal(LANES, seed=1).exp().to(device),
            decay_bias=cpu.normal(LANES, seed=2).to(device),
            norm=cpu.normal(self.value_dim, seed=3).to(device),
        )

    def states(self, device: torch.device) -> LayerStates:
        """Of six slots, all of which hold something."""
        net = self.net(device)
        spec = RecurrentSpec.of(net.sizes, self.dtype)
        states = RecurrentCache(spec, 6, device).layer(0)
        cpu = Subject(TorchKernels(), torch.float32)
        states.tails.copy_(cpu.normal(*states.tails.shape, seed=4))
        states.matrices.copy_(cpu.normal(*states.matrices.shape, seed=5))
        return states

    def rows(self, num_rows: int, device: torch.device) -> Tensor:
        net = self.net(device)
        cpu = Subject(TorchKernels(), torch.float32)
        return cpu.normal(num_rows, net.sizes.conv_size + net.sizes.value_size + 2 * LANES).to(
            device, self.dtype
        )


NET_CASES = [NetCase(*dims, dtype) for dims in ((128, 128), (16, 24)) for dtype in DTYPES]


@over(NET_CASES)
def test_carried_states(case: NetCase) -> None:
    """Spans of which one is cut to keep a state, decodes, and padding, against the reference on the CPU."""
    cpu = torch.device("cpu")
    work = (
        StateRows(0, 128, EMPTY, 0, is_prompt=True),
        StateRows(128, 201, 0, 1, is_prompt=True),
        StateRows(201, 203, 4, 2, is_prompt=True),
        StateRows(203, 204, 4, 3, is_prompt=False),
        StateRows(204, 205, EMPTY, 5, is_prompt=False),
    )
    ours, theirs = case.states(gpu()), case.states(cpu)
    out = select_kernels(gpu()).carry_states(case.rows(208, gpu()), case.net(gpu()), StateWork(work), ours)
    expected = TorchKernels().carry_states(case.rows(208, cpu), case.net(cpu), StateWork(work), theirs)
    most = 1e-4 if case.dtype == torch.float32 else 0.03
    check_close(out.cpu(), expected.double(), most)
    check_close(ours.matrices.cpu(), theirs.matrices.double(), most)
    assert torch.equal(ours.tails.cpu(), theirs.tails)


@over(NET_CASES)
def test_states_carried_from_block_to_block_have_the_bits_of_the_whole(case: NetCase) -> None:
    kernels, net, rows = select_kernels(gpu()), case.net(gpu()), case.rows(300, gpu())
    whole, parts = case.states(gpu()), case.states(gpu())
    expected = kernels.carry_states(rows, net, StateWork((StateRows(0, 300, 1, 4, is_prompt=True),)), whole)
    slot = 1
    for start, end in ((0, 64), (64, 256), (256, 300)):
        target = 4 if end == 300 else 2 if slot == 3 else 3
        work = StateWork((StateRows(0, end - start, slot, target, is_prompt=True),))
        assert torch.equal(kernels.carry_states(rows[start:end], net, work, parts), expected[start:end])
        slot = target
    assert torch.equal(parts.matrices[4], whole.matrices[4])
    assert torch.equal(parts.tails[4], whole.tails[4])
