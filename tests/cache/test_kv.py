import sys

import pytest
import torch

from penstock.cache import BLOCK_TOKENS, TokenRange
from penstock.cache.tensors import KVCache, KVSpec
from penstock.errors import CacheFullError
from tests.cache.growing import growth_in_fresh_process

SPEC = KVSpec(num_layers=2, num_kv_heads=3, head_dim=5, dtype=torch.float32)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(num_tokens: int, first: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(num_tokens * 15).reshape(num_tokens, 3, 5) % 251 + first).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_what_the_tensors_take(dtype: torch.dtype) -> None:
    spec = KVSpec(num_layers=2, num_kv_heads=3, head_dim=5, dtype=dtype)
    cache = KVCache(spec, num_blocks=4)
    assert spec.bytes_per_token == 2 * 2 * 3 * 5 * dtype.itemsize
    everything = [TokenRange(0, 4 * BLOCK_TOKENS)]
    parts = [cache.layer(layer).read(everything) for layer in range(2)]
    assert cache.num_bytes == sum(part.keys.nbytes + part.values.nbytes for part in parts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_new_cache_is_zero_and_aligned(dtype: torch.dtype) -> None:
    cache = KVCache(KVSpec(num_layers=3, num_kv_heads=3, head_dim=5, dtype=dtype), num_blocks=3)
    for layer in range(3):
        kv = cache.layer(layer).read([TokenRange(0, 3 * BLOCK_TOKENS)])
        for tensor in (kv.keys, kv.values):
            assert tensor.dtype == dtype
            assert not tensor.any()
            assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "places",
    [
        [TokenRange(70, 100)],
        [TokenRange(0, 256)],
        [TokenRange(128, 192), TokenRange(0, 17)],
        [TokenRange(200, 256), TokenRange(64, 128), TokenRange(10, 11)],
        [],
    ],
)
def test_what_is_written_is_read_and_nothing_else_changes(
    places: list[TokenRange], dtype: torch.dtype
) -> None:
    cache = KVCache(KVSpec(num_layers=2, num_kv_heads=3, head_dim=5, dtype=dtype), num_blocks=4)
    num_tokens = sum(map(len, places))
    keys, values = rows(num_tokens, 1, dtype), rows(num_tokens, 2, dtype)
    cache.layer(1).write(places, keys, values)
    kv = cache.layer(1).read(places)
    assert torch.equal(kv.keys, keys)
    assert torch.equal(kv.values, values)
    everything = [TokenRange(0, 256)]
    assert not cache.layer(0).read(everything).keys.any()
    assert not cache.layer(0).read(everything).values.any()
    expected_keys, expected_values = torch.zeros(2, 256, 3, 5, dtype=dtype)
    index = torch.tensor(
        [place for part in places for place in range(part.start, part.end)], dtype=torch.long
    )
    expected_keys[index], expected_values[index] = keys, values
    assert torch.equal(cache.layer(1).read(everything).keys, expected_keys)
    assert torch.equal(cache.layer(1).read(everything).values, expected_values)


def test_one_range_is_read_in_place_and_several_are_copied() -> None:
    cache = KVCache(SPEC, num_blocks=2)
    view = cache.layer(0).read([TokenRange(3, 9)])
    copy = cache.layer(0).read([TokenRange(3, 6), TokenRange(6, 9)])
    cache.layer(0).write([TokenRange(3, 9)], rows(6), rows(6))
    assert torch.equal(view.keys, rows(6))
    assert torch.equal(view.values, rows(6))
    assert not copy.keys.any()
    assert not copy.values.any()


@pytest.mark.parametrize("places", [[], [TokenRange(60, 70)], [TokenRange(90, 95), TokenRange(0, 5)]])
def test_padded_reading_is_a_copy_with_zeros_after_the_end(places: list[TokenRange]) -> None:
    cache = KVCache(SPEC, num_blocks=2)
    cache.layer(1).write([TokenRange(0, 128)], rows(128, 1), rows(128, 2))
    plain, num_tokens = cache.layer(1).read(places), sum(map(len, places))
    for padded_to in (num_tokens, num_tokens + 1, 64):
        padded = cache.layer(1).read_padded(places, padded_to)
        for got, expected in ((padded.keys, plain.keys), (padded.values, plain.values)):
            assert got.shape == (padded_to, 3, 5)
            assert torch.equal(got[:num_tokens], expected)
            assert not got[num_tokens:].any()
            got.fill_(7)
    assert torch.equal(cache.layer(1).read([TokenRange(0, 128)]).keys, rows(128, 1))


def test_writes_work_in_inference_mode_and_out_of_it() -> None:
    cache = KVCache(SPEC, num_blocks=1)
    with torch.inference_mode():
        cache.layer(0).write([TokenRange(0, 2)], rows(2), rows(2))
    cache.layer(0).write([TokenRange(2, 4)], rows(2), rows(2))
    assert torch.equal(cache.layer(0).read([TokenRange(0, 4)]).keys, torch.cat([rows(2), rows(2)]))


@pytest.mark.parametrize(
    "place", [TokenRange(64, 65), TokenRange(60, 65), TokenRange(-1, 1), TokenRange(3, 2)]
)
def test_places_outside_the_cache_are_errors(place: TokenRange) -> None:
    cache = KVCache(SPEC, num_blocks=1)
    with pytest.raises(ValueError, match="outside the cache's 64 places"):
        cache.check_places([TokenRange(0, 64), place])
    cache.check_places([TokenRange(0, 64), TokenRange(64, 64), TokenRange(3, 3)])


def test_nonsense_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_kv_heads"):
        KVSpec(num_layers=1, num_kv_heads=0, head_dim=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="at least 1 block"):
        KVCache(SPEC, num_blocks=0)


def test_a_cache_larger_than_any_memory_is_an_error_that_says_so() -> None:
    with pytest.raises(CacheFullError, match="bytes, more than there are on cpu"):
        KVCache(SPEC, num_blocks=2**45)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_only_as_places_are_written() -> None:
    growth = growth_in_fresh_process("""
from penstock.cache.tensors import KVCache, KVSpec
from penstock.cache.sequence import TokenRange

cache = KVCache(KVSpec(num_layers=4, num_kv_heads=8, head_dim=64, dtype=torch.float32), num_blocks=512)
ones = torch.ones(64, 8, 64)
for layer in range(4):
    cache.layer(layer).write([TokenRange(0, 64)], ones, ones)
assert cache.num_bytes == 512 * 2**20
""")
    assert growth < 512 * 2**20 // 8


def test_blocks_and_first_tokens_are_read() -> None:
    kv = KVCache(SPEC, num_blocks=4).layer(0)
    kv.keys.copy_(rows(256, 1))
    kv.values.copy_(rows(256, 2))
    read = kv.read_blocks(torch.tensor([2, 0, 3]))
    for got, cached in ((read.keys, kv.keys), (read.values, kv.values)):
        assert torch.equal(got, torch.cat([cached[128:192], cached[:64], cached[192:]]))
    first = kv.first(70)
    assert torch.equal(first.keys, kv.keys[:70])
    assert torch.equal(first.values, kv.values[:70])
    assert (first.keys.data_ptr(), first.values.data_ptr()) == (kv.keys.data_ptr(), kv.values.data_ptr())
    assert kv.read_blocks(torch.tensor([], dtype=torch.long)).keys.shape == (0, 3, 5)
