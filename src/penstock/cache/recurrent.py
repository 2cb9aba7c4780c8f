"""The recurrent state of every delta-net layer, over the slots of a pool."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from penstock.cache.memory import ALIGNMENT_BYTES, zeros
from penstock.cache.states import EMPTY
from penstock.errors import CacheFullError

# The delta rule adds a little to its matrix at every token: in a shorter dtype, long prompts would lose it.
_MATRIX_DTYPE = torch.float32


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """The state that a model's delta-net layers carry from one token to the next."""

    num_layers: int  # delta-net layers only
    conv_tail: int  # inputs of the convolution that the next token needs: one fewer than it has taps
    conv_size: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype  # of the convolution tail; the matrix is float32

    def __post_init__(self) -> None:
        for name in ("num_layers", "conv_size", "num_heads", "key_dim", "value_dim"):
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
        try:
            self.layers = self._new_layers(torch.device(device))
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise CacheFullError(
                f"a recurrent cache of {num_slots} slots takes {self.num_bytes} bytes, "
                f"more than there are on {device}; use fewer slots"
            ) from error
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
    slots = zeros((num_slots, _aligned_size(shape, dtype)), dtype, device)
    return slots[:, : prod(shape)].view(num_slots, *shape)


def _aligned_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The number of elements of this shape, rounded up so that the next slot's begin aligned."""
    multiple = ALIGNMENT_BYTES // dtype.itemsize
    return -(-prod(shape) // multiple) * multiple
