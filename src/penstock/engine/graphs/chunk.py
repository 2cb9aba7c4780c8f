"""A chunk's pass as graphs: one of all that lies between two calls of attention.

What attention does depends on how much was read before, so it is launched as it is; nothing else does.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.cache import BLOCK_TOKENS
from penstock.cache.tensors import CacheTensors
from penstock.engine.graphs.recording import Recorder, borrowed
from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.cuda.work import (
    DeviceAttention,
    device_attention,
    row_places,
    static_places,
    static_span_states,
)
from penstock.kernels.device import device_kind
from penstock.kernels.spans import AttentionWork, GroupWork, StateWork
from penstock.layers.attention import Attention
from penstock.layers.forward_batch import NO_OVERLAP, ForwardBatch, ForwardPass, Overlap
from penstock.layers.rotary import RotaryTables, at_positions
from penstock.models.decoder import Decoder


@dataclass(frozen=True)
class ChunkLayout:
    """What of a batch a graph depends on."""

    num_rows: int
    state_ends: tuple[int, ...] = ()  # the rows at which states are carried over


def chunk_layout(batch: ForwardBatch) -> ChunkLayout | None:
    """None where there can be no graphs for a batch."""
    if not all(rows.is_prompt for rows in batch.states.rows):
        return None
    return ChunkLayout(len(batch.token_ids), tuple(rows.end for rows in batch.states.rows))


@dataclass(frozen=True)
class _Due:
    """A layer that has taken its input in: attention is next, or the model's end."""

    index: int
    x: Tensor  # [rows, hidden]
    rows: tuple[Tensor, ...]

    def borrowed(self) -> "_Due":
        return _Due(self.index, borrowed(self.x), tuple(map(borrowed, self.rows)))


@dataclass(frozen=True)
class _Piece:
    graph: torch.cuda.CUDAGraph
    due: _Due


class ChunkGraphs:
    """The pieces of a pass over so many rows."""

    def __init__(self, model: Decoder, caches: CacheTensors, layout: ChunkLayout, recorder: Recorder) -> None:
        assert isinstance(model.kernels, CudaKernels)
        self._num_rows = layout.num_rows
        config, device = model.config, model.device
        # Tokens, positions, places in each K/V group; slots that states are read from, and written to.
        self._sizes = [self._num_rows] * (2 + len(caches.kv_groups)) + [len(layout.state_ends)] * 2
        self._inputs = torch.full((sum(self._sizes),), -1, dtype=torch.int64, device=device)
        self._inputs[: 2 * self._num_rows] = 0
        shape = (self._num_rows, config.num_heads, config.head_dim)
        self._attended = torch.zeros(shape, dtype=model.dtype, device=device)
        # Graphs read these tables: they are kept even when longer ones are made.
        self._tables = model.rotary_tables(min(config.max_position, caches.kv.num_blocks * BLOCK_TOKENS))
        self._batch = self._static_batch(layout)
        self._pieces = _Recording(
            model, caches, self._batch, self._inputs, self._tables, self._attended
        ).pieces(recorder)

    def run(
        self, batch: ForwardBatch, model: Decoder, caches: CacheTensors, overlap: Overlap = NO_OVERLAP
    ) -> Tensor | None:
        kernels = model.kernels
        assert isinstance(kernels, CudaKernels)
        self._fill(batch)
        if overlap.late is not None:
            overlap.late.put_into(self._inputs)
        if batch.num_tokens < self._num_rows:
            self._attended[batch.num_tokens :] = 0
        attention: dict[int, DeviceAttention] = {}  # by K/V group
        is_nearly_over = False
        for piece in self._pieces[:-1]:
            if overlap.nearly is not None and not is_nearly_over and piece.due.index >= model.first_of_last:
                is_nearly_over = True
                overlap.nearly()
            piece.graph.replay()
            mixer = model.layers[piece.due.index].mixer
            assert isinstance(mixer, Attention)
            if (group := mixer.group) not in attention:  # while the device runs the first pieces
                attention[group] = device_attention(batch.group(group).all_layers, model.device)
            kv = caches.layer(group, mixer.index)
            kernels.attend_into(piece.due.rows[0], attention[group], kv, mixer.scoring, self._attended)
        self._pieces[-1].graph.replay()
        due = self._pieces[-1].due
        (logit_rows,) = device_kind(model.device).all_copied((batch.logit_rows,))
        # The last layer has read its input in: positions are not asked for any more.
        step = ForwardPass(batch, caches, kernels, self._tables)
        return model.finish(due.x, due.rows, step, logit_rows)

    def _fill(self, batch: ForwardBatch) -> None:
        nowhere = np.full(self._num_rows - batch.num_tokens, -1)
        states = batch.states.rows
        slots = [rows.read for rows in states] + [rows.write for rows in states]
        places = [part for group in batch.groups for part in (row_places(group.places), nowhere)]
        numbers = (batch.token_ids, batch.positions, *places, np.array(slots, np.int64))
        device_kind(self._inputs.device).fill(self._inputs, np.concatenate(numbers))

    def _static_batch(self, layout: ChunkLayout) -> ForwardBatch:
        """What the layers are told while they are recorded."""
        _, _, *places, read, write = torch.split(self._inputs, self._sizes)
        states = static_span_states(layout.state_ends, read, write) if layout.state_ends else StateWork()
        nothing = AttentionWork(())
        empty = np.zeros(0, dtype=np.int64)
        return ForwardBatch(
            token_ids=empty,
            positions=empty,
            end_position=0,
            num_tokens=self._num_rows,
            places=static_places(places[0]),
            all_layers=nothing,
            last_layer=nothing,
            windows=tuple(GroupWork(static_places(own), nothing, nothing) for own in places[1:]),
            logit_rows=empty,
            num_logits=0,
            is_canonical=True,
            states=states,
        )


@dataclass
class _Recording:
    """What is recorded: the layers' own code, on the graphs' tensors."""

    model: Decoder
    caches: CacheTensors
    batch: ForwardBatch
    inputs: Tensor
    tables: RotaryTables
    attended: Tensor
    step: ForwardPass | None = None

    def pieces(self, recorder: Recorder) -> list[_Piece]:
        self._run_once()
        graph, due = recorder.record(self._begin)
        pieces, pending = [_Piece(graph, due.borrowed())], [due]
        del due
        while pending[0].index < len(self.model.layers) - 1:
            graph, due = recorder.record(partial(self._go_on, pending))
            pieces.append(_Piece(graph, due.borrowed()))
            pending.append(due)
            del due
        return pieces

    def _run_once(self) -> None:
        """All that is to be recorded, on rows that go nowhere: libraries then have all that they need."""
        pending = [self._begin()]
        while pending[0].index < len(self.model.layers) - 1:
            pending.append(self._go_on(pending))

    def _begin(self) -> _Due:
        num_rows = self.batch.num_tokens
        positions = self.inputs[num_rows : 2 * num_rows]
        tables = at_positions(self.tables, positions)
        self.step = ForwardPass(self.batch, self.caches, self.model.kernels, tables)
        x = self.model.embed(self.inputs[:num_rows])
        return self._until_due(0, x, self.model.first_norm(x))

    def _go_on(self, pending: list[_Due]) -> _Due:
        """From what a layer attended to up to the next such layer. What was pending is taken away: it does not live
        longer than it must."""
        due = pending.pop()
        index, layer = due.index, self.model.layers[due.index]
        assert isinstance(layer.mixer, Attention)
        assert self.step is not None
        mixed = layer.mixer.project_out(self.attended.flatten(1), due.rows, self.step)
        x, normed = self.model.add_mixed(index, due.x, mixed)
        del due, mixed
        return self._until_due(index + 1, *self.model.run_mlp(index, x, normed, self.step, len(normed)))

    def _until_due(self, index: int, x: Tensor, normed: Tensor) -> _Due:
        model, step = self.model, self.step
        assert step is not None
        while True:
            mixer = model.layers[index].mixer
            rows = mixer.read_in(normed, step)
            if isinstance(mixer, Attention) or index == len(model.layers) - 1:
                return _Due(index, x, rows)
            mixed = mixer.mix(rows, step)
            del rows
            x, normed = model.add_mixed(index, x, mixed)
            del mixed
            x, normed = model.run_mlp(index, x, normed, step, len(normed))
            index += 1
