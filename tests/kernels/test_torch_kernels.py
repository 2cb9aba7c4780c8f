"""The reference kernels against the plainest form of what they compute, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.tensors import KV
from penstock.errors import SettingError
from penstock.kernels.elementwise import even_shares
from penstock.kernels.interface import select_kernels
from penstock.kernels.reference.kernels import TorchKernels
from penstock.plan.grids import LANES

KERNELS = TorchKernels()
TILE = KERNELS.law.tile_size


def plain_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, scale: float
) -> torch.Tensor:
    """Query i, at position first + i, sees keys [0, first + i]."""
    group = queries.shape[1] // keys.shape[1]
    q, k, v = queries.double(), keys.double(), values.double()
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    visible = torch.arange(k.shape[0])[None] <= first + torch.arange(q.shape[0])[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


@settings(max_examples=60, deadline=None)
@given(
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 8]),
    head_dim=st.sampled_from([16, 17, 40, 64]),
    num_tiles=st.integers(0, 2),
    place=st.tuples(st.integers(0, TILE - 1), st.integers(1, TILE)),
    seed=st.integers(0, 1000),
)
def test_tile(
    num_kv_heads: int, group: int, head_dim: int, num_tiles: int, place: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    offset, count = place[0], min(place[1], TILE - place[0])
    start = num_tiles * TILE
    keys, values = torch.randn(2, start + TILE, num_kv_heads, head_dim)
    queries = torch.randn(count, num_kv_heads * group, head_dim)
    past = KV(keys[:start], values[:start]) if start else None
    ours = KERNELS.attend_tile(queries, offset, past, KV(keys[start:], values[start:]), 0.3)
    assert torch.allclose(
        ours.double(), plain_attention(queries, keys, values, start + offset, 0.3), atol=2e-5
    )


@settings(max_examples=40, deadline=None)
@given(
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 8]),
    sizes=st.lists(st.integers(1, 200) | st.integers(1000, 3000), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_one_query_over_pieces(
    num_kv_heads: int, group: int, sizes: list[int], dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    total = sum(sizes)
    keys, values = torch.randn(2, total, num_kv_heads, 24).to(dtype)
    query = torch.randn(num_kv_heads * group, 24).to(dtype)
    pieces = [KV(k, v) for k, v in zip(keys.split(sizes), values.split(sizes), strict=True)]
    ours = KERNELS.attend_one(query, pieces, 0.2)
    exact = plain_attention(query[None], keys, values, total - 1, 0.2)[0]
    tolerance = 2e-5 if dtype == torch.float32 else 0.02
    assert torch.allclose(ours.double(), exact, atol=tolerance)


def test_rotation() -> None:
    x = torch.randn(5, 3, 16)
    angles = torch.rand(5, 8)
    cos, sin = angles.cos(), angles.sin()
    out = KERNELS.rotate(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    first, second = x.chunk(2, -1)
    expected_first = first * cos[:, None] - second * sin[:, None]
    expected_second = second * cos[:, None] + first * sin[:, None]
    assert torch.allclose(out, torch.cat((expected_first, expected_second), -1), atol=1e-6)


def test_norm_and_activation() -> None:
    x, weight = torch.randn(7, 50), torch.rand(50)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.allclose(KERNELS.rms_norm(x, weight, 1e-5).double(), normed, atol=1e-6)
    half = KERNELS.rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5)
    assert torch.allclose(half.double(), normed, rtol=0.02, atol=1e-3)
    gate, up = x.double().chunk(2, -1)
    assert torch.allclose(KERNELS.silu_and_mul(x).double(), gate * gate.sigmoid() * up, atol=1e-6)


@given(
    width=st.integers(1, 400).map(lambda n: n * LANES) | st.integers(1, 3000),
    num_threads=st.integers(1, 128),
    num_rows=st.integers(1, 3000),
)
def test_shares_cover_the_rows_in_whole_vectors(width: int, num_threads: int, num_rows: int) -> None:
    shares = even_shares(num_rows, width, num_threads)
    assert [row for share in shares for row in range(share.start, share.stop)] == list(range(num_rows))
    for share in shares:
        elements = (share.stop - share.start) * width
        num_runs = min(num_threads, -(-elements // 32_768))
        assert share.stop - share.start == 1 or -(-elements // num_runs) % LANES == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [64, 1536, 1856, 77])
def test_activation_of_a_row_does_not_depend_on_the_others(
    width: int, num_threads: int, dtype: torch.dtype
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        gate_up = torch.randn(600, 2 * width).to(dtype)
        whole = KERNELS.silu_and_mul(gate_up)
        for num_rows in (1, 2, 7, 61, 200, 333, 599):
            assert torch.equal(KERNELS.silu_and_mul(gate_up[-num_rows:]), whole[-num_rows:])
    finally:
        torch.set_num_threads(before)


def test_a_device_without_kernels_is_an_error() -> None:
    with pytest.raises(SettingError, match="give one of cpu, cuda, mps"):
        select_kernels(torch.device("meta"))
