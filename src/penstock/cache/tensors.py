"""The tensors in which a model keeps what it has read, by group of layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.cache.kv import KV, KVCache, KVSpec
from penstock.cache.recurrent import RecurrentCache, RecurrentSpec
from penstock.plan.grids import BLOCK_TOKENS


@dataclass(frozen=True)
class CacheSpec:
    """What a model caches. A layer is known by its group and its index within the group.

    kv_groups   layers with attention, grouped by the shape of their keys and values; each group has a block pool
    recurrent   layers with recurrent state: one group, with a slot pool
    """

    kv_groups: tuple[KVSpec, ...]
    recurrent: RecurrentSpec | None = None

    def __post_init__(self) -> None:
        if not self.kv_groups:
            raise ValueError("a cache needs at least one group of keys and values")

    @property
    def kv(self) -> KVSpec:
        """The keys and values of a model with one K/V group. Where there may be several, use `kv_groups`."""
        (only,) = self.kv_groups
        return only

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of a token, in all groups."""
        return sum(group.bytes_per_token for group in self.kv_groups)

    @property
    def bytes_per_slot(self) -> int:
        return self.recurrent.bytes_per_slot if self.recurrent else 0

    def num_bytes(self, num_blocks: int, num_slots: int) -> int:
        """A cache of so many blocks in each group, and so many slots."""
        return num_blocks * BLOCK_TOKENS * self.bytes_per_token + num_slots * self.bytes_per_slot


class CacheTensors:
    """The caches of one model, one for each group of its spec. The states are absent where it has none."""

    def __init__(self, kv_groups: Sequence[KVCache], recurrent: RecurrentCache | None = None) -> None:
        self.kv_groups = tuple(kv_groups)
        self.recurrent = recurrent
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
        """Keys and values of a model with one K/V group. Where there may be several, use `kv_groups`."""
        (only,) = self.kv_groups
        return only

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
