"""A decoder that also tells the logits of prompt tokens after which nothing is sampled."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.cache import TokenRange
from penstock.cache.tensors import CacheTensors
from penstock.engine.batch import Canon
from penstock.kernels.spans import AttendedSpan, AttentionWork
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder


class WatchedDecoder(Decoder):
    """The same weights and the same pass as another decoder's, with eyes on one sequence.

    A batch that holds prompt tokens to be watched is run once more, with their logits wanted too: a step writes the
    same keys, values and states each time, so the second pass changes nothing. What the engine gets is its own pass.
    """

    def __init__(self, model: Decoder, canon: Canon, positions: Sequence[int], out: Tensor) -> None:
        """The logits after the tokens at `positions` go to the rows of `out` [len(positions), vocab]."""
        vars(self).update(vars(model))  # weights are shared, not copied
        self.rows: range | None = None  # of the next batch, those of the sequence; None: all
        self._canon = canon
        self._out = out
        self.index_of = {position: index for index, position in enumerate(positions)}

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, caches: CacheTensors, residual: Tensor | None = None
    ) -> Tensor | None:
        rows, indices = self._watched(batch)
        if rows:
            seen = super().forward(_wanting(batch, rows, self._canon), caches)
            assert seen is not None
            self._out[indices] = seen.to(self._out.device)
            if not batch.num_logits:
                return None
        return super().forward(batch, caches)

    def _watched(self, batch: ForwardBatch) -> tuple[list[int], list[int]]:
        """Rows of the batch that are prompt tokens to be watched, and where their logits go."""
        rows: list[int] = []
        indices: list[int] = []
        for span in batch.all_layers.spans:
            for row in range(span.start, span.end) if span.is_prompt else ():
                index = self.index_of.get(span.position + row - span.start)
                if index is not None and (self.rows is None or row in self.rows):
                    rows.append(row)
                    indices.append(index)
        return rows, indices


def _wanting(batch: ForwardBatch, rows: Sequence[int], canon: Canon) -> ForwardBatch:
    """The same batch, with logits wanted of these rows, ascending, in place of those that were."""
    spans: list[AttendedSpan] = []
    num_done = 0
    for span in batch.all_layers.spans:
        for run in _runs([row for row in rows if span.start <= row < span.end]):
            position, end = span.position + run.start - span.start, num_done + len(run)
            places = _first(span.places, position + len(run))
            spans.append(replace(span, start=num_done, end=end, position=position, places=places))
            num_done = end
    padding = canon.padded_rows(len(rows)) - len(rows)
    return replace(
        batch,
        logit_rows=np.array([*rows, *[0] * padding], dtype=np.int64),
        num_logits=len(rows),
        last_layer=AttentionWork(tuple(spans)),
    )


def _runs(rows: Sequence[int]) -> Iterator[range]:
    """Ascending rows as ranges without gaps."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1:
            yield range(rows[start], rows[end - 1] + 1)
            start = end


def _first(places: Sequence[TokenRange], num_tokens: int) -> list[TokenRange]:
    """The places of the first `num_tokens` tokens."""
    first: list[TokenRange] = []
    for place in places:
        if num_tokens > 0:
            first.append(TokenRange(place.start, min(place.end, place.start + num_tokens)))
            num_tokens -= len(first[-1])
    return first
