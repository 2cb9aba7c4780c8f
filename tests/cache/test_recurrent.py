import sys
from dataclasses import asdict, replace

import pytest
import torch

from penstock.cache import EMPTY
from penstock.cache.tensors import RecurrentCache, RecurrentSpec
from penstock.errors import CacheFullError
from tests.cache.growing import growth_in_fresh_process

# Sizes that are no multiples of anything: a slot's end is not where the next one begins.
ODD = RecurrentSpec(
    num_layers=3, conv_tail=3, conv_size=7, num_heads=3, key_dim=5, value_dim=9, dtype=torch.float32
)
EVEN = RecurrentSpec(
    num_layers=2, conv_tail=3, conv_size=64, num_heads=2, key_dim=16, value_dim=8, dtype=torch.float32
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [ODD, EVEN])
def test_a_new_cache_is_zero_and_every_slot_is_contiguous_and_aligned(
    spec: RecurrentSpec, dtype: torch.dtype
) -> None:
    cache = RecurrentCache(replace(spec, dtype=dtype), num_slots=5)
    for layer in range(spec.num_layers):
        for slot in (EMPTY, 0, 1, 2, 3, 4):
            tail, matrix = cache.layer(layer).tail(slot), cache.layer(layer).matrix(slot)
            assert (tail.shape, tail.dtype) == ((3, spec.conv_size), dtype)
            assert matrix.shape == (spec.num_heads, spec.key_dim, spec.value_dim)
            assert matrix.dtype == torch.float32
            for tensor in (tail, matrix):
                assert not tensor.any()
                assert tensor.is_contiguous()
                assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_what_the_tensors_take(dtype: torch.dtype) -> None:
    spec = replace(EVEN, dtype=dtype)
    assert spec.bytes_per_slot == 2 * (3 * 64 * dtype.itemsize + 2 * 16 * 8 * 4)
    assert RecurrentCache(spec, num_slots=5).num_bytes == 5 * spec.bytes_per_slot


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_odd_sizes_count_the_filling_up_to_the_alignment(dtype: torch.dtype) -> None:
    cache = RecurrentCache(replace(ODD, dtype=dtype), num_slots=4)
    between_slots = sum(
        read(2).data_ptr() - read(1).data_ptr()
        for layer in cache.layers
        for read in (layer.tail, layer.matrix)
    )
    assert cache.spec.bytes_per_slot == between_slots
    assert cache.num_bytes == 4 * between_slots
    used = 3 * (3 * 7 * dtype.itemsize + 3 * 5 * 9 * 4)
    assert used < between_slots < used + 6 * 64


@pytest.mark.parametrize("spec", [ODD, EVEN, replace(ODD, dtype=torch.bfloat16)])
def test_what_is_written_is_read_and_nothing_else_changes(spec: RecurrentSpec) -> None:
    """Every tensor of every slot filled with a number of its own, in a mixed order, reads back as that."""
    cache = RecurrentCache(spec, num_slots=4)
    places = [(layer, slot) for slot in (2, 0, 3, 1) for layer in range(spec.num_layers)]
    for number, (layer, slot) in enumerate(places):
        cache.layer(layer).tail_out(slot).fill_(2 * number + 1)
        cache.layer(layer).matrix_out(slot).fill_(2 * number + 2)
    for number, (layer, slot) in enumerate(places):
        assert (cache.layer(layer).tail(slot) == 2 * number + 1).all()
        assert (cache.layer(layer).matrix(slot) == 2 * number + 2).all()
    for layer in range(spec.num_layers):
        assert not cache.layer(layer).tail(EMPTY).any()
        assert not cache.layer(layer).matrix(EMPTY).any()


def test_reading_is_a_view_and_the_empty_state_is_one_for_all() -> None:
    cache = RecurrentCache(EVEN, num_slots=2)
    first, second = cache.layers
    second_views = [(second.tail, second.tail_out), (second.matrix, second.matrix_out)]
    for first_read, (read, write) in zip((first.tail, first.matrix), second_views, strict=True):
        view = read(1)
        write(1).fill_(3)
        assert (view == 3).all()
        assert read(EMPTY).data_ptr() == first_read(EMPTY).data_ptr()
        places = {each(slot).data_ptr() for each in (first_read, read) for slot in range(2)}
        assert len(places) == 4
        assert read(EMPTY).data_ptr() not in places


@pytest.mark.parametrize("slot", [EMPTY, -2, 3, 100])
def test_slots_outside_the_cache_are_errors_and_the_empty_state_is_never_written(slot: int) -> None:
    layer = RecurrentCache(ODD, num_slots=3).layer(0)
    what = "the empty state" if slot == EMPTY else f"slot {slot}"
    for write in (layer.tail_out, layer.matrix_out):
        with pytest.raises(ValueError, match=f"cannot write {what}: accepted are slots 0 to 2"):
            write(slot)
    if slot != EMPTY:
        for read in (layer.tail, layer.matrix):
            with pytest.raises(ValueError, match=f"cannot read slot {slot}: accepted are slots 0 to 2"):
                read(slot)


def test_a_convolution_of_one_tap_has_an_empty_tail() -> None:
    cache = RecurrentCache(replace(EVEN, conv_tail=0), num_slots=2)
    for slot in (EMPTY, 0, 1):
        assert cache.layer(1).tail(slot).shape == (0, 64)
    assert cache.layer(0).tail_out(1).shape == (0, 64)


def test_writes_work_in_inference_mode_and_out_of_it() -> None:
    cache = RecurrentCache(EVEN, num_slots=2)
    with torch.inference_mode():
        cache.layer(0).matrix_out(0).fill_(1)
    cache.layer(0).matrix_out(0).add_(cache.layer(0).matrix(0))
    assert (cache.layer(0).matrix(0) == 2).all()


def test_nonsense_is_an_error() -> None:
    for name in ("num_layers", "conv_size", "num_heads", "key_dim", "value_dim"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
            RecurrentSpec(**{**asdict(ODD), name: 0})
    with pytest.raises(ValueError, match="conv_tail must be at least 0, not -1"):
        replace(ODD, conv_tail=-1)
    with pytest.raises(ValueError, match="at least 1 slot"):
        RecurrentCache(ODD, num_slots=0)


def test_a_cache_larger_than_any_memory_is_an_error_that_says_so() -> None:
    with pytest.raises(CacheFullError, match="bytes, more than there are on cpu"):
        RecurrentCache(EVEN, num_slots=2**45)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_only_as_slots_are_written() -> None:
    growth = growth_in_fresh_process("""
from penstock.cache.tensors import RecurrentCache, RecurrentSpec
from penstock.cache.states import EMPTY

spec = RecurrentSpec(
    num_layers=4, conv_tail=4, conv_size=4096, num_heads=7, key_dim=128, value_dim=128, dtype=torch.float32
)
cache = RecurrentCache(spec, num_slots=256)
for layer in range(4):
    assert not cache.layer(layer).tail(EMPTY).any()
    assert not cache.layer(layer).matrix(EMPTY).any()
    cache.layer(layer).tail_out(0).fill_(1)
    cache.layer(layer).matrix_out(0).fill_(1)
assert cache.num_bytes == 512 * 2**20
""")
    assert growth < 512 * 2**20 // 8
