"""The kernels for GPUs, interpreted: what they compute, and what must not change a row's bits."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.cache import BLOCK_TOKENS
from penstock.kernels.interface import Kernels
from penstock.kernels.quantised import ALL_FORMS, FLOAT_FORMS
from penstock.kernels.spans import AttendedSpan, AttentionWork, Scoring
from penstock.plan.model import ExpertsConfig
from tests.kernels.parity import (
    PLAIN,
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
    check_product,
    exact_attention,
    in_one_place,
    random_kv,
    scattered,
    work_of,
)
from tests.kernels.triton_interpreter import interpreted_kernels

if TYPE_CHECKING:
    from penstock.kernels.cuda.kernels import CudaKernels

TILE = 256
LONGEST = 2 * TILE + 70
HEADS = Heads(4, 2, 32)

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    with interpreted_kernels(TILE) as found:
        yield found


@dtypes
@pytest.mark.parametrize("size", [32, 96, 576])
def test_norms(kernels: Kernels, dtype: torch.dtype, size: int) -> None:
    check_norms(Subject(kernels, dtype), 7, size)


@dtypes
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("width", [40, 1024, 1500])
def test_activation(kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    check_activation(Subject(kernels, dtype), 5, width)


@dtypes
@pytest.mark.parametrize("norm", ["", "float32", "of the dtype"])
@pytest.mark.parametrize(
    ("heads", "rotary_dim"),
    [
        (Heads(6, 2, 32), 32),
        (Heads(6, 2, 32), 8),
        (Heads(1, 1, 64), 64),
        (Heads(16, 2, 128), 128),
        (Heads(4, 1, 256), 64),
    ],
    ids=str,
)
def test_placed_heads(kernels: Kernels, dtype: torch.dtype, norm: str, heads: Heads, rotary_dim: int) -> None:
    norm_dtype = {"": None, "float32": torch.float32, "of the dtype": dtype}[norm]
    check_placed_heads(
        Subject(kernels, dtype),
        heads,
        rotary_dim=rotary_dim,
        norm_dtype=norm_dtype,
        num_extra=heads.num_heads,
    )


@dtypes
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 40])
@pytest.mark.parametrize(("num_out", "num_in", "has_bias"), [(40, 96, True), (33, 300, False)])
def test_products_of_few_rows(
    kernels: Kernels, dtype: torch.dtype, num_rows: int, num_out: int, num_in: int, has_bias: bool
) -> None:
    check_product(Subject(kernels, dtype), num_rows, num_out, num_in, has_bias=has_bias)


@pytest.mark.parametrize("num_in", [300, 384])
def test_a_row_of_few_has_the_same_bits_among_others(kernels: Kernels, num_in: int) -> None:
    subject = Subject(kernels, torch.bfloat16)
    x, weight, bias = (
        subject.normal(64, num_in),
        subject.normal(70, num_in, seed=1),
        subject.normal(70, seed=2),
    )
    whole = kernels.linear(x, weight, bias)
    for rows in (slice(0, 1), slice(5, 21), slice(30, 47), slice(31, 64)):
        for is_canonical in (True, False):
            assert torch.equal(kernels.linear(x[rows], weight, bias, is_canonical=is_canonical), whole[rows])


@dtypes
@pytest.mark.parametrize("router", ROUTERS)
def test_experts(kernels: Kernels, dtype: torch.dtype, router: str) -> None:
    subject, config = Subject(kernels, dtype), ROUTERS[router]
    check_experts(ExpertRows(subject, config, 1))
    check_experts(ExpertRows(subject, config, 20))


FEW = ExpertsConfig(1, 4, 64, num_active=3)


def test_experts_of_rows_alone(kernels: Kernels) -> None:
    """With tiles of every size: few rows for each expert, some, and many."""
    subject = Subject(kernels, torch.bfloat16)
    check_experts_alone(ExpertRows(subject, FEW, 150), (1, 3, 13, 17, 100))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_Z", "Q8_0", "Q4_K", "F8_ROW", "F8_BLOCK"])
def test_experts_of_quantised_weights(kernels: Kernels, name: str) -> None:
    """Rows of decodes stay as they are beside 8-bit floats, too."""
    form, subject = ALL_FORMS[name], Subject(kernels, torch.bfloat16)
    is_small, size = form.block_size == 32, 2 * form.block_size  # the others take long, interpreted
    config = ExpertsConfig(1, 2 if is_small else 1, size, num_active=1)
    for is_canonical in (True, False) if form in FLOAT_FORMS else (True,):
        rows = ExpertRows(subject, config, 25 if is_small else 2, size, form, is_canonical)
        check_experts(rows)
        check_experts_alone(rows, (1,) if is_small else ())


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow encountered in reduce")
def test_a_row_without_a_number_chooses_experts(kernels: Kernels) -> None:
    """And changes no other's."""
    rows = ExpertRows(Subject(kernels, torch.float32), ROUTERS["softmax"], 20)
    expected = rows.run()
    rows.scores[7], rows.x[7] = math.nan, math.nan
    found = rows.run()
    assert bool(found[7].isnan().all())
    assert torch.equal(found[8:], expected[8:])
    assert torch.equal(found[:7], expected[:7])


def test_attention_without_a_grid(kernels: Kernels) -> None:
    """A chunk may begin anywhere, also where there are no tiles to keep to."""
    kv = random_kv(Subject(kernels, torch.float32), HEADS, 4)
    queries = torch.randn(50, HEADS.num_heads, HEADS.head_dim)
    batch = [in_one_place(100, 150)]
    span = AttendedSpan(0, 50, 100, batch[0].places, is_prompt=True, tile_size=0, origin=100)
    ours = kernels.attend(queries, AttentionWork((span,)), kv, PLAIN)
    check_close(ours, exact_attention(queries, batch, kv), 1e-5)


@pytest.mark.parametrize("chunk", [100, TILE, 3 * TILE])
def test_what_chunks_ask_of_a_library_was_prepared(
    kernels: "CudaKernels", monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """A library makes a plan for every shape when it first comes."""
    from penstock.kernels.cuda import past as cuda_past

    asked: list[tuple[object, ...]] = []
    attention = cuda_past.cudnn_attention

    def listening(*inputs: object, scale: float) -> object:
        tensors = (each for each in inputs if isinstance(each, Tensor))
        asked.append((scale, *((each.shape, each.stride()) for each in tensors)))
        return attention(*inputs, scale=scale)

    monkeypatch.setattr(cuda_past, "cudnn_attention", listening)
    subject, num_tokens = Subject(kernels, torch.bfloat16), 4 * TILE
    kv = random_kv(subject, HEADS, num_tokens // BLOCK_TOKENS)
    assert sum(1 for _ in kernels.preparations(chunk, HEADS.num_heads, kv, SCALE)) == 3
    prepared = {*asked}
    assert len(prepared) == 3
    asked.clear()
    # A chunk of all of a tile, or as much of it as a chunk has.
    size = min(chunk, TILE)
    for start in range(TILE, num_tokens, TILE):
        queries = subject.normal(size, HEADS.num_heads, HEADS.head_dim)
        work = work_of([in_one_place(start, start + size)], TILE)
        kernels.attend(queries, work, kv, PLAIN)
    assert {*asked} == prepared


def test_without_the_library_nothing_is_prepared(kernels: "CudaKernels") -> None:
    kv = random_kv(Subject(kernels, torch.float32), HEADS, 3 * TILE // BLOCK_TOKENS)
    assert not list(kernels.preparations(TILE, HEADS.num_heads, kv, SCALE))


BATCHES = {
    "a short prompt": [in_one_place(0, 5)],
    "a tile": [in_one_place(0, TILE)],
    "two tiles": [in_one_place(0, TILE + 100)],
    "a chunk of two tiles": [in_one_place(TILE - 20, TILE + 30)],
    "a past in several places": [Rows(2 * TILE + 3, 2 * TILE + 40, (8, 9, 1, 2, 6, 3, 4, 5, 0))],
    "a tile in several places": [Rows(100, 230, (3, 1, 2, 0))],
    "a decode": [in_one_place(290, 291, is_prompt=False)],
    "the first token, decoded": [in_one_place(0, 1, is_prompt=False)],
    "decodes": [
        Rows(130, 131, (7, 1, 2), is_prompt=False),
        Rows(63, 64, (3,), is_prompt=False),
        Rows(64, 65, (4, 5), is_prompt=False),
        Rows(20, 23, (6,), is_prompt=False),
    ],
    "prompts and decodes": [
        Rows(TILE - 10, TILE + 10, (9, 8, 7, 6, 5)),
        Rows(70, 71, (0, 2), is_prompt=False),
        Rows(0, 33, (1,)),
        Rows(100, 101, (3, 4), is_prompt=False),
    ],
}


@dtypes
@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_attention(kernels: Kernels, dtype: torch.dtype, batch: list[Rows]) -> None:
    check_attention(Subject(kernels, dtype), HEADS, batch)


@dtypes
@pytest.mark.parametrize(
    "heads", [Heads(3, 3, 64), Heads(8, 1, 128), Heads(2, 1, 256), Heads(4, 2, 80)], ids=str
)
def test_attention_of_other_heads(kernels: Kernels, dtype: torch.dtype, heads: Heads) -> None:
    check_attention(Subject(kernels, dtype), heads, BATCHES["prompts and decodes"])


SCORINGS = HEADS.scorings(torch.device("cpu"))
scorings = pytest.mark.parametrize("scoring", list(SCORINGS)[1:])


@dtypes
@scorings
@pytest.mark.parametrize("batch", ["prompts and decodes", "a past in several places", "decodes"])
def test_windows_sinks_and_caps(kernels: Kernels, dtype: torch.dtype, scoring: str, batch: str) -> None:
    check_attention(Subject(kernels, dtype), HEADS, BATCHES[batch], scoring=SCORINGS[scoring])


@dtypes
@scorings
def test_keys_and_values_of_different_sizes(kernels: Kernels, dtype: torch.dtype, scoring: str) -> None:
    for heads in (Heads(4, 2, 48, 32), Heads(4, 1, 32, 64)):
        batch = [in_one_place(100, 140), in_one_place(290, 291, is_prompt=False)]
        check_attention(Subject(kernels, dtype), heads, batch, scoring=SCORINGS[scoring])


@dtypes
def test_heads_of_512(kernels: Kernels, dtype: torch.dtype) -> None:
    heads, subject = Heads(2, 1, 512), Subject(kernels, dtype)
    batch = [in_one_place(70, 90), in_one_place(80, 81, is_prompt=False), Rows(110, 150, (4, 2, 3))]
    check_attention(subject, heads, batch)
    check_cuts(subject, heads, 90, [(0, 70), (70, 90), (33, 40)])
    window = Scoring(SCALE, window=40)
    check_attention(subject, heads, batch, scoring=window)
    check_cuts(subject, heads, 150, [(100, 120), (127, 150)], window)


@dtypes
@scorings
@pytest.mark.parametrize("heads", [Heads(2, 1, 32), Heads(2, 2, 32)], ids=str)
@settings(max_examples=2)
@given(data=st.data(), num_tokens=st.integers(65, LONGEST))
def test_a_chunk_has_the_bits_of_the_whole_behind_a_window_too(
    kernels: Kernels, dtype: torch.dtype, scoring: str, heads: Heads, data: st.DataObject, num_tokens: int
) -> None:
    """Whether a program has two heads or one."""
    cuts = data.draw(st.lists(_cuts(num_tokens), min_size=1, max_size=3))
    found = heads.scorings(torch.device("cpu"))[scoring]
    check_cuts(Subject(kernels, dtype), heads, num_tokens, cuts, found)


@dtypes
@scorings
@settings(max_examples=3)
@given(data=st.data(), num_padding=st.integers(0, 9))
def test_rows_with_windows_have_the_bits_that_they_have_alone(
    kernels: Kernels, dtype: torch.dtype, scoring: str, data: st.DataObject, num_padding: int
) -> None:
    heads = Heads(2, 1, 32)
    found = heads.scorings(torch.device("cpu"))[scoring]
    check_beside(Subject(kernels, dtype), heads, data.draw(_batches()), num_padding, found)


@st.composite
def _cuts(draw: st.DrawFn, num_tokens: int) -> tuple[int, int]:
    first = draw(st.integers(0, num_tokens - 1))
    return first, draw(st.integers(first + 1, min(first + 200, num_tokens)))


@dtypes
@settings(max_examples=6)
@given(data=st.data(), num_tokens=st.integers(2, LONGEST))
def test_a_chunk_has_the_bits_of_the_whole(
    kernels: Kernels, dtype: torch.dtype, data: st.DataObject, num_tokens: int
) -> None:
    cuts = data.draw(st.lists(_cuts(num_tokens), min_size=1, max_size=3))
    check_cuts(Subject(kernels, dtype), Heads(2, 1, 32), num_tokens, cuts)


@st.composite
def _batches(draw: st.DrawFn) -> list[Rows]:
    batch = []
    for _ in range(draw(st.integers(1, 5))):
        first = draw(st.integers(0, LONGEST))
        is_prompt = draw(st.booleans())
        num_rows = draw(st.integers(1, 70)) if is_prompt else draw(st.sampled_from((1, 1, 1, 2)))
        batch.append(in_one_place(first, first + num_rows, is_prompt=is_prompt))
    order = draw(st.permutations(range(sum(len(rows.blocks) for rows in batch))))
    return list(scattered(batch, order))


@dtypes
@settings(max_examples=10)
@given(batch=_batches(), num_padding=st.integers(0, 9))
def test_rows_have_the_bits_that_they_have_alone(
    kernels: Kernels, dtype: torch.dtype, batch: list[Rows], num_padding: int
) -> None:
    check_beside(Subject(kernels, dtype), Heads(2, 1, 32), batch, num_padding)
