"""Products of rows that are rounded to 8 bits with weights in blocks, against float64 on the same rounded rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import SettingError
from penstock.kernels.interface import select_kernels
from penstock.kernels.native.kernels import NativeKernels
from penstock.kernels.native.quantised import NativeProducts
from penstock.kernels.probe import ProbeShapes, ProductShape, measure
from penstock.kernels.quantised import BFLOAT16, Q4_K, Q5_K, Q6_K, Q8_0, BlockForm, QuantisedWeight, quantise
from tests.kernels.test_quantised import FORMS, NUM_IN, check_near, random_blocks, random_rows, weight_of

CPU = torch.device("cpu")
MOST_ROWS = 200

pytestmark = pytest.mark.skipif(
    select_kernels(CPU).quantised is None, reason="there are no native kernels here"
)


def rounding_kernels() -> NativeKernels:
    kernels = select_kernels(CPU, "native", "int8")
    assert isinstance(kernels, NativeKernels)
    return kernels


def rounding_products() -> NativeProducts:
    products = rounding_kernels().quantised
    assert products is not None
    return products


def rounded(x: Tensor, form: BlockForm) -> Tensor:
    """Each group of inputs, as many as a block of the form has, as whole parts of a 127th of its largest."""
    num_in = x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, -num_in % form.block_size))
    groups = padded.view(len(x), -1, form.block_size)
    most = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(most > 1e-30, torch.full_like(most, 127) / most, 0)
    return ((groups * inverse).round().double() * (most / 127).double()).flatten(1)[:, :num_in]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_rounded_rows(form: BlockForm, has_bias: bool) -> None:
    products = rounding_products()
    weight, values = weight_of(products, form)
    x = random_rows(MOST_ROWS)
    x[3, 64:96] = 0
    x[5, 32] = 1000
    x[7] *= 1e-25
    bias = torch.linspace(-3, 3, weight.shape[0]).bfloat16() if has_bias else None
    near = rounded(x, form)
    exact = near @ values.double().T + (0 if bias is None else bias.double())
    terms = near.abs().sum(dim=1, keepdim=True) * 16 * values.double().abs().amax(dim=1)
    check_near(products.linear(x, weight, bias, is_canonical=True), exact, terms)
    # What rounding itself loses: half a step, of a 127th of each group's largest.
    lost = (near - x.double()).norm(dim=1) / x.double().norm(dim=1)
    assert 0 < float(lost.amax()) < 0.05


@pytest.mark.parametrize("num_in", [32, 96, 288, 544])
def test_groups_that_no_block_fills(num_in: int) -> None:
    products = rounding_products()
    for form in FORMS:
        blocks = random_blocks(form, 40, num_in - num_in % form.block_size)
        weight = products.zeros(form, 40, num_in)
        products.place(weight, torch.arange(40), blocks)
        values = products.rows(weight, torch.arange(40), torch.float32).double()
        x = random_rows(40, num_in)
        near = rounded(x, form)
        terms = near.abs().sum(dim=1, keepdim=True) * 16 * values.abs().amax(dim=1)
        check_near(products.linear(x, weight, None, is_canonical=True), near @ values.T, terms)


@given(st.data())
def test_a_row_is_the_same_in_any_number_of_rows_and_any_way(data: st.DataObject) -> None:
    products = rounding_products()
    form = data.draw(st.sampled_from(FORMS))
    num_out = data.draw(st.integers(1, 130))
    num_in = form.block_size * data.draw(st.integers(1, 6))
    values = torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(num_out))
    weight = products.zeros(form, num_out, num_in)
    if form is Q8_0:
        products.place(weight, torch.arange(num_out), quantise(values, form))
    else:
        blocks = torch.randint(64, (num_out, form.row_bytes(num_in)), dtype=torch.uint8)
        products.place(weight, torch.arange(num_out), blocks)
    x = random_rows(MOST_ROWS, num_in)
    num_rows = data.draw(st.integers(1, MOST_ROWS))
    start = data.draw(st.integers(0, MOST_ROWS - num_rows))
    row = data.draw(st.integers(start, start + num_rows - 1))
    alone = products.linear(x[row : row + 1].clone(), weight, None, data.draw(st.booleans()))
    among = products.linear(x[start : start + num_rows], weight, None, data.draw(st.booleans()))
    assert torch.equal(alone[0], among[row - start])


def test_rows_of_more_than_one_slab() -> None:
    products = rounding_products()
    weight, _ = weight_of(products, Q4_K)
    x = random_rows(1100)
    whole = products.linear(x, weight, None, is_canonical=True)
    for rows in (slice(500, 530), slice(1020, 1100)):
        assert torch.equal(products.linear(x[rows], weight, None, is_canonical=True), whole[rows])


def test_every_number_of_rows() -> None:
    products = rounding_products()
    x = random_rows(MOST_ROWS)
    for form in FORMS:
        weight, _ = weight_of(products, form)
        whole = products.linear(x, weight, None, is_canonical=True)
        for num_rows in range(1, MOST_ROWS + 1):
            assert torch.equal(
                products.linear(x[:num_rows], weight, None, is_canonical=False), whole[:num_rows]
            )


def test_what_is_no_number_stays_none() -> None:
    products = rounding_products()
    weight, _ = weight_of(products, Q8_0)
    x = random_rows(4)
    expected = products.linear(x, weight, None, is_canonical=True)
    x[1, 40], x[2, 7] = float("nan"), float("inf")
    ours = products.linear(x, weight, None, is_canonical=True)
    assert torch.equal(ours[[0, 3]], expected[[0, 3]])
    assert not bool(ours[[1, 2]].isfinite().any())


def test_the_largest_bytes_do_not_overflow() -> None:
    """All quants and all inputs as large as they may be, of either sign."""
    products = rounding_products()
    for sign in (1, -1):
        x = torch.full((3, NUM_IN), sign).bfloat16()
        values = torch.full((40, NUM_IN), 127.0)
        weight = products.zeros(Q8_0, 40, NUM_IN)
        products.place(weight, torch.arange(40), quantise(values, Q8_0))
        ours = products.linear(x, weight, None, is_canonical=True)
        assert torch.equal(ours, torch.full((3, 40), 127.0 * sign * NUM_IN).bfloat16())
        for form, scale_bytes in ((Q4_K, 12), (Q5_K, 12), (Q6_K, 16)):  # of 6 bits, of 8 bits with a sign
            blocks = torch.full((40, NUM_IN // form.block_size, form.block_bytes), 255, dtype=torch.uint8)
            if form is Q6_K:
                blocks[..., -2 - scale_bytes : -2] = 128
            halves = blocks[..., -2:] if form is Q6_K else blocks[..., :4]
            halves[..., 0::2], halves[..., 1::2] = 0, 0x3C  # 1
            products.place(weight := products.zeros(form, 40, NUM_IN), torch.arange(40), blocks.flatten(1))
            values = products.rows(weight, torch.arange(40), torch.float32)
            ours = products.linear(x, weight, None, is_canonical=True)
            assert torch.equal(ours, (x.float() @ values.T).bfloat16())


def test_what_is_not_in_blocks_is_not_rounded() -> None:
    kernels = rounding_kernels()
    assert kernels.quantised is not None
    plain = torch.randn(64, NUM_IN).bfloat16()
    packed = kernels.quantised.packed(plain, BFLOAT16)
    assert not packed.rounds_rows
    assert kernels.unpacked_bytes(packed) == 0
    weight, _ = weight_of(kernels.quantised, Q4_K)
    assert isinstance(weight, QuantisedWeight)
    assert weight.rounds_rows
    assert kernels.unpacked_bytes(weight) == 512 * NUM_IN * 1.25


def test_the_probe_finds_that_decodes_are_free() -> None:
    shapes = ProbeShapes(
        (ProductShape(96, 256, form="Q4_1"), ProductShape(64, 544, bias=True, form="Q8_0")),
        *(6, 2, 16, 96, (1088,), 16),
        ProductShape(300, 512, form="Q6_K"),
    )
    result = measure(rounding_kernels(), shapes, torch.bfloat16, CPU)
    assert (result.row_floor, result.head_holds, result.same_bits) == (1, True, True)
    assert result.free_decodes == 32


def test_kernels_without_such_products_refuse() -> None:
    with pytest.raises(SettingError) as caught:
        select_kernels(CPU, "torch", "int8")
    assert (caught.value.setting, caught.value.value) == ("activations", "int8")
