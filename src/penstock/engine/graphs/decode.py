"""Decodes alone as one graph, from tokens to logits."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.cache import BLOCK_TOKENS
from penstock.cache.tensors import CacheTensors
from penstock.engine.graphs.recording import Recorder
from penstock.kernels.cuda.work import (
    block_starts,
    row_places,
    static_decode_states,
    static_decodes,
    static_places,
)
from penstock.kernels.device import device_kind
from penstock.kernels.spans import GroupWork
from penstock.layers.forward_batch import ForwardBatch
from penstock.models.decoder import Decoder

_NOTHING_STAGED: tuple[ForwardBatch | None, NDArray[np.int64]] = (None, np.zeros(0, np.int64))
# What a graph is told of each row: token, position, tokens seen, slots read and written; then its place and its
# blocks in each K/V group.
_COLUMNS = 5


def is_decode(batch: ForwardBatch) -> bool:
    """Whether all rows but padding are decodes."""
    spans = batch.all_layers.spans
    return batch.num_logits == batch.num_tokens == len(spans) and not any(span.is_prompt for span in spans)


class DecodeGraph:
    """Of so many rows, which see no more blocks than so many; rows that a pass has not go nowhere and see nothing."""

    def __init__(
        self,
        model: Decoder,
        caches: CacheTensors,
        num_rows: int,
        num_blocks: int,
        is_canonical: bool,
        recorder: Recorder,
    ) -> None:
        self._num_rows = num_rows
        self._staged = _NOTHING_STAGED
        self._end = min(model.config.max_position, caches.kv.num_blocks * BLOCK_TOKENS)
        # The graph reads these tables: they are kept even when longer ones are made.
        self._tables = model.rotary_tables(self._end)
        num_groups = len(caches.kv_groups)
        self._num_columns = _COLUMNS + num_groups
        size = num_rows * (self._num_columns + num_groups * num_blocks)
        self._inputs = torch.zeros(size, dtype=torch.int64, device=model.device)
        columns = self._inputs[: self._num_columns * num_rows].view(self._num_columns, num_rows)
        tokens, positions, lengths, read, write, *places = columns
        columns[3:] = -1
        rows = torch.arange(num_rows, device=model.device)
        tables = self._inputs[self._num_columns * num_rows :].view(num_groups, num_rows, -1)
        works = [static_decodes(rows, lengths, table, num_blocks) for table in tables]
        groups = [
            GroupWork(static_places(place), work, work) for place, work in zip(places, works, strict=True)
        ]
        empty = np.zeros(0, dtype=np.int64)
        # Kept, since the graph reads what it has on the device.
        self._batch = batch = ForwardBatch(
            token_ids=empty,
            positions=empty,
            end_position=self._end,
            num_tokens=num_rows,
            places=groups[0].places,
            all_layers=works[0],
            last_layer=works[0],
            windows=tuple(groups[1:]),
            logit_rows=empty,
            num_logits=num_rows,
            is_canonical=is_canonical,
            states=static_decode_states(read, write),
        )

        def launch() -> Tensor | None:
            step = model.begin_pass(batch, caches, positions)
            return model.run_layers(model.embed(tokens), step, logit_rows=None)

        launch()  # libraries then have all that they need
        self._graph, logits = recorder.record(launch)
        assert logits is not None
        self._logits = logits

    def prepare(self, batch: ForwardBatch) -> None:
        """Do all for a pass that does not take its tokens."""
        self._staged = (batch, self._stage(batch))

    def run(self, batch: ForwardBatch, model: Decoder, caches: CacheTensors) -> Tensor:
        (prepared, staged), self._staged = self._staged, _NOTHING_STAGED
        if prepared is not batch:
            staged = self._stage(batch)
        staged[: batch.num_tokens] = batch.token_ids[: batch.num_tokens]
        device_kind(self._inputs.device).fill(self._inputs, staged)
        self._graph.replay()
        return self._logits[: batch.num_tokens].clone()  # the next pass writes over them

    def _stage(self, batch: ForwardBatch) -> NDArray[np.int64]:
        """All that the graph is told, but for tokens."""
        num_rows, num_all = batch.num_tokens, self._num_rows
        staged = np.zeros(len(self._inputs), dtype=np.int64)
        columns = staged[: self._num_columns * num_all].reshape(-1, num_all)
        _, positions, lengths, *slots = columns[:_COLUMNS]
        positions[:num_rows] = batch.positions[:num_rows]
        lengths[:num_rows] = positions[:num_rows] + 1
        states = batch.states.rows
        for slot, given in zip(
            slots, ([rows.read for rows in states], [rows.write for rows in states]), strict=True
        ):
            slot[: len(given)], slot[len(given) :] = given, -1
        tables = staged[columns.size :].reshape(len(batch.groups), num_all, -1)
        for group, places, table in zip(batch.groups, columns[_COLUMNS:], tables, strict=True):
            places[:num_rows], places[num_rows:] = row_places(group.places), -1
            for index, span in enumerate(group.all_layers.spans):
                starts = block_starts(span)
                table[index, : len(starts)] = starts
        return staged
