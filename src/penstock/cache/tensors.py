"""The tensors in which a model keeps what it has read: keys and values, and recurrent states where it has any."""

from dataclasses import dataclass

import torch

from penstock.cache.kv import KVCache, KVSpec
from penstock.cache.recurrent import RecurrentCache, RecurrentSpec


@dataclass(frozen=True)
class CacheSpec:
    """What a model caches: for each token, and for each sequence."""

    kv: KVSpec
    recurrent: RecurrentSpec | None = None


@dataclass(frozen=True)
class CacheTensors:
    """The caches of one model. The states are absent where it has none."""

    kv: KVCache
    recurrent: RecurrentCache | None = None

    @classmethod
    def of(cls, spec: CacheSpec, num_blocks: int, num_slots: int, device: torch.device) -> "CacheTensors":
        recurrent = RecurrentCache(spec.recurrent, num_slots, device) if spec.recurrent else None
        return cls(KVCache(spec.kv, num_blocks, device), recurrent)

    @property
    def states(self) -> RecurrentCache:
        """The recurrent states, for the layers that need them."""
        assert self.recurrent is not None, (
            "the model has recurrent layers, but its cache was made without states"
        )
        return self.recurrent
