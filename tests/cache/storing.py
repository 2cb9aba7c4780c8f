"""Small stores with random contents, which follow from the keys."""

import hashlib
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.cache.store.block_store import BlockStore, StoredPrefix, StoredState
from penstock.cache.tensors import CacheSpec, KVSpec, RecurrentSpec

FINGERPRINT = hashlib.sha256(b"a model").digest()
ABOUT = {"model": "tiny", "dtype": "bfloat16"}
PLAIN = CacheSpec((KVSpec(num_layers=2, num_kv_heads=1, head_dim=3, dtype=torch.bfloat16),))
# Tails of an odd number of bytes, and matrices whose size is no multiple of anything.
HYBRID = CacheSpec(
    (KVSpec(num_layers=1, num_kv_heads=2, head_dim=5, dtype=torch.float32),),
    RecurrentSpec(
        num_layers=3, conv_tail=3, conv_size=7, num_heads=1, key_dim=5, value_dim=3, dtype=torch.bfloat16
    ),
)
# Two K/V groups of different sizes and dtypes, as of layers with and without a window; values smaller than keys.
GROUPS = CacheSpec(
    (
        KVSpec(num_layers=2, num_kv_heads=1, head_dim=3, dtype=torch.bfloat16),
        KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float32, value_dim=5),
    ),
    HYBRID.recurrent,
)


def open_store(folder: Path, spec: CacheSpec = PLAIN, **changes: Any) -> BlockStore:
    settings: dict[str, Any] = {"fingerprint": FINGERPRINT, "max_bytes": 1 << 30, "about": ABOUT, **changes}
    fingerprint = settings.pop("fingerprint")
    return BlockStore(folder, fingerprint, spec, **settings)


def keys_of(num_blocks: int, name: str = "a prompt") -> list[bytes]:
    return [hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(num_blocks)]


def kv_of(keys: list[bytes], spec: CacheSpec = PLAIN) -> list[Tensor]:
    """Random bits of each K/V group that follow from the keys: NaNs of every kind among them."""
    groups: list[Tensor] = []
    for index, kv in enumerate(spec.kv_groups):
        shape = (kv.block_elements,)
        groups.append(torch.stack([_bits(key + bytes(index), shape, kv.dtype) for key in keys]))
    return groups


def state_of(key: bytes, spec: CacheSpec = HYBRID) -> tuple[Tensor, Tensor]:
    recurrent = spec.recurrent
    assert recurrent is not None
    layers = recurrent.num_layers
    return (
        _bits(b"tails" + key, (layers, *recurrent.tail_shape), recurrent.dtype),
        _bits(b"matrices" + key, (layers, *recurrent.matrix_shape), torch.float32),
    )


def bytes_in(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_right(found: StoredPrefix, keys: list[bytes], spec: CacheSpec = PLAIN) -> None:
    """What was found is what belongs to these keys, to the bit."""
    used = keys[found.start : found.start + found.num_blocks]
    for place, block in enumerate(found.blocks):
        groups = zip(block.keys, block.values, kv_of(used, spec), spec.kv_groups, strict=True)
        for *found_parts, kv, group in groups:
            for part, expected in zip(found_parts, group.parts_of(kv[place : place + 1]), strict=True):
                assert part.shape == expected[0].shape
                assert bytes_in(part) == bytes_in(expected)
    if spec.recurrent is None:
        assert found.state is None
    else:
        assert found.state is not None
        tails, matrices = state_of(used[-1], spec)
        assert bytes_in(found.state.tails) == bytes_in(tails)
        assert bytes_in(found.state.matrices) == bytes_in(matrices)


def num_found(store: BlockStore, keys: list[bytes], start: int = 0, spec: CacheSpec = PLAIN) -> int:
    """How many blocks from `start` on are found, all of them right."""
    found = store.find(keys, start, needs_state=spec.recurrent is not None)
    if found is None:
        return 0
    with closing(found):
        assert found.start == start
        assert_right(found, keys, spec)
        return found.num_blocks


def fill(store: BlockStore, keys: list[bytes], start: int = 0, spec: CacheSpec = PLAIN) -> None:
    """Put these blocks, and the states after each of them, and wait until they are on disk."""
    store.put_blocks(start, keys[start:], kv_of(keys[start:], spec))
    if spec.recurrent is not None:
        for index in range(start, len(keys)):
            store.put_state(index + 1, keys[index], StoredState(*state_of(keys[index], spec)))
    assert store.flush(60)


def files_in(folder: Path) -> list[Path]:
    """Blocks and states, in order of their names."""
    return sorted(folder.glob("*/*.safetensors"))


def _bits(seed: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    data = hashlib.shake_128(seed).digest(count)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
