"""What is copied out of a cache and back in is the same bits, whatever the blocks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.store.block_store import StoredBlock, StoredState
from penstock.cache.tensors import CacheSpec, CacheTensors, KVCache
from penstock.cache.transfer import copy_in, copy_out, copy_state_in, copy_state_out, copy_tokens
from tests.cache.storing import GROUPS, HYBRID, PLAIN, bytes_in, keys_of, kv_of, state_of

NUM_BLOCKS = 9
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors_of(spec: CacheSpec) -> CacheTensors:
    return CacheTensors.of(spec, [NUM_BLOCKS] * len(spec.kv_groups), 3, torch.device("cpu"))


def stored(kv: list[torch.Tensor], spec: CacheSpec = PLAIN) -> list[StoredBlock]:
    """Blocks as a store gives them, from each group's [num_blocks, block_elements]."""
    parts = [group.parts_of(own) for group, own in zip(spec.kv_groups, kv, strict=True)]
    return [
        StoredBlock(tuple(own[0][block] for own in parts), tuple(own[1][block] for own in parts))
        for block in range(len(kv[0]))
    ]


@pytest.mark.parametrize(
    "spec",
    [*(CacheSpec((replace(PLAIN.kv, dtype=dtype),)) for dtype in DTYPES), GROUPS],
    ids=[*map(str, DTYPES), "two groups"],
)
@given(data=st.data(), num_blocks=st.integers(0, NUM_BLOCKS))
def test_out_and_in_again(spec: CacheSpec, data: st.DataObject, num_blocks: int) -> None:
    """Blocks of each group have numbers of their own."""
    order = st.permutations(range(NUM_BLOCKS))
    blocks = [data.draw(order)[:num_blocks] for _ in spec.kv_groups]
    kv = [group[:num_blocks] for group in kv_of(keys_of(NUM_BLOCKS), spec)]
    tensors = tensors_of(spec)
    copy_in(tensors, blocks, stored(kv, spec))
    out = copy_out(tensors, blocks)
    for copied, given_, group, ids in zip(out, kv, tensors.kv_groups, blocks, strict=True):
        assert (copied.shape, copied.dtype, copied.is_contiguous()) == (given_.shape, group.spec.dtype, True)
        assert bytes_in(copied) == bytes_in(given_)
        check_group(group, ids, given_)


def check_group(group: KVCache, blocks: list[int], kv: torch.Tensor) -> None:
    """Each block lies where attention looks for it, and no other was touched."""
    for layer, cached in enumerate(group.layers):
        for block in range(NUM_BLOCKS):
            places = slice(block * 64, block * 64 + 64)
            for part, all_places in enumerate((cached.keys, cached.values)):
                if block in blocks:
                    expected = group.spec.parts_of(kv)[part][blocks.index(block), layer]
                    assert bytes_in(all_places[places]) == bytes_in(expected)
                else:
                    assert not any(bytes_in(all_places[places]))


@pytest.mark.parametrize("num_tokens", [0, 1, 37, 64])
def test_tokens_of_a_block_are_copied_and_no_others(num_tokens: int) -> None:
    tensors = tensors_of(PLAIN)
    (kv,) = kv_of(keys_of(2))
    copy_in(tensors, [[1, 5]], stored([kv]))
    copy_tokens(tensors.kv, 1, 5, num_tokens)
    (out,) = copy_out(tensors, [[1, 5, 0, 2, 4, 6]])
    expected = kv.clone()
    for part in PLAIN.kv.parts_of(expected):
        part[1, :, :num_tokens] = part[0, :, :num_tokens]
    assert bytes_in(out[:2]) == bytes_in(expected)
    assert not any(bytes_in(out[2:]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_out_and_in_again(dtype: torch.dtype) -> None:
    assert HYBRID.recurrent is not None
    spec = replace(HYBRID, recurrent=replace(HYBRID.recurrent, dtype=dtype))
    tensors = tensors_of(spec)
    tails, matrices = state_of(b"key", spec)
    copy_state_in(tensors, 1, StoredState(tails, matrices))
    out = copy_state_out(tensors, 1)
    assert (out[0].dtype, out[1].dtype) == (dtype, torch.float32)
    assert (out[0].shape, out[1].shape) == (tails.shape, matrices.shape)
    assert bytes_in(out[0]) == bytes_in(tails)
    assert bytes_in(out[1]) == bytes_in(matrices)
    for slot in (0, 2):
        assert not any(any(bytes_in(tensor)) for tensor in copy_state_out(tensors, slot))


def test_what_does_not_fit_is_refused() -> None:
    tensors = tensors_of(PLAIN)
    blocks = stored(kv_of(keys_of(2)))
    with pytest.raises(ValueError, match="2 stored blocks cannot go into 1"):
        copy_in(tensors, [[0]], blocks)
    for wrong in (-1, NUM_BLOCKS):
        with pytest.raises(ValueError, match="outside"):
            copy_in(tensors, [[0, wrong]], blocks)
        with pytest.raises(ValueError, match="outside"):
            copy_out(tensors, [[wrong]])
    with pytest.raises(ValueError, match="zip"):
        copy_out(tensors, [[0], [0]])
