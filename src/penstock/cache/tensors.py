"""The tensors in which a model keeps what it has read: keys and values over the blocks of a pool, by group of layers,
and recurrent states over the slots of another."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from penstock.cache.sequence import TokenRange
from penstock.cache.states import EMPTY
from penstock.errors import CacheFullError
from penstock.plan.admission import WindowRoom
from penstock.plan.grids import BLOCK_TOKENS
from penstock.plan.model import RecurrentConfig

# What torch's own allocator gives. Kernels may take another path, with other bits, for other alignments.
_ALIGNMENT_BYTES = 64
_HOST = torch.device("cpu")

# The delta rule adds a little to its matrix at every token: in a shorter dtype, long prompts would lose it.
_MATRIX_DTYPE = torch.float32


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An aligned tensor of zeros. On CPU, memory is taken only as it is written."""
    if device != _HOST:
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page at once; numpy's zeros are pages that the system commits on first use.
    num_bytes = prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8))
    offset = -memory.data_ptr() % _ALIGNMENT_BYTES
    return memory[offset : offset + num_bytes].view(dtype).view(shape)


@contextmanager
def _fitting(what: str, num_bytes: int, device: torch.device | str) -> Iterator[None]:
    try:
        if num_bytes > sys.maxsize:  # no library has numbers for it
            raise MemoryError
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CacheFullError(
            f"{what} takes {num_bytes} bytes, more than there are on {device}; use a smaller cache"
        ) from error


# Keys and values


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The keys and values that a group of layers caches for each token, or for the last tokens alone."""

    num_layers: int  # 0: all layers are of other groups, or recurrent
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int = 0  # tokens that the next one sees, itself among them; 0: all
    value_dim: int = 0  # of a head's values; 0: as large as its keys
    is_latent: bool = False  # values are what keys are, and stored once

    def __post_init__(self) -> None:
        least = {"num_layers": 0, "num_kv_heads": 1, "head_dim": 1, "window": 0, "value_dim": 0}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ValueError(f"{name} must be at least {number}, not {getattr(self, name)}")

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of a token's keys and values."""
        return (self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.value_dim or self.head_dim)

    @property
    def num_parts(self) -> int:
        """Tensors of a layer: keys and values, or both as one."""
        return 1 if self.is_latent else 2

    @property
    def bytes_per_token(self) -> int:
        return sum(map(prod, self.shapes[: self.num_parts])) * self.num_layers * self.dtype.itemsize

    @property
    def block_elements(self) -> int:
        """Of a block's keys and values, in all layers."""
        return self.bytes_per_token * BLOCK_TOKENS // self.dtype.itemsize

    def parts_of(self, blocks: Tensor) -> list[Tensor]:
        """Views of the keys and the values, each [n, num_layers, 64, num_kv_heads, size], in blocks [n,
        block_elements] as they are kept outside the cache: first all keys, then all values."""
        shapes = [(self.num_layers, BLOCK_TOKENS, *shape) for shape in self.shapes[: self.num_parts]]
        parts = torch.split(blocks, [prod(shape) for shape in shapes], dim=1)
        return [part.view(len(blocks), *shape) for part, shape in zip(parts, shapes, strict=True)]

    @property
    def window_blocks(self) -> int:
        """Blocks before a token that begins one of which it sees some, at most."""
        return -(-(self.window - 1) // BLOCK_TOKENS) if self.window else 0


@dataclass(frozen=True, slots=True)
class KV:
    """Keys [num_tokens, num_kv_heads, head_dim] and values [num_tokens, num_kv_heads, value_dim] of one layer.
    Latents are both: one tensor."""

    keys: Tensor
    values: Tensor

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.keys,) if self.values is self.keys else (self.keys, self.values)

    def _made(self, make: Callable[[Tensor], Tensor]) -> "KV":
        parts = [make(part) for part in self.parts]
        return KV(parts[0], parts[-1])

    def write(self, places: Sequence[TokenRange], keys: Tensor, values: Tensor) -> None:
        """Copy keys and values, each [n, num_kv_heads, head_dim], into places of n tokens."""
        start = 0
        for place in places:
            end = start + len(place)
            for part, given in zip(self.parts, (keys, values), strict=False):
                part[place.start : place.end].copy_(given[start:end])
            start = end

    def read(self, places: Sequence[TokenRange]) -> "KV":
        """What is at these places: a view if they are one range, else a copy."""
        if not places:
            return self.first(0)
        if len(places) == 1:
            return self._made(lambda part: part[places[0].start : places[0].end])
        return self._made(lambda part: torch.cat([part[place.start : place.end] for place in places]))

    def first(self, num_tokens: int) -> "KV":
        """A view of the first so many tokens."""
        return self._made(lambda part: part[:num_tokens])

    def read_blocks(self, blocks: Tensor) -> "KV":
        """A copy of whole blocks, by their numbers, one behind the other."""
        return self._made(lambda part: _blocks(part, blocks))

    def read_padded(self, places: Sequence[TokenRange], num_tokens: int) -> "KV":
        """A copy of what is at these places, with zeros after it up to `num_tokens` tokens."""
        return self._made(lambda part: _padded(part, places, num_tokens))


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
        with _fitting(f"a K/V cache of {num_blocks * BLOCK_TOKENS} tokens", self.num_bytes, device):
            self.layers = tuple(self._empty_layer(torch.device(device)) for _ in range(spec.num_layers))
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
        num_tokens, dtype = self.num_blocks * BLOCK_TOKENS, self.spec.dtype
        shapes = self.spec.shapes[: self.spec.num_parts]
        parts = [_zeros((num_tokens, *shape), dtype, device) for shape in shapes]
        return KV(parts[0], parts[-1])


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


# Recurrent states


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """The state that a model's recurrent layers carry from one token to the next: inputs of a convolution, and a
    matrix for each head, unless all three sizes of those are 0."""

    num_layers: int  # recurrent layers only
    conv_tail: int  # inputs of the convolution that the next token needs: one fewer than it has taps
    conv_size: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype  # of the convolution tail; the matrix is float32

    @classmethod
    def of(cls, net: RecurrentConfig, dtype: torch.dtype) -> "RecurrentSpec":
        return cls(net.num_layers, net.conv_kernel - 1, net.conv_size, *net.matrix_shape, dtype)

    def __post_init__(self) -> None:
        matrix = ("num_heads", "key_dim", "value_dim") if any(self.matrix_shape) else ()
        for name in ("num_layers", "conv_size", *matrix):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.conv_tail < 0:
            raise ValueError(f"conv_tail must be at least 0, not {self.conv_tail}")

    @property
    def tail_shape(self) -> tuple[int, ...]:
        return (self.conv_tail, self.conv_size)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return (self.num_heads, self.key_dim, self.value_dim)

    @property
    def bytes_per_slot(self) -> int:
        """Tail and matrix of every layer, each filled up to the alignment (real models' are multiples of it)."""
        tail = _aligned_size(self.tail_shape, self.dtype) * self.dtype.itemsize
        matrix = _aligned_size(self.matrix_shape, _MATRIX_DTYPE) * _MATRIX_DTYPE.itemsize
        return self.num_layers * (tail + matrix)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer in every slot; each slot's are contiguous and aligned."""

    tails: Tensor  # [num_slots, conv_tail, conv_size]
    matrices: Tensor  # [num_slots, num_heads, key_dim, value_dim], float32
    empty_tail: Tensor  # [conv_tail, conv_size], zeros
    empty_matrix: Tensor  # [num_heads, key_dim, value_dim], zeros

    def tail(self, slot: int) -> Tensor:
        """The convolution tail in a slot, [conv_tail, conv_size], to be read only. Zeros for EMPTY."""
        if slot == EMPTY:
            return self.empty_tail
        self._check("read", slot)
        return self.tails[slot]

    def matrix(self, slot: int) -> Tensor:
        """The delta-rule matrix in a slot, [num_heads, key_dim, value_dim], to be read only. Zeros for EMPTY."""
        if slot == EMPTY:
            return self.empty_matrix
        self._check("read", slot)
        return self.matrices[slot]

    def tail_out(self, slot: int) -> Tensor:
        """Where the convolution tail of a reserved slot is to be written, [conv_tail, conv_size]."""
        self._check("write", slot)
        return self.tails[slot]

    def matrix_out(self, slot: int) -> Tensor:
        """Where the delta-rule matrix of a reserved slot is to be written, [num_heads, key_dim, value_dim]."""
        self._check("write", slot)
        return self.matrices[slot]

    def _check(self, action: str, slot: int) -> None:
        """An index would take a slot from the other end for a negative number, EMPTY among them."""
        num_slots = self.tails.shape[0]
        if not 0 <= slot < num_slots:
            what = "the empty state" if slot == EMPTY else f"slot {slot}"
            raise ValueError(f"cannot {action} {what}: accepted are slots 0 to {num_slots - 1}")


class RecurrentCache:
    """A convolution tail and a delta-rule matrix for every layer and slot.

    A step reads one slot and writes others, so what a committed slot holds never changes. A slot that is to
    be written still holds what its last owner wrote: all of it must be written.
    """

    def __init__(self, spec: RecurrentSpec, num_slots: int, device: torch.device | str = "cpu") -> None:
        if num_slots < 1:
            raise ValueError(f"a recurrent cache needs at least 1 slot, not {num_slots}")
        self.spec = spec
        self.num_slots = num_slots
        with _fitting(f"a recurrent cache of {num_slots} slots", self.num_bytes, device):
            self.layers = self._new_layers(torch.device(device))
        self.device = self.layers[0].tails.device

    @property
    def num_bytes(self) -> int:
        """Size when every slot is in use. On CPU, memory is taken only as slots are written."""
        return self.num_slots * self.spec.bytes_per_slot

    def layer(self, index: int) -> LayerStates:
        return self.layers[index]

    def _new_layers(self, device: torch.device) -> tuple[LayerStates, ...]:
        spec = self.spec
        tail = _slots_of_zeros(1, spec.tail_shape, spec.dtype, device)[0]
        matrix = _slots_of_zeros(1, spec.matrix_shape, _MATRIX_DTYPE, device)[0]
        return tuple(
            LayerStates(
                _slots_of_zeros(self.num_slots, spec.tail_shape, spec.dtype, device),
                _slots_of_zeros(self.num_slots, spec.matrix_shape, _MATRIX_DTYPE, device),
                tail,
                matrix,
            )
            for _ in range(spec.num_layers)
        )


def _slots_of_zeros(
    num_slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[num_slots, *shape] of zeros, each slot's part contiguous and aligned."""
    slots = _zeros((num_slots, _aligned_size(shape, dtype)), dtype, device)
    return slots[:, : prod(shape)].view(num_slots, *shape)


def _aligned_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The number of elements of this shape, rounded up so that the next slot's begin aligned."""
    multiple = _ALIGNMENT_BYTES // dtype.itemsize
    return -(-prod(shape) // multiple) * multiple


# All of a model


@dataclass(frozen=True)
class CacheSpec:
    """What a model caches. A layer is known by its group and its index within the group.

    kv_groups   layers with attention, grouped by window and by the shape of their keys and values; each group has a
                block pool. The first has no window, though perhaps no layers: its blocks are the sequence's books
    recurrent   layers with recurrent state: one group, with a slot pool
    """

    kv_groups: tuple[KVSpec, ...]
    recurrent: RecurrentSpec | None = None

    def __post_init__(self) -> None:
        if not self.kv_groups:
            raise ValueError("a cache needs at least one group of keys and values")
        if self.kv_groups[0].window:
            raise ValueError("the first group of keys and values has no window: give one without layers")

    @property
    def kv(self) -> KVSpec:
        """The first group's: of layers that see everything before them."""
        return self.kv_groups[0]

    @property
    def windows(self) -> tuple[KVSpec, ...]:
        """The groups with a window."""
        return tuple(group for group in self.kv_groups if group.window)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of a token, in all groups that keep them to the end."""
        return sum(group.bytes_per_token for group in self.kv_groups if not group.window)

    @property
    def bytes_per_window(self) -> int:
        """Whole blocks of keys and values that a sequence goes on with, in the groups with windows."""
        return sum(group.window_blocks * BLOCK_TOKENS * group.bytes_per_token for group in self.kv_groups)

    @property
    def bytes_per_slot(self) -> int:
        return self.recurrent.bytes_per_slot if self.recurrent else 0

    def num_blocks(self, num_blocks: int, windows: WindowRoom) -> list[int]:
        """Of each K/V group, where one without a window has so many."""
        return [
            windows.num_blocks(group.window, BLOCK_TOKENS, num_blocks) if group.window else num_blocks
            for group in self.kv_groups
        ]

    def num_bytes(self, num_blocks: int, num_slots: int, windows: WindowRoom | None = None) -> int:
        """A cache of so many blocks in each group without a window, and so many slots."""
        counts = self.num_blocks(num_blocks, windows or WindowRoom())
        groups = zip(counts, self.kv_groups, strict=True)
        kv_bytes = sum(count * BLOCK_TOKENS * group.bytes_per_token for count, group in groups)
        return kv_bytes + num_slots * self.bytes_per_slot


class CacheTensors:
    """The caches of one model, one for each group of its spec. The states are absent where it has none."""

    def __init__(self, kv_groups: Sequence[KVCache], recurrent: RecurrentCache | None = None) -> None:
        self.kv_groups = tuple(kv_groups)
        self.recurrent = recurrent
        self.whole_groups = tuple(group for group in kv_groups if not group.spec.window)
        self.window_groups = tuple(group for group in kv_groups if group.spec.window)
        self._layers = tuple(group.layers for group in kv_groups)

    @classmethod
    def of(
        cls, spec: CacheSpec, num_blocks: Sequence[int], num_slots: int, device: torch.device
    ) -> "CacheTensors":
        """Caches of so many blocks for each K/V group."""
        groups = zip(spec.kv_groups, num_blocks, strict=True)
        recurrent = RecurrentCache(spec.recurrent, num_slots, device) if spec.recurrent else None
        return cls([KVCache(group, number, device) for group, number in groups], recurrent)

    @property
    def kv(self) -> KVCache:
        """The first group's: of layers that see everything before them."""
        return self.kv_groups[0]

    def layer(self, group: int, index: int) -> KV:
        """The keys and values of a layer, by its K/V group and its index within it. All places, whoever has them:
        what is read and written there must have been checked."""
        return self._layers[group][index]

    @property
    def states(self) -> RecurrentCache:
        """The recurrent states, for the layers that need them."""
        assert self.recurrent is not None, (
            "the model has recurrent layers, but its cache was made without states"
        )
        return self.recurrent

    @property
    def num_bytes(self) -> int:
        """Size when every place and slot is in use. On CPU, memory is taken only as they are written."""
        return sum(group.num_bytes for group in self.kv_groups) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        return self.recurrent.num_bytes if self.recurrent else 0
