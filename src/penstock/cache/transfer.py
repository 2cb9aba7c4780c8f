"""Copies between the cache's tensors and what the disk store keeps: bit for bit, either way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cache.store.block_store import StoredBlock, StoredState
from penstock.cache.tensors import CacheTensors
from penstock.plan.grids import BLOCK_TOKENS


def copy_out(tensors: CacheTensors, blocks: Sequence[int]) -> Tensor:
    """Keys and values of these blocks: [num_blocks, 2, num_layers, 64, num_kv_heads, head_dim] on the CPU."""
    spec = tensors.kv.spec
    block_shape = (BLOCK_TOKENS, spec.num_kv_heads, spec.head_dim)
    out = torch.empty((len(blocks), 2, spec.num_layers, *block_shape), dtype=spec.dtype)
    for run in _runs_of(tensors, blocks):
        for layer in range(spec.num_layers):
            kv = tensors.kv.layer(layer)
            for part, cached in enumerate((kv.keys, kv.values)):
                out[run.first : run.last, part, layer] = cached[run.places].view(-1, *block_shape)
    return out


def copy_in(tensors: CacheTensors, blocks: Sequence[int], stored: Sequence[StoredBlock]) -> None:
    """Write stored blocks into the cache's blocks of these ids, which nobody else reads yet."""
    if len(blocks) != len(stored):
        raise ValueError(f"{len(stored)} stored blocks cannot go into {len(blocks)} blocks")
    for run in _runs_of(tensors, blocks):
        part = stored[run.first : run.last]
        keys = [
            block.keys.unbind() for block in part
        ]  # for each block its layers, each [64, heads, head_dim]
        values = [block.values.unbind() for block in part]
        for layer in range(tensors.kv.spec.num_layers):
            kv = tensors.kv.layer(layer)
            _fill(kv.keys[run.places], [layers[layer] for layers in keys])
            _fill(kv.values[run.places], [layers[layer] for layers in values])


def copy_state_out(tensors: CacheTensors, slot: int) -> tuple[Tensor, Tensor]:
    """Tails [num_layers, conv_tail, conv_size] and matrices [num_layers, num_heads, key_dim, value_dim] of a slot, on
    the CPU."""
    states = tensors.states
    layers = range(states.spec.num_layers)
    tails = torch.stack([states.tail(layer, slot) for layer in layers])
    matrices = torch.stack([states.matrix(layer, slot) for layer in layers])
    return tails.cpu(), matrices.cpu()


def copy_state_in(tensors: CacheTensors, slot: int, state: StoredState) -> None:
    """Write a stored state into a slot, which nobody else reads yet."""
    states = tensors.states
    for layer in range(states.spec.num_layers):
        states.tail_out(layer, slot).copy_(state.tails[layer])
        states.matrix_out(layer, slot).copy_(state.matrices[layer])


@dataclass(frozen=True)
class _Run:
    """Items [first, last) of a list of blocks, which lie side by side in the cache."""

    first: int
    last: int
    places: slice  # of their tokens


def _runs_of(tensors: CacheTensors, blocks: Sequence[int]) -> Iterator[_Run]:
    for block in blocks:
        if not 0 <= block < tensors.kv.num_blocks:
            raise ValueError(f"block {block} lies outside the cache's {tensors.kv.num_blocks} blocks")
    first = 0
    for last in range(1, len(blocks) + 1):
        if last == len(blocks) or blocks[last] != blocks[last - 1] + 1:
            places = slice(blocks[first] * BLOCK_TOKENS, (blocks[last - 1] + 1) * BLOCK_TOKENS)
            yield _Run(first, last, places)
            first = last


def _fill(places: Tensor, parts: list[Tensor]) -> None:
    """One copy of all parts, each [64, heads, head_dim], to where they are to lie one after the other."""
    if places.is_cpu:
        torch.cat(parts, out=places)
    else:
        places.copy_(torch.cat(parts))


def copy_tokens(tensors: CacheTensors, source: int, target: int, num_tokens: int) -> None:
    """Copy the first tokens of one block to another."""
    read, write = source * BLOCK_TOKENS, target * BLOCK_TOKENS
    for layer in range(tensors.kv.spec.num_layers):
        cached = tensors.kv.layer(layer)
        for tensor in (cached.keys, cached.values):
            tensor[write : write + num_tokens].copy_(tensor[read : read + num_tokens])
