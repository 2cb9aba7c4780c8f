"""Passes that a device has recorded: one command starts what would be hundreds of launches.

A GPU is often done with a kernel before the host has launched the next one. A graph is recorded for a number of
rows, over one cache; what differs from pass to pass lies in tensors that stay where they are, which one copy fills.
Which kernels run, and on what shapes, is as without graphs, and so are the bits.
"""

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from penstock.cache import BLOCK_TOKENS
from penstock.cache.tensors import CacheTensors
from penstock.layers.batch import ForwardBatch
from penstock.layers.mlp import GatedMLP
from penstock.models.recording import Recorder

if TYPE_CHECKING:
    from penstock.models.decoder import Decoder

# Rows of decodes are rounded up to one of these. More than the last are launched one by one.
DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
# The same for the blocks of the longest; more than the last are all that there are.
DECODE_BLOCKS = (8, 32, 256)
# A GPU is busy long enough with the kernels of more rows than these.
_MOST_CHUNK_ROWS = 2560
# A number of rows that comes once may never come again: it is recorded when it comes again.
_USES_BEFORE = 1
# Each number of rows has graphs of its own, of every layer: no more than so many.
_MOST_CHUNK_GRAPHS = 16


class RecordedPass(Protocol):
    def run(self, batch: ForwardBatch, model: "Decoder", caches: CacheTensors) -> Tensor | None:
        """What the model's forward pass gives."""


class PassGraphs:
    """The graphs of a model, for each cache that it runs over."""

    def __init__(self, model: "Decoder") -> None:
        self._model = weakref.ref(model)
        self._of_cache: weakref.WeakKeyDictionary[CacheTensors, _CacheGraphs] = weakref.WeakKeyDictionary()
        # An expert's rows are known to the host before its product is launched.
        self._can_record = all(isinstance(layer.mlp, GatedMLP) for layer in model.layers)

    def find(self, batch: ForwardBatch, caches: CacheTensors) -> RecordedPass | None:
        """The graphs for a batch, recorded now where it is worth it; None where it is to be launched."""
        model = self._model()
        if model is None or not self._can_record or torch.cuda.is_current_stream_capturing():
            return None
        if caches not in self._of_cache:
            self._of_cache[caches] = _CacheGraphs(caches)
        return self._of_cache[caches].find(batch, model)


class _CacheGraphs:
    """Those over one cache, which they keep no hold of."""

    def __init__(self, caches: CacheTensors) -> None:
        self._caches = weakref.ref(caches)
        self._recorder = Recorder(caches.kv.device)
        self._decodes: dict[tuple[int, int], RecordedPass] = {}  # by rows, and the most blocks that one sees
        self._chunks: dict[object, RecordedPass] = {}
        self._uses: Counter[object] = Counter()

    def find(self, batch: ForwardBatch, model: "Decoder") -> RecordedPass | None:
        from penstock.models.chunk_graphs import ChunkGraphs, chunk_layout
        from penstock.models.decode_graphs import DecodeGraph, is_decode

        caches = self._caches()
        assert caches is not None
        if is_decode(batch):
            num_rows = next((size for size in DECODE_ROWS if batch.num_tokens <= size), None)
            if num_rows is None:
                return None
            longest = -(-batch.end_position // BLOCK_TOKENS)
            sizes = (size for size in DECODE_BLOCKS if longest <= size)
            shape = (num_rows, min(next(sizes, caches.kv.num_blocks), caches.kv.num_blocks))
            if shape not in self._decodes:
                self._decodes[shape] = DecodeGraph(model, caches, *shape, self._recorder)
            return self._decodes[shape]
        if not batch.is_canonical or len(batch.token_ids) > _MOST_CHUNK_ROWS:
            return None
        layout = chunk_layout(batch)
        if layout is None:
            return None
        if layout not in self._chunks:
            self._uses[layout] += 1
            if self._uses[layout] <= _USES_BEFORE or len(self._chunks) >= _MOST_CHUNK_GRAPHS:
                return None
            self._chunks[layout] = ChunkGraphs(model, caches, layout, self._recorder)
        return self._chunks[layout]
