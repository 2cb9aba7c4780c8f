"""Copies between the cache's tensors and what the disk store keeps: bit for bit, either way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import torch
from torch import Tensor

from penstock.cache.blocks import extents_of
from penstock.cache.sequence import TokenRange
from penstock.cache.store.block_store import StoredBlock, StoredState
from penstock.cache.tensors import CacheTensors, KVCache
from penstock.plan.grids import BLOCK_TOKENS


def copy_out(tensors: CacheTensors, blocks: Sequence[Sequence[int]]) -> list[Tensor]:
    """Keys and values of these blocks of each K/V group without a window: [num_blocks, block_elements] on the CPU, in
    the order of `KVSpec.parts_of`."""
    return [_copy_group_out(group, ids) for group, ids in zip(tensors.whole_groups, blocks, strict=True)]


def copy_kept_out(tensors: CacheTensors, windows: Sequence[Sequence[int]], slot: int | None) -> StoredState:
    """What a sequence goes on with: its windows, in these blocks, and its state in a slot, where there are any."""
    kept = StoredState(windows=tuple(_copy_windows_out(tensors, windows)))
    if slot is None or tensors.recurrent is None:
        return kept
    tails, matrices = copy_state_out(tensors, slot)
    return replace(kept, tails=tails, matrices=matrices)


def copy_kept_in(
    tensors: CacheTensors, windows: Sequence[Sequence[int]], slot: int | None, kept: StoredState
) -> None:
    """Write it to blocks and a slot that nobody else reads yet."""
    _copy_windows_in(tensors, windows, kept.windows)
    if slot is not None and tensors.recurrent is not None:
        copy_state_in(tensors, slot, kept)


def _copy_windows_out(tensors: CacheTensors, windows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Keys and values of the groups with a window, each of as many blocks as a window takes: zeros stand for those
    before a sequence's first."""
    copied = []
    for group, ids in zip(tensors.window_groups, windows, strict=True):
        out = _copy_group_out(group, ids)
        missing = out.new_zeros((group.spec.window_blocks - len(ids), *out.shape[1:]))
        copied.append(torch.cat((missing, out)))
    return copied


def _copy_windows_in(
    tensors: CacheTensors, windows: Sequence[Sequence[int]], stored: Sequence[Tensor]
) -> None:
    for group, ids, given in zip(tensors.window_groups, windows, stored, strict=True):
        for run in _runs_of(group, ids):
            parts = group.spec.parts_of(given[len(given) - len(ids) :][run.first : run.last])
            for layer, kv in enumerate(group.layers):
                for part, cached in zip(parts, kv.parts, strict=True):
                    cached[run.places].copy_(part[:, layer].flatten(0, 1))


def _copy_group_out(group: KVCache, blocks: Sequence[int]) -> Tensor:
    spec = group.spec
    out = torch.empty((len(blocks), spec.block_elements), dtype=spec.dtype)
    parts = spec.parts_of(out)
    for run in _runs_of(group, blocks):
        for layer, kv in enumerate(group.layers):
            for part, cached in zip(parts, kv.parts, strict=True):
                part[run.first : run.last, layer] = cached[run.places].view(-1, *part.shape[2:])
    return out


def copy_in(tensors: CacheTensors, blocks: Sequence[Sequence[int]], stored: Sequence[StoredBlock]) -> None:
    """Write stored blocks into these blocks of each K/V group without a window, which nobody else reads yet."""
    for index, (group, ids) in enumerate(zip(tensors.whole_groups, blocks, strict=True)):
        if len(ids) != len(stored):
            raise ValueError(f"{len(stored)} stored blocks cannot go into {len(ids)} blocks")
        for run in _runs_of(group, ids):
            part = stored[run.first : run.last]
            # Of each block, by layer: [64, heads, head_dim]
            keys = [block.keys[index].unbind() for block in part]
            values = [block.values[index].unbind() for block in part]
            for layer, kv in enumerate(group.layers):
                for cached, given in zip(kv.parts, (keys, values), strict=False):
                    _fill(cached[run.places], [layers[layer] for layers in given])


def copy_tokens(group: KVCache, source: int, target: int, num_tokens: int) -> None:
    """Copy the first tokens of one block of a K/V group to another."""
    read, write = source * BLOCK_TOKENS, target * BLOCK_TOKENS
    for cached in group.layers:
        for tensor in cached.parts:
            tensor[write : write + num_tokens].copy_(tensor[read : read + num_tokens])


def copy_state_out(tensors: CacheTensors, slot: int) -> tuple[Tensor, Tensor]:
    """Tails [num_layers, conv_tail, conv_size] and matrices [num_layers, num_heads, key_dim, value_dim] of a slot, on
    the CPU."""
    layers = tensors.states.layers
    tails = torch.stack([layer.tail(slot) for layer in layers])
    matrices = torch.stack([layer.matrix(slot) for layer in layers])
    return tails.cpu(), matrices.cpu()


def copy_state_in(tensors: CacheTensors, slot: int, state: StoredState) -> None:
    """Write a stored state into a slot, which nobody else reads yet."""
    for layer, tail, matrix in zip(tensors.states.layers, state.tails, state.matrices, strict=True):
        layer.tail_out(slot).copy_(tail)
        layer.matrix_out(slot).copy_(matrix)


@dataclass(frozen=True)
class CacheDigests:
    """Of each layer: keys and values of a sequence by K/V group, and its states; each in the order of layers."""

    kv: tuple[tuple[str, ...], ...]
    states: tuple[str, ...]


def cache_digests(
    tensors: CacheTensors, places: Sequence[Sequence[TokenRange]], slot: int | None
) -> CacheDigests:
    """Hashes of what a sequence has in a cache, at these places of each K/V group: two sequences with equal ones have
    equal bits."""
    groups = zip(tensors.kv_groups, places, strict=True)
    kvs = [[layer.read(own) for layer in group.layers] for group, own in groups]
    states = () if tensors.recurrent is None or slot is None else tensors.recurrent.layers
    return CacheDigests(
        tuple(tuple(_digest(*kv.parts) for kv in group) for group in kvs),
        tuple(_digest(layer.tail(slot), layer.matrix(slot)) for layer in states if slot is not None),
    )


def _digest(*tensors: Tensor) -> str:
    digest = sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Run:
    """Items [first, last) of a list of blocks, which lie side by side in the cache."""

    first: int
    last: int
    places: slice  # of their tokens


def _runs_of(group: KVCache, blocks: Sequence[int]) -> Iterator[_Run]:
    for block in blocks:
        if not 0 <= block < group.num_blocks:
            raise ValueError(f"block {block} lies outside the cache's {group.num_blocks} blocks")
    first = 0
    for extent in extents_of(blocks):
        last = first + len(extent)
        yield _Run(first, last, slice(extent.start * BLOCK_TOKENS, extent.end * BLOCK_TOKENS))
        first = last


def _fill(places: Tensor, parts: list[Tensor]) -> None:
    """One copy of all parts, each [64, heads, head_dim], to where they are to lie one after the other."""
    if places.is_cpu:
        torch.cat(parts, out=places)
    else:
        places.copy_(torch.cat(parts))
