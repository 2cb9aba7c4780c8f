"""Products with weights in a file's blocks, against the same weights dequantised by the gguf package."""

from functools import cache

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.native.build import NativeUnavailableError
from penstock.kernels.native.kernels import NativeKernels
from penstock.kernels.native.quantised import NativeProducts
from penstock.kernels.probe import ProbeShapes, ProductShape, measure
from penstock.kernels.quantised import (
    BLOCK_FORMS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    BlockForm,
    QuantisedWeight,
    quantise,
)
from tests.kernels.emulated import use_emulated_amx

NUM_OUT, NUM_IN = 200, 512
MOST_ROWS = 700
FORMS = list(BLOCK_FORMS.values())
FOUR_BITS = (Q4_0, Q4_1, Q4_K, MXFP4, Q2_K, Q3_K, IQ4_NL, IQ4_XS)
# The spacing of bfloat16, which a product is rounded to, and what float32 loses in the sum.
HALF_STEP = 2**-8


@cache
def _kernels(on_amx: bool) -> NativeKernels:
    with pytest.MonkeyPatch.context() as patch:
        if on_amx:
            use_emulated_amx(patch)
        try:
            return NativeKernels()
        except NativeUnavailableError as error:
            pytest.skip(f"the native kernels cannot be had: {error}")


def _products(on_amx: bool) -> NativeProducts:
    products = _kernels(on_amx).quantised
    assert products is not None
    return products


@pytest.fixture(params=[False, True], ids=["", "amx"])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    """Of this processor, and of one with AMX."""
    return _kernels(request.param)


@pytest.fixture
def products(kernels: NativeKernels) -> NativeProducts:
    assert kernels.quantised is not None
    return kernels.quantised


def random_blocks(form: BlockForm, num_out: int, num_in: int) -> Tensor:
    """Rows of blocks with any quants, and scales of about 0.01 (wherever the form has them)."""
    generator = np.random.default_rng(form.number)
    blocks = generator.integers(
        0, 256, (num_out, num_in // form.block_size, form.block_bytes), dtype=np.uint8
    )
    halves = generator.uniform(-0.02, 0.02, (*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
    if form is MXFP4:
        blocks[..., 0] = generator.integers(118, 122, blocks.shape[:2])
    elif form is Q2_K:
        blocks[..., -4:] = halves
    elif form in (Q6_K, Q3_K):
        blocks[..., -2:] = halves[..., :2]
    else:
        num_bytes = 4 if form in (Q4_1, Q4_K, Q5_1, Q5_K) else 2
        blocks[..., :num_bytes] = halves[..., :num_bytes]
    return torch.from_numpy(blocks).flatten(1)


def weight_of(products: NativeProducts, form: BlockForm) -> tuple[QuantisedWeight, Tensor]:
    """A weight, and its values in float32 as the gguf package has them."""
    blocks = random_blocks(form, NUM_OUT, NUM_IN)
    weight = products.zeros(form, NUM_OUT, NUM_IN)
    products.place(weight, torch.arange(NUM_OUT), blocks)
    values = dequantize(blocks.numpy(), Kind[form.name])
    return weight, torch.from_numpy(values).view(NUM_OUT, NUM_IN)


def most_few_rows(form: BlockForm) -> int:
    """Up to how many rows quants are multiplied as they are; no more of them go the canonical way everywhere."""
    is_wide = NativeKernels().instructions != "neon"
    return 32 if form in FOUR_BITS or (is_wide and form is not Q8_0) else 16 if form is Q8_0 else 8


def multiplied(kernels: NativeKernels, values: Tensor) -> Tensor:
    """What many rows are multiplied with: the weight itself, where they are integers of 16 bits, else bfloat16."""
    return (values if kernels.instructions in ("avx2", "avx512") else values.bfloat16()).double()


def random_rows(num_rows: int, width: int = NUM_IN) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width)).bfloat16()


def check_near(ours: Tensor, exact: Tensor, terms: Tensor) -> None:
    """`terms` are the sums of the sizes of what was summed: float32's errors are a part of those."""
    allowed = HALF_STEP * exact.abs() + 2**-20 * terms
    assert bool(((ours.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_rows_are_the_values_of_the_file(products: NativeProducts, form: BlockForm) -> None:
    weight, values = weight_of(products, form)
    assert torch.equal(products.rows(weight, torch.arange(NUM_OUT), torch.float32), values)
    some = torch.tensor([7, 0, 199, 7])
    assert torch.equal(products.rows(weight, some, torch.bfloat16), values[some].bfloat16())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_they_take_the_memory_that_is_planned(products: NativeProducts, form: BlockForm) -> None:
    weight = products.zeros(form, 320, 768)
    assert weight.nbytes == 320 * 768 * form.resident_bits / 8
    assert weight.nbytes <= 1.4 * 320 * form.row_bytes(768)


@pytest.mark.parametrize("num_in", [32, 96, 288, 544])
def test_inputs_that_no_file_has_are_zero(
    kernels: NativeKernels, products: NativeProducts, num_in: int
) -> None:
    for form in FORMS:
        blocks = random_blocks(form, 40, num_in - num_in % form.block_size)
        weight = products.zeros(form, 40, num_in)
        products.place(weight, torch.arange(40), blocks)
        values = torch.zeros(40, num_in)
        if blocks.numel():
            values[:, : num_in - num_in % form.block_size] = torch.from_numpy(
                dequantize(blocks.numpy(), Kind[form.name])
            ).view(40, -1)
        assert torch.equal(products.rows(weight, torch.arange(40), torch.float32), values)
        x = random_rows(40, num_in)
        exact = x.double() @ multiplied(kernels, values).T
        check_near(
            products.linear(x, weight, None, is_canonical=True),
            exact,
            2**4 * x.double().abs() @ values.double().abs().T,
        )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_few_rows_are_exact(products: NativeProducts, form: BlockForm, has_bias: bool) -> None:
    weight, values = weight_of(products, form)
    x = random_rows(7)
    bias = torch.linspace(-3, 3, NUM_OUT).bfloat16() if has_bias else None
    exact = x.double() @ values.double().T + (0 if bias is None else bias.double())
    ours = products.linear(x, weight, bias, is_canonical=False)
    # A group's minimum and its quants may be much larger than their sum.
    check_near(
        ours, exact, x.double().abs().sum(dim=1, keepdim=True) * 16 * values.double().abs().amax(dim=1)
    )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("num_rows", [1, 5, 6, 7, 100])
def test_products_of_many_rows_are_exact_or_those_of_bfloat16(
    kernels: NativeKernels, products: NativeProducts, form: BlockForm, num_rows: int
) -> None:
    weight, values = weight_of(products, form)
    x = random_rows(num_rows)
    rounded = multiplied(kernels, values)
    ours = products.linear(x, weight, None, is_canonical=True)
    # Once in a while a value lies so close to the middle of two of bfloat16 that it is rounded to the other.
    check_near(ours, x.double() @ rounded.T, 2**4 * x.double().abs() @ rounded.abs().T)


@pytest.mark.parametrize("on_amx", [False, True], ids=["", "amx"])
@pytest.mark.parametrize("is_canonical", [False, True])
@given(st.data())
def test_a_row_is_the_same_in_any_number_of_rows_and_place(
    is_canonical: bool, on_amx: bool, data: st.DataObject
) -> None:
    products = _products(on_amx)
    form = data.draw(st.sampled_from(FORMS))
    most_rows = MOST_ROWS if is_canonical else most_few_rows(form)
    num_rows = data.draw(st.integers(1, most_rows))
    start = data.draw(st.integers(0, MOST_ROWS - num_rows))
    weight, _ = weight_of(products, form)
    x = random_rows(MOST_ROWS)
    row = data.draw(st.integers(start, start + num_rows - 1))
    alone = products.linear(x[row : row + 1].clone(), weight, None, is_canonical)
    among = products.linear(x[start : start + num_rows], weight, None, is_canonical)
    assert torch.equal(alone[0], among[row - start])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_rows_of_integers_have_one_way(
    kernels: NativeKernels, products: NativeProducts, form: BlockForm
) -> None:
    has_two = kernels.instructions not in ("avx2", "avx512")  # then it is the canonical one
    weight, _ = weight_of(products, form)
    x = random_rows(40)
    canonical = products.linear(x, weight, None, is_canonical=True)
    for count in (1, 2, 8, 9):
        assert torch.equal(products.linear(x[:count], weight, None, has_two), canonical[:count])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-60, 1.0, 2.0**90])
def test_rows_of_any_size(products: NativeProducts, form: BlockForm, scale: float) -> None:
    weight, values = weight_of(products, form)
    x = (torch.randint(-128, 129, (9, NUM_IN), generator=torch.Generator().manual_seed(1)) * scale).bfloat16()
    x[1] = 0
    for is_canonical in (False, True):
        ours = products.linear(x, weight, None, is_canonical).double()
        terms = x.double().abs() @ values.double().abs().T
        near = 2.0**-6 * terms + 2.0**-120
        assert bool(((ours - x.double() @ values.double().T).abs() <= near).all())
        assert bool((ours[1] == 0).all())


def test_rows_with_what_is_no_number_give_none(products: NativeProducts) -> None:
    weight, _ = weight_of(products, Q4_K)
    x = random_rows(9)
    x[2, 40], x[3, 70] = torch.nan, torch.inf
    for is_canonical in (False, True):
        finite = products.linear(x, weight, None, is_canonical).isfinite()
        assert not finite[2:4].any()
        assert finite[:2].all()
        assert finite[4:].all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_where_any_way_will_do_many_rows_go_the_canonical_one(
    products: NativeProducts, form: BlockForm
) -> None:
    weight, _ = weight_of(products, form)
    x = random_rows(most_few_rows(form) + 1)
    canonical = products.linear(x, weight, None, is_canonical=True)
    assert torch.equal(products.linear(x, weight, None, is_canonical=False), canonical)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("is_canonical", [False, True])
def test_any_number_of_threads(products: NativeProducts, num_threads: int, is_canonical: bool) -> None:
    weight, _ = weight_of(products, Q4_1)
    x = random_rows(40)
    expected = products.linear(x, weight, None, is_canonical)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(products.linear(x, weight, None, is_canonical), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", [3 * NUM_IN, 3 * NUM_IN + 1])
def test_rows_of_a_larger_tensor(products: NativeProducts, width: int) -> None:
    weight, _ = weight_of(products, Q8_0)
    part = random_rows(7, width)[:, NUM_IN : 2 * NUM_IN]
    for is_canonical in (False, True):
        apart = products.linear(part.contiguous(), weight, None, is_canonical)
        assert torch.equal(products.linear(part, weight, None, is_canonical), apart)


def test_placed_in_any_order_with_zeros_around(products: NativeProducts) -> None:
    blocks = random_blocks(Q4_1, 50, 64)
    weight = products.zeros(Q4_1, 100, 96)
    places = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:50]
    products.place(weight, places[:20], blocks[:20])
    products.place(weight, places[20:], blocks[20:])
    expected = torch.zeros(100, 96)
    expected[places, :64] = torch.from_numpy(dequantize(blocks.numpy(), Kind.Q4_1)).view(50, 64)
    assert torch.equal(products.rows(weight, torch.arange(100), torch.float32), expected)


def test_what_does_not_fit_is_refused(products: NativeProducts) -> None:
    weight = products.zeros(Q8_0, 10, 64)
    blocks = random_blocks(Q8_0, 4, 64)
    for places in (torch.arange(7, 11), torch.arange(-1, 3), torch.arange(3)):
        with pytest.raises(ValueError, match="outputs"):
            products.place(weight, places, blocks)
    with pytest.raises(ValueError, match="inputs"):
        products.place(weight, torch.arange(4), random_blocks(Q8_0, 4, 96))
    with pytest.raises(ValueError, match="multiple of 32"):
        products.zeros(Q8_0, 10, 40)
    for rows in (torch.ones(2, 32).bfloat16(), torch.ones(2, 64)):
        with pytest.raises(ValueError, match="64 inputs"):
            products.linear(rows, weight, None, is_canonical=True)
    for token in (-1, 10):
        with pytest.raises(IndexError):
            products.rows(weight, torch.tensor([0, token]), torch.bfloat16)


@pytest.mark.parametrize(("form", "steps"), [(Q8_0, 254), (Q4_1, 15)], ids=["Q8_0", "Q4_1"])
def test_quantised_to_the_nearest(form: BlockForm, steps: int) -> None:
    values = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    values[3, 32:64] = 0
    values[4, :32] = 1.5
    blocks = quantise(values, form)
    assert blocks.shape == (40, form.row_bytes(96))
    again = torch.from_numpy(dequantize(blocks.numpy(), Kind[form.name])).view(40, 3, 32)
    groups = values.view(40, 3, 32)
    if form is Q8_0:
        size = 2 * groups.abs().amax(dim=-1, keepdim=True)
    else:
        size = groups.amax(dim=-1, keepdim=True) - groups.amin(dim=-1, keepdim=True)
    # Half a step, and what float16 takes from scale and minimum.
    allowed = size / steps / 2 + 2**-10 * groups.abs().amax(dim=-1, keepdim=True)
    assert bool(((again - groups).abs() <= allowed).all())


def test_the_probe_measures_them(kernels: NativeKernels) -> None:
    shapes = ProbeShapes(
        (ProductShape(96, 256, form="Q4_1"), ProductShape(64, 544, bias=True, form="Q8_0")),
        *(6, 2, 16, 96, (1088,), 16),
        ProductShape(300, 512, form="Q6_K"),
    )
    result = measure(kernels, shapes, torch.bfloat16, torch.device("cpu"))
    assert (result.row_floor, result.head_holds, result.same_bits) == (1, True, True)


def test_some_outputs_of_a_vocabulary_stand_for_all(
    kernels: NativeKernels, products: NativeProducts, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, zeros = [], products.zeros

    def noted(
        form: BlockForm, num_out: int, num_in: int, device: torch.device | None = None
    ) -> QuantisedWeight:
        made.append((form.name, num_out, num_in))
        return zeros(form, num_out, num_in, device)

    monkeypatch.setattr(products, "zeros", noted)
    wide = (ProductShape(100_000, 64, form="Q4_1"), ProductShape(200_000, 64, form="Q4_1"))
    shapes = ProbeShapes(wide, 6, 2, 16, 96, (1088,), 16, ProductShape(300_000, 64, form="Q8_0"))
    assert measure(kernels, shapes, torch.bfloat16, torch.device("cpu")).same_bits
    assert set(made) == {("Q4_1", 4096, 64), ("Q8_0", 4096, 64)}


def test_the_probe_sees_where_they_do_not_hold(
    kernels: NativeKernels, products: NativeProducts, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = products.linear

    def uneven(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, is_canonical: bool) -> Tensor:
        out = linear(x, weight, bias, is_canonical)
        return out if is_canonical and x.shape[0] >= 6 else out + 1

    monkeypatch.setattr(products, "linear", uneven)
    shapes = ProbeShapes(
        (ProductShape(96, 576, form="Q4_1"),), 6, 2, 16, 96, (1088,), 16, ProductShape(64, 96)
    )
    assert measure(kernels, shapes, torch.bfloat16, torch.device("cpu")).row_floor == 6
