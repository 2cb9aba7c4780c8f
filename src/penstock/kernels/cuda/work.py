"""What the kernels of a GPU are told of a pass: tables of places and slots, copied to the device once for all layers.

A slot or place below 0 is none: what is read from it is zero, and nothing is written to it. A graph that is to be
replayed with others is captured over `static_...`, whose tensors are filled anew before each replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.cache import TokenRange
from penstock.cache.tensors import KV
from penstock.kernels.device import device_kind
from penstock.kernels.spans import (
    AttendedSpan,
    AttentionWork,
    Places,
    StateWork,
    WrittenPlaces,
    part_of,
)
from penstock.plan.grids import BLOCK_TOKENS, GPU_TILE


@dataclass(frozen=True)
class TileWork:
    """Rows of queries that stand in one tile of their sequence, at positions [first, end)."""

    rows: slice
    tile_start: int
    first: int
    end: int
    table: Tensor  # where the tile's blocks begin
    is_contiguous: bool  # whether they lie one behind the other


@dataclass(frozen=True)
class ChunkWork:
    """The tiles of a chunk, and all that lies before the last of them: in one place, else in blocks."""

    tiles: tuple[TileWork, ...]
    table: Tensor  # where all blocks of the sequence begin; those that are gone, anywhere
    is_contiguous: bool  # whether all that are there lie one behind the other
    past: TokenRange | None
    past_blocks: Tensor | None

    def read_past(self, kv: KV) -> KV | None:
        """None where there is none."""
        if self.past_blocks is not None:
            return kv.read_blocks(self.past_blocks)
        return kv.read([self.past]) if self.past is not None else None


@dataclass(frozen=True)
class DecodeWork:
    """Rows that each see all of their sequence up to themselves, or their layer's window of it."""

    rows: Tensor  # [n]
    lengths: Tensor  # [n]
    tables: Tensor  # [n, blocks]
    most_blocks: int  # of a row


@dataclass(frozen=True)
class SpanStates:
    """Rows [start, end) of a pass, successive tokens of one sequence."""

    start: int
    end: int
    read: Tensor  # [1], int64
    write: Tensor  # [1], int64


@dataclass(frozen=True)
class DecodeStates:
    """Rows with a sequence each, of which they are one token."""

    rows: Tensor  # [n], int64
    read: Tensor  # [n], int64
    write: Tensor  # [n], int64


@dataclass(frozen=True)
class DevicePlaces(WrittenPlaces):
    rows: Tensor  # where each row goes [num_tokens]
    num_tokens: int = 0


@dataclass(frozen=True)
class DeviceAttention(AttentionWork):
    chunks: tuple[ChunkWork, ...]
    decodes: DecodeWork | None
    end: int = 0


@dataclass(frozen=True)
class DeviceStates(StateWork):
    spans: tuple[SpanStates, ...] = ()
    decodes: DecodeStates | None = None
    end: int = 0


def device_places(places: WrittenPlaces, device: torch.device) -> DevicePlaces:
    if isinstance(places, DevicePlaces):
        return places
    return DevicePlaces(places.ranges, device_kind(device).copied(row_places(places)), places.num_tokens)


def device_attention(work: AttentionWork, device: torch.device) -> DeviceAttention:
    if isinstance(work, DeviceAttention):
        return work
    chunks: list[ChunkWork] = []
    decodes: list[tuple[int, int, NDArray[np.int64]]] = []
    for span in work.spans:
        starts = block_starts(span.places, span.first_token)
        if span.is_prompt:
            chunks.append(_chunk(span, starts, device))
        else:
            decodes += [
                (row, span.position + row - span.start + 1, starts) for row in range(span.start, span.end)
            ]
    return DeviceAttention(
        work.spans, tuple(chunks), _decodes(decodes, device) if decodes else None, work.end
    )


def device_states(work: StateWork, device: torch.device) -> DeviceStates:
    if isinstance(work, DeviceStates):
        return work
    if not work.rows:
        return DeviceStates()
    # Only a single row is a decode to the kernels: several of one sequence follow on each other.
    decodes = [rows for rows in work.rows if not rows.is_prompt and rows.end - rows.start == 1]
    others = [rows for rows in work.rows if rows.is_prompt or rows.end - rows.start > 1]
    numbers = [(rows.start, rows.read, rows.write) for rows in (*decodes, *others)]
    table = device_kind(device).copied(np.array(numbers, dtype=np.int64).reshape(-1, 3).T)
    spans = tuple(
        SpanStates(rows.start, rows.end, table[1, at : at + 1], table[2, at : at + 1])
        for at, rows in enumerate(others, len(decodes))
    )
    rows, read, write = table[:, : len(decodes)]
    return DeviceStates(work.rows, spans, DecodeStates(rows, read, write) if decodes else None, work.end)


def row_places(places: WrittenPlaces) -> NDArray[np.int64]:
    """Where each row goes [num_tokens]."""
    if places.num_tokens == len(places.ranges):
        return np.array([place.start for place in places.ranges], dtype=np.int64)
    rows = [np.arange(place.start, place.end, dtype=np.int64) for place in places.ranges]
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)


def static_places(places: Tensor) -> DevicePlaces:
    """For a graph: where rows go, as the device's tensor [rows] says at the time."""
    return DevicePlaces((), places, len(places))


def static_decodes(rows: Tensor, lengths: Tensor, tables: Tensor, most_blocks: int) -> DeviceAttention:
    """For a graph: decodes that see so many tokens, in such blocks, as the device's tensors say at the time; no row
    has more than `most_blocks`."""
    return DeviceAttention((), (), DecodeWork(rows, lengths, tables, most_blocks), len(rows))


def static_decode_states(read: Tensor, write: Tensor) -> DeviceStates:
    """For a graph whose rows are a decode each, with its slots in `read` and `write` [rows], int64 on the device."""
    rows = torch.arange(len(read), device=read.device)
    return DeviceStates((), (), DecodeStates(rows, read, write), len(read))


def static_span_states(ends: Sequence[int], read: Tensor, write: Tensor) -> DeviceStates:
    """For a graph of spans that end at these rows, one behind the other, with their slots in `read` and `write`
    [spans], int64 on the device. Where a span goes on with the state of the one before, it reads what that wrote."""
    spans = tuple(
        SpanStates(start, end, read[index : index + 1], write[index : index + 1])
        for index, (start, end) in enumerate(pairwise((0, *ends)))
    )
    return DeviceStates((), spans, None, ends[-1])


def _chunk(span: AttendedSpan, starts: NDArray[np.int64], device: torch.device) -> ChunkWork:
    table = device_kind(device).copied(starts)
    tiles: list[TileWork] = []
    for piece in span.tiles(span.tile_size or GPU_TILE):
        own = starts[piece.tile_start // BLOCK_TOKENS : -(-piece.end // BLOCK_TOKENS)]
        tiles.append(
            TileWork(
                piece.rows,
                piece.tile_start,
                piece.start,
                piece.end,
                table[piece.tile_start // BLOCK_TOKENS :],
                bool(np.all(np.diff(own) == BLOCK_TOKENS)),
            )
        )
    num_before = tiles[-1].tile_start
    past = [] if span.first_token else part_of(span.places, 0, num_before)
    whole = tuple(tiles), table, bool(np.all(np.diff(starts) == BLOCK_TOKENS))
    if len(past) <= 1:
        return ChunkWork(*whole, past[0] if past else None, None)
    return ChunkWork(*whole, None, table[: -(-num_before // BLOCK_TOKENS)] // BLOCK_TOKENS)


def _decodes(decodes: Sequence[tuple[int, int, NDArray[np.int64]]], device: torch.device) -> DecodeWork:
    width = max(len(starts) for _, _, starts in decodes)
    table = np.zeros((len(decodes), 2 + width), np.int64)
    for index, (row, length, starts) in enumerate(decodes):
        table[index, :2] = row, length
        table[index, 2 : 2 + len(starts)] = starts
    whole = device_kind(device).copied(table)
    return DecodeWork(whole[:, 0].contiguous(), whole[:, 1].contiguous(), whole[:, 2:], width)


def block_starts(places: Places, first_token: int) -> NDArray[np.int64]:
    """Where the blocks of a sequence begin; places are whole blocks, but for the last. Those that are gone, which are
    not read, begin as if they lay before the others, perhaps below 0."""
    gone = places[0].start - np.arange(first_token, 0, -BLOCK_TOKENS, dtype=np.int64)
    starts = [np.arange(place.start, place.end, BLOCK_TOKENS, dtype=np.int64) for place in places]
    return np.concatenate([gone, *starts])
