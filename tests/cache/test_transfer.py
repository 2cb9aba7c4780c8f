"""What is copied out of a cache and back in is the same bits, whatever the blocks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.store.block_store import StoredBlock, StoredState
from penstock.cache.tensors import CacheSpec, CacheTensors
from penstock.cache.transfer import copy_in, copy_out, copy_state_in, copy_state_out
from tests.cache.storing import HYBRID, PLAIN, bytes_in, keys_of, kv_of, state_of

NUM_BLOCKS = 9
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors_of(spec: CacheSpec) -> CacheTensors:
    return CacheTensors.of(spec, NUM_BLOCKS, 3, torch.device("cpu"))


def stored(kv: torch.Tensor) -> list[StoredBlock]:
    return [StoredBlock(block[0], block[1]) for block in kv]


@pytest.mark.parametrize("dtype", DTYPES)
@given(blocks=st.permutations(range(NUM_BLOCKS)), num_blocks=st.integers(0, NUM_BLOCKS))
def test_out_and_in_again(dtype: torch.dtype, blocks: list[int], num_blocks: int) -> None:
    spec = CacheSpec(replace(PLAIN.kv, dtype=dtype))
    blocks = blocks[:num_blocks]
    kv = kv_of(keys_of(NUM_BLOCKS), spec)[:num_blocks]
    tensors = tensors_of(spec)
    copy_in(tensors, blocks, stored(kv))
    out = copy_out(tensors, blocks)
    assert (out.shape, out.dtype, out.is_contiguous()) == (kv.shape, dtype, True)
    assert bytes_in(out) == bytes_in(kv)
    # Each block lies where attention looks for it, and no other was touched.
    for layer in range(spec.kv.num_layers):
        cached = tensors.kv.layer(layer)
        for block in range(NUM_BLOCKS):
            places = slice(block * 64, block * 64 + 64)
            for part, all_places in enumerate((cached.keys, cached.values)):
                if block in blocks:
                    expected = kv[blocks.index(block), part, layer]
                    assert bytes_in(all_places[places]) == bytes_in(expected)
                else:
                    assert not any(bytes_in(all_places[places]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_out_and_in_again(dtype: torch.dtype) -> None:
    assert HYBRID.recurrent is not None
    spec = replace(HYBRID, recurrent=replace(HYBRID.recurrent, dtype=dtype))
    tensors = tensors_of(spec)
    tails, matrices = state_of(b"key", spec)
    copy_state_in(tensors, 1, StoredState(tails, matrices))
    out = copy_state_out(tensors, 1)
    assert (out[0].dtype, out[1].dtype) == (dtype, torch.float32)
    assert bytes_in(out[0]) == bytes_in(tails)
    assert bytes_in(out[1]) == bytes_in(matrices)
    for slot in (0, 2):
        assert not any(any(bytes_in(tensor)) for tensor in copy_state_out(tensors, slot))


def test_what_does_not_fit_is_refused() -> None:
    tensors = tensors_of(PLAIN)
    blocks = stored(kv_of(keys_of(2)))
    with pytest.raises(ValueError, match="2 stored blocks cannot go into 1"):
        copy_in(tensors, [0], blocks)
    for wrong in (-1, NUM_BLOCKS):
        with pytest.raises(ValueError, match="outside"):
            copy_in(tensors, [0, wrong], blocks)
        with pytest.raises(ValueError, match="outside"):
            copy_out(tensors, [wrong])
