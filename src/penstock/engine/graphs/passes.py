"""Passes that a device has recorded: one command starts what would be hundreds of launches.

A GPU is often done with a kernel before the host has launched the next one. A graph is recorded for a number of
rows, over one cache; what differs from pass to pass lies in tensors that stay where they are, which one copy fills.
Which kernels run, and on what shapes, is as without graphs, and so are the bits.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from penstock.cache import BLOCK_TOKENS, SequenceBlocks
from penstock.cache.tensors import CacheTensors
from penstock.engine.graphs.chunk import ChunkGraphs, ChunkLayout, chunk_layout
from penstock.engine.graphs.decode import DecodeGraph, FollowingDecodes, is_decode
from penstock.engine.graphs.recording import Recorder
from penstock.errors import is_out_of_memory
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder, RecordedPass
from penstock.plan.grids import GRAPH_ROWS

# Rows of decodes are rounded up to one of these. More than the last are launched one by one.
DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
MOST_DECODE_ROWS = 256  # where they are padded
# The same for the blocks of the longest; more than the last are all that there are.
DECODE_BLOCKS = (8, 32, 256, 1024)
# Each number of rows has graphs of its own, of every layer: no more than so many.
_MOST_CHUNK_GRAPHS = 16
_MOST_SEEN = 1024


_Pass = TypeVar("_Pass")


class PassGraphs:
    """The graphs of a model, for each cache that it runs over."""

    def __init__(self, model: Decoder) -> None:
        self._model = weakref.ref(model)
        self._of_cache: weakref.WeakKeyDictionary[CacheTensors, _CacheGraphs] = weakref.WeakKeyDictionary()

    def find(self, batch: ForwardBatch, caches: CacheTensors) -> RecordedPass | None:
        """The graphs for a batch, recorded now where it is worth it; None where it is to be launched."""
        model = self._model()
        return None if model is None else self._over(caches).find(batch, model)

    def prepare(self, batch: ForwardBatch, caches: CacheTensors) -> None:
        """Make what a batch of decodes is recorded as ready for it, whose tokens may still change."""
        model = self._model()
        if model is not None:
            self._over(caches).prepare(batch, model)

    def must_record(self, batch: ForwardBatch, caches: CacheTensors) -> bool:
        """Whether something is recorded first for a batch, which takes as long as many passes."""
        model = self._model()
        return model is not None and self._over(caches).must_record(batch, model)

    def follow(
        self, batch: ForwardBatch, caches: CacheTensors, blocks: Sequence[tuple[SequenceBlocks, ...]]
    ) -> FollowingDecodes | None:
        """The passes after a batch of decodes, each a token further."""
        model = self._model()
        return None if model is None else self._over(caches).follow(batch, model, blocks)

    @torch.inference_mode()
    def record_decodes(self, most: int, caches: CacheTensors, *, is_canonical: bool) -> Iterator[None]:
        """Record decodes of up to so many sequences in advance, short pasts first, one pass at each step."""
        model = self._model()
        if model is not None:
            yield from self._over(caches).record_decodes(most, model, is_canonical)

    def _over(self, caches: CacheTensors) -> "_CacheGraphs":
        if caches not in self._of_cache:
            self._of_cache[caches] = _CacheGraphs(caches)
        return self._of_cache[caches]


class _CacheGraphs:
    """Those over one cache, which they keep no hold of."""

    def __init__(self, caches: CacheTensors) -> None:
        self._caches = weakref.ref(caches)
        self._recorder = Recorder(caches.kv.device)
        # By what they depend on; None: memory did not allow it.
        self._decodes: dict[tuple[int, int, bool], DecodeGraph | None] = {}
        self._chunks: dict[object, RecordedPass | None] = {}
        self._seen: set[object] = set()  # layouts of chunks that came once

    def find(self, batch: ForwardBatch, model: Decoder) -> RecordedPass | None:
        caches = self._caches()
        assert caches is not None
        if is_decode(batch) and (graph := self._decode(batch, model, caches)) is not None:
            return graph
        layout = _layout_of(batch)
        return None if layout is None else self._chunk(layout, model, caches)

    def must_record(self, batch: ForwardBatch, model: Decoder) -> bool:
        caches = self._caches()
        assert caches is not None
        if is_decode(batch) and (shape := self._decode_shape(batch, model, caches)) is not None:
            return shape not in self._decodes
        layout = _layout_of(batch)
        return layout is not None and layout not in self._chunks and self._is_worth(layout)

    def prepare(self, batch: ForwardBatch, model: Decoder) -> None:
        caches = self._caches()
        assert caches is not None
        if is_decode(batch) and (graph := self._decode(batch, model, caches)) is not None:
            graph.prepare(batch)

    def follow(
        self, batch: ForwardBatch, model: Decoder, blocks: Sequence[tuple[SequenceBlocks, ...]]
    ) -> FollowingDecodes | None:
        caches = self._caches()
        assert caches is not None
        graph = self._decode(batch, model, caches) if is_decode(batch) else None
        return None if graph is None else graph.follow(batch, blocks)

    def _decode(self, batch: ForwardBatch, model: Decoder, caches: CacheTensors) -> DecodeGraph | None:
        shape = self._decode_shape(batch, model, caches)
        return None if shape is None else self._decode_of(shape, model, caches)

    def _decode_shape(
        self, batch: ForwardBatch, model: Decoder, caches: CacheTensors
    ) -> tuple[int, int, bool] | None:
        # What is padded keeps its rows: only of few does the number not matter to their bits.
        is_padded = batch.is_canonical and batch.num_tokens > model.kernels.law.few_rows
        sizes = (len(batch.token_ids),) if is_padded else DECODE_ROWS
        num_rows = next((size for size in sizes if batch.num_tokens <= size <= MOST_DECODE_ROWS), None)
        if num_rows is None:
            return None
        longest = -(-batch.end_position // BLOCK_TOKENS)
        most = _most_blocks(model, caches)
        num_blocks = min(next((size for size in DECODE_BLOCKS if longest <= size), most), most)
        return num_rows, num_blocks, batch.is_canonical

    def record_decodes(self, most: int, model: Decoder, is_canonical: bool) -> Iterator[None]:
        caches = self._caches()
        assert caches is not None
        # What is padded has other numbers of rows.
        limit = model.kernels.law.few_rows if is_canonical else DECODE_ROWS[-1]
        most_blocks = _most_blocks(model, caches)
        for num_blocks in sorted({min(size, most_blocks) for size in (*DECODE_BLOCKS, most_blocks)}):
            for before, num_rows in pairwise((0, *DECODE_ROWS)):
                if before < most and num_rows <= limit:
                    self._decode_of((num_rows, num_blocks, is_canonical), model, caches)
                    yield

    def _decode_of(
        self, shape: tuple[int, int, bool], model: Decoder, caches: CacheTensors
    ) -> DecodeGraph | None:
        if shape not in self._decodes:
            self._decodes[shape] = _unless_memory_ends(
                lambda: DecodeGraph(model, caches, *shape, self._recorder)
            )
        return self._decodes[shape]

    def _is_worth(self, layout: ChunkLayout) -> bool:
        """A number of rows that comes once may never come again."""
        return layout in self._seen and len(self._chunks) < _MOST_CHUNK_GRAPHS

    def _chunk(self, layout: ChunkLayout, model: Decoder, caches: CacheTensors) -> RecordedPass | None:
        if layout not in self._chunks:
            if not self._is_worth(layout):
                if len(self._seen) < _MOST_SEEN:
                    self._seen.add(layout)
                return None
            self._chunks[layout] = _unless_memory_ends(
                lambda: ChunkGraphs(model, caches, layout, self._recorder)
            )
        return self._chunks[layout]


def _layout_of(batch: ForwardBatch) -> ChunkLayout | None:
    """Of a batch that is recorded in pieces."""
    return chunk_layout(batch) if batch.is_canonical and len(batch.token_ids) <= GRAPH_ROWS else None


def _most_blocks(model: Decoder, caches: CacheTensors) -> int:
    """That a sequence may have."""
    return min(caches.kv.num_blocks, -(-model.config.max_position // BLOCK_TOKENS))


def _unless_memory_ends(record: Callable[[], _Pass]) -> _Pass | None:
    """What is recorded takes memory that stays. Where there is none for it, passes are launched instead."""
    torch.cuda.empty_cache()  # a recording can take nothing back
    try:
        return record()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        torch.cuda.empty_cache()
        return None
