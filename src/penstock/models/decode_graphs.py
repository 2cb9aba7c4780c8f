"""Decodes on a GPU as graphs: a pass is hundreds of launches, each of which takes the processor longer than the GPU.

A graph is captured for some numbers of rows, and a pass runs in the smallest that holds it. What differs from pass to
pass lies in tensors that stay where they are; one copy fills them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.cache.tensors import CacheTensors
from penstock.kernels.cuda_work import BLOCK_TOKENS, DecodeWork, DeviceWork, block_starts
from penstock.kernels.spans import AttentionWork, WrittenPlaces
from penstock.layers.batch import ForwardBatch

# Rows of a graph. Beyond the last, a pass is launched as it is.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_WARM_UPS = 2

Forward = Callable[[ForwardBatch, CacheTensors], Tensor]


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: "_Inputs"
    logits: Tensor  # [rows, vocab]


class _Inputs:
    """Of so many rows: token, position, place, number of tokens seen, and the table of blocks."""

    COLUMNS = 4

    def __init__(self, num_rows: int, num_blocks: int, device: torch.device) -> None:
        width = self.COLUMNS + num_blocks
        self._staged = torch.zeros(num_rows, width, dtype=torch.int64).pin_memory()
        self._array: NDArray[np.int64] = self._staged.numpy()
        self._on_device = torch.zeros(num_rows, width, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event()
        self.fill([])

    def fill(self, rows: list[tuple[int, int, int, NDArray[np.int64]]]) -> None:
        """Token, position, place and blocks of the first rows; the others see nothing and go nowhere."""
        self._copied.synchronize()  # the last copy may still be read
        array = self._array
        array[:, :2] = 0
        array[:, 2] = -1
        array[:, 3] = 0
        for index, (token, position, place, starts) in enumerate(rows):
            array[index, : self.COLUMNS] = token, position, place, position + 1
            array[index, self.COLUMNS : self.COLUMNS + len(starts)] = starts
        self._on_device.copy_(self._staged, non_blocking=True)
        self._copied.record()

    def batch(self, end_position: int) -> ForwardBatch:
        """The pass that these are the inputs of, with nothing in it that a host would have to know."""
        num_rows, device = len(self._array), self._on_device.device
        columns = self._on_device
        rows = torch.arange(num_rows, device=device)
        work, places = AttentionWork(()), WrittenPlaces(())
        decodes = DecodeWork(rows, columns[:, 3].contiguous(), columns[:, self.COLUMNS :])
        work.__dict__["_on_device"] = DeviceWork((), decodes)
        work.__dict__["end"] = num_rows
        places.__dict__["_on_device"] = columns[:, 2].contiguous()
        places.__dict__["num_tokens"] = num_rows
        return ForwardBatch(
            token_ids=columns[:, 0],
            positions=columns[:, 1],
            end_position=end_position,
            num_tokens=num_rows,
            places=places,
            all_layers=work,
            last_layer=work,
            logit_rows=rows,
            num_logits=num_rows,
            is_canonical=False,
        )


class DecodeGraphs:
    """Graphs of one model over one cache."""

    def __init__(self, forward: Forward, caches: CacheTensors, end_position: int) -> None:
        self._forward = forward
        self._caches = caches
        self._end_position = end_position
        self._num_blocks = min(caches.kv.num_blocks, -(-end_position // BLOCK_TOKENS))
        self._graphs: dict[int, _Graph] = {}

    def run(self, batch: ForwardBatch, token_ids: list[int]) -> Tensor | None:
        """Logits of decodes alone; None where there are too many for a graph."""
        spans = batch.all_layers.spans
        size = next((size for size in BUCKETS if len(spans) <= size), None)
        if size is None:
            return None
        found = self._graphs.get(size)
        if found is None:
            found = self._graphs[size] = self._capture(size)
        places = [place.start + i for place in batch.places.ranges for i in range(len(place))]
        found.inputs.fill(
            [
                (token, span.position, place, block_starts(span.places))
                for token, span, place in zip(token_ids, spans, places, strict=True)
            ]
        )
        found.graph.replay()
        return found.logits[: len(spans)]

    def _capture(self, size: int) -> _Graph:
        device = self._caches.kv.device
        inputs = _Inputs(size, self._num_blocks, device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._forward(inputs.batch(self._end_position), self._caches)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._forward(inputs.batch(self._end_position), self._caches)
        return _Graph(graph, inputs, logits)
