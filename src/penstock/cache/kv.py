"""The keys and values of a group of layers, over the blocks of a pool."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cache.memory import zeros
from penstock.cache.sequence import TokenRange
from penstock.errors import CacheFullError
from penstock.plan.grids import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The keys and values that a group of layers caches for each token."""

    num_layers: int  # 0: a stage of recurrent layers alone
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name, least in (("num_layers", 0), ("num_kv_heads", 1), ("head_dim", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KV:
    """Keys and values of one layer, each [num_tokens, num_kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor

    def write(self, places: Sequence[TokenRange], keys: Tensor, values: Tensor) -> None:
        """Copy keys and values, each [n, num_kv_heads, head_dim], into places of n tokens."""
        start = 0
        for place in places:
            end = start + len(place)
            self.keys[place.start : place.end].copy_(keys[start:end])
            self.values[place.start : place.end].copy_(values[start:end])
            start = end

    def read(self, places: Sequence[TokenRange]) -> "KV":
        """What is at these places: a view if they are one range, else a copy."""
        if not places:
            return self.first(0)
        keys = [self.keys[place.start : place.end] for place in places]
        values = [self.values[place.start : place.end] for place in places]
        return KV(torch.cat(keys), torch.cat(values)) if len(places) > 1 else KV(keys[0], values[0])

    def first(self, num_tokens: int) -> "KV":
        """A view of the first so many tokens."""
        return KV(self.keys[:num_tokens], self.values[:num_tokens])

    def read_blocks(self, blocks: Tensor) -> "KV":
        """A copy of whole blocks, by their numbers, one behind the other."""
        return KV(_blocks(self.keys, blocks), _blocks(self.values, blocks))

    def read_padded(self, places: Sequence[TokenRange], num_tokens: int) -> "KV":
        """A copy of what is at these places, with zeros after it up to `num_tokens` tokens."""
        return KV(_padded(self.keys, places, num_tokens), _padded(self.values, places, num_tokens))


class KVCache:
    """One tensor of keys and one of values per layer: [num_blocks * BLOCK_TOKENS, num_kv_heads, head_dim].

    Places that were never written are zero, so what a mask hides is always finite. A layer is all places, whoever has
    them: what is read and written there must have been checked.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 1:
            raise ValueError(f"a K/V cache needs at least 1 block, not {num_blocks}")
        self.spec = spec
        self.num_blocks = num_blocks
        try:
            self.layers = tuple(self._empty_layer(torch.device(device)) for _ in range(spec.num_layers))
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise CacheFullError(
                f"a K/V cache of {num_blocks * BLOCK_TOKENS} tokens takes {self.num_bytes} bytes, "
                f"more than there are on {device}; use a smaller cache"
            ) from error
        self.device = torch.empty(0, device=device).device

    @property
    def num_bytes(self) -> int:
        """Size when every place is in use. On CPU, memory is taken only as places are written."""
        return self.num_blocks * BLOCK_TOKENS * self.spec.bytes_per_token

    def layer(self, index: int) -> KV:
        return self.layers[index]

    def check_places(self, places: Iterable[TokenRange]) -> None:
        """ValueError where one lies outside the cache: slices would cut it short, and kernels see no bounds."""
        num_places = self.num_blocks * BLOCK_TOKENS
        for place in places:
            if not 0 <= place.start <= place.end <= num_places:
                raise ValueError(f"{place} lies outside the cache's {num_places} places")

    def _empty_layer(self, device: torch.device) -> KV:
        shape = (self.num_blocks * BLOCK_TOKENS, self.spec.num_kv_heads, self.spec.head_dim)
        return KV(zeros(shape, self.spec.dtype, device), zeros(shape, self.spec.dtype, device))


def _blocks(cached: Tensor, blocks: Tensor) -> Tensor:
    return cached.view(len(cached) // BLOCK_TOKENS, -1)[blocks].view(-1, *cached.shape[1:])


def _padded(cached: Tensor, places: Sequence[TokenRange], num_tokens: int) -> Tensor:
    padded = cached.new_empty((num_tokens, *cached.shape[1:]))
    start = 0
    for place in places:
        end = start + len(place)
        padded[start:end].copy_(cached[place.start : place.end])
        start = end
    padded[start:].zero_()
    return padded
