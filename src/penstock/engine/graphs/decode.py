"""Decodes alone as one graph, from tokens to logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.cache import BLOCK_TOKENS, SequenceBlocks
from penstock.cache.tensors import CacheTensors
from penstock.engine.graphs.recording import Recorder, borrowed
from penstock.kernels.cuda.work import (
    block_starts,
    row_places,
    static_decode_states,
    static_decodes,
    static_places,
)
from penstock.kernels.device import device_kind
from penstock.kernels.spans import GroupWork
from penstock.layers.forward_batch import NO_OVERLAP, ForwardBatch, LateTokens, Overlap
from penstock.models.decoder import Decoder

_NOTHING_STAGED: tuple[ForwardBatch | None, NDArray[np.int64]] = (None, np.zeros(0, np.int64))
# What a graph is told of each row: token, position, tokens seen, slots read and written; then its place and its
# blocks in each K/V group.
_COLUMNS = 5
_Array = TypeVar("_Array", Tensor, NDArray[np.int64])


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
        self._staged = _NOTHING_STAGED
        self._end = min(model.config.max_position, caches.kv.num_blocks * BLOCK_TOKENS)
        # The graph reads these tables: they are kept even when longer ones are made.
        self._tables = model.rotary_tables(self._end)
        num_groups = len(caches.kv_groups)
        self._layout = DecodeLayout(num_rows, num_groups, num_blocks)
        self._inputs = torch.zeros(self._layout.size, dtype=torch.int64, device=model.device)
        columns, tables = self._layout.parts(self._inputs)
        tokens, positions, lengths, read, write, *places = columns
        columns[3:] = -1
        rows = torch.arange(num_rows, device=model.device)
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
        # They are copied before another graph runs, which may have its own there.
        self._logits = borrowed(logits)

    def prepare(self, batch: ForwardBatch) -> None:
        """Do all for a pass that does not take its tokens."""
        self._staged = (batch, self._layout.of(batch))

    def run(
        self, batch: ForwardBatch, model: Decoder, caches: CacheTensors, overlap: Overlap = NO_OVERLAP
    ) -> Tensor:
        told = self._told(batch)
        told[: batch.num_tokens] = batch.token_ids[: batch.num_tokens]
        return self.launch(told, batch.num_tokens, overlap.late)

    def _told(self, batch: ForwardBatch) -> NDArray[np.int64]:
        if self._staged[0] is not batch:
            self.prepare(batch)
        return self._staged[1]

    def launch(self, staged: NDArray[np.int64], num_tokens: int, late: LateTokens | None = None) -> Tensor:
        """With all that it is told, but for tokens that are `late`."""
        device_kind(self._inputs.device).fill(self._inputs, staged)
        if late is not None:
            late.put_into(self._inputs)
        self._graph.replay()
        return self._logits[:num_tokens].clone()  # the next pass writes over them

    def follow(
        self, batch: ForwardBatch, blocks: Sequence[tuple[SequenceBlocks, ...]]
    ) -> "FollowingDecodes | None":
        """A model with recurrent state has slots of its own for each pass."""
        if batch.states.rows:
            return None
        told, self._staged = self._told(batch), _NOTHING_STAGED
        return FollowingDecodes(self._layout, told, blocks, self._end, self.launch)


@dataclass(frozen=True)
class DecodeLayout:
    """What a graph is told of so many rows, as one array: columns, then the blocks of each row in each K/V group."""

    num_rows: int
    num_groups: int
    num_blocks: int

    @property
    def num_columns(self) -> int:
        return _COLUMNS + self.num_groups

    @property
    def size(self) -> int:
        return self.num_rows * (self.num_columns + self.num_groups * self.num_blocks)

    def parts(self, told: _Array) -> tuple[_Array, _Array]:
        """Columns [columns, rows] and tables [groups, rows, blocks]."""
        end = self.num_columns * self.num_rows
        columns = told[:end].reshape(self.num_columns, self.num_rows)
        return columns, told[end:].reshape(self.num_groups, self.num_rows, self.num_blocks)

    def of(self, batch: ForwardBatch) -> NDArray[np.int64]:
        """All of a batch, but for tokens."""
        num_rows = batch.num_tokens
        told = np.zeros(self.size, dtype=np.int64)
        columns, tables = self.parts(told)
        _, positions, lengths, *slots = columns[:_COLUMNS]
        positions[:num_rows] = batch.positions[:num_rows]
        lengths[:num_rows] = positions[:num_rows] + 1
        states = batch.states.rows
        for slot, given in zip(
            slots, ([rows.read for rows in states], [rows.write for rows in states]), strict=True
        ):
            slot[: len(given)], slot[len(given) :] = given, -1
        for group, places, table in zip(batch.groups, columns[_COLUMNS:], tables, strict=True):
            places[:num_rows], places[num_rows:] = row_places(group.places), -1
            for index, span in enumerate(group.all_layers.spans):
                starts = block_starts(span.places, span.first_token)
                table[index, : len(starts)] = starts
        return told


class FollowingDecodes:
    """What a graph is told of pass after pass over the same rows: only where a block begins is it more than one token
    further."""

    def __init__(
        self,
        layout: DecodeLayout,
        told: NDArray[np.int64],
        blocks: Sequence[tuple[SequenceBlocks, ...]],
        end: int,
        launch: Callable[[NDArray[np.int64], int, LateTokens | None], Tensor],
    ) -> None:
        """`told` is of the pass before the first of them. No token's position reaches `end`. `launch` starts what is
        told so, with tokens."""
        self._launch = launch
        self.told = told
        self._blocks = blocks
        self._most = min(end, layout.num_blocks * BLOCK_TOKENS)
        columns, self._tables = layout.parts(told)
        rows = columns[:, : len(blocks)]
        self._positions, self._lengths, self._places = rows[1], rows[2], rows[_COLUMNS:]
        self._longest = int(self._lengths.max())

    def advance(self) -> bool:
        if self._longest >= self._most:
            return False
        self._longest += 1
        for numbers in (self._positions, self._lengths, self._places):
            numbers += 1
        for row in np.flatnonzero(self._positions % BLOCK_TOKENS == 0).tolist():
            position = int(self._positions[row])
            for group, own in enumerate(self._blocks[row]):
                first_token = own.num_gone * BLOCK_TOKENS
                starts = block_starts(own.locate(first_token, position + 1), first_token)
                self._tables[group, row, : len(starts)] = starts
                self._places[group, row] = starts[-1]
        return True

    @torch.inference_mode()
    def launch(self, tokens: Sequence[int] | LateTokens) -> Tensor | None:
        late = tokens if isinstance(tokens, LateTokens) else None
        if not isinstance(tokens, LateTokens):
            self.told[: len(tokens)] = tokens
        try:
            return self._launch(self.told, len(self._blocks), late)
        except Exception:  # if it is more than a moment's, the step itself meets it
            return None
