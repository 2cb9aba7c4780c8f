"""Counts what tensors hold while something runs."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """The most bytes of storage that operations made and somebody held, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, int] = {}
        self._foreign: set[int] = set()  # weights and caches, which were there before and stay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in self._storages((args, kwargs)):
            if storage._cdata not in self._live and storage._cdata not in self._foreign:
                self._foreign.add(storage._cdata)
                # Its address may be a new storage's once it is gone.
                weakref.finalize(storage, self._foreign.discard, storage._cdata)
        out = func(*args, **(kwargs or {}))
        for storage in self._storages(out):
            if storage._cdata not in self._live and storage._cdata not in self._foreign:
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage._cdata, None)
                self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return out

    def _storages(self, held: object) -> list[torch.UntypedStorage]:
        tensors = (leaf for leaf in tree_leaves(held) if isinstance(leaf, torch.Tensor))
        return [tensor.untyped_storage() for tensor in tensors if not tensor.is_mkldnn]
