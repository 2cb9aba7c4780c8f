"""What the kernels of a GPU are told of a pass: tables of places, copied to the device once for all layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.cache import BLOCK_TOKENS, TokenRange
from penstock.cache.kv import KV
from penstock.kernels.cuda.inputs import keep, made_once
from penstock.kernels.device import device_kind
from penstock.kernels.spans import AttendedSpan, AttentionWork, Places, WrittenPlaces, part_of
from penstock.plan.grids import GPU_TILE
from penstock.plan.request import Span
from penstock.plan.tiles import cut_into_tiles


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
    past: TokenRange | None
    past_blocks: Tensor | None

    def read_past(self, kv: KV) -> KV | None:
        """None where there is none."""
        if self.past_blocks is not None:
            return kv.read_blocks(self.past_blocks)
        return kv.read([self.past]) if self.past is not None else None


@dataclass(frozen=True)
class DecodeWork:
    """Rows that each see all of their sequence up to themselves."""

    rows: Tensor  # [n]
    lengths: Tensor  # [n]
    tables: Tensor  # [n, blocks]
    most_blocks: int  # of a row


@dataclass(frozen=True)
class DeviceWork:
    chunks: tuple[ChunkWork, ...]
    decodes: DecodeWork | None


def device_work(work: AttentionWork, device: torch.device) -> DeviceWork:
    """The work as a device's kernels take it, made once."""
    return made_once(work, lambda: _prepare(work, device))


def device_places(places: WrittenPlaces, device: torch.device) -> Tensor:
    """Where each row goes [num_tokens], made once."""
    return made_once(places, lambda: device_kind(device).copied(row_places(places)))


def row_places(places: WrittenPlaces) -> NDArray[np.int64]:
    """Where each row goes [num_tokens]."""
    if places.num_tokens == len(places.ranges):
        return np.array([place.start for place in places.ranges], dtype=np.int64)
    rows = [np.arange(place.start, place.end, dtype=np.int64) for place in places.ranges]
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)


def static_places(places: Tensor) -> WrittenPlaces:
    """For a graph: where rows go, below 0 for nowhere, as the device's tensor [rows] says at the time."""
    made = WrittenPlaces(())
    keep(made, places)
    vars(made)["num_tokens"] = len(places)
    return made


def static_decodes(rows: Tensor, lengths: Tensor, tables: Tensor, most_blocks: int) -> AttentionWork:
    """For a graph: decodes that see so many tokens, in such blocks, as the device's tensors say at the time; no row
    has more than `most_blocks`."""
    made = AttentionWork(())
    work = DecodeWork(rows, lengths, tables, most_blocks)
    keep(made, DeviceWork((), work))
    vars(made)["end"] = len(rows)
    return made


def _prepare(work: AttentionWork, device: torch.device) -> DeviceWork:
    chunks: list[ChunkWork] = []
    decodes: list[tuple[int, int, NDArray[np.int64]]] = []
    for span in work.spans:
        starts = block_starts(span.places)
        if span.is_prompt:
            chunks.append(_chunk(span, starts, device))
        else:
            decodes += [
                (row, span.position + row - span.start + 1, starts) for row in range(span.start, span.end)
            ]
    return DeviceWork(tuple(chunks), _decodes(decodes, device) if decodes else None)


def _chunk(span: AttendedSpan, starts: NDArray[np.int64], device: torch.device) -> ChunkWork:
    table = device_kind(device).copied(starts)
    tiles: list[TileWork] = []
    for piece in cut_into_tiles(Span(span.position, span.num_tokens), span.tile_size or GPU_TILE):
        own = starts[piece.tile_start // BLOCK_TOKENS : -(-piece.end // BLOCK_TOKENS)]
        shift = span.start - span.position
        tiles.append(
            TileWork(
                slice(piece.start + shift, piece.end + shift),
                piece.tile_start,
                piece.start,
                piece.end,
                table[piece.tile_start // BLOCK_TOKENS :],
                bool(np.all(np.diff(own) == BLOCK_TOKENS)),
            )
        )
    num_before = tiles[-1].tile_start
    past = part_of(span.places, 0, num_before)
    if len(past) <= 1:
        return ChunkWork(tuple(tiles), past[0] if past else None, None)
    return ChunkWork(tuple(tiles), None, table[: -(-num_before // BLOCK_TOKENS)] // BLOCK_TOKENS)


def _decodes(decodes: Sequence[tuple[int, int, NDArray[np.int64]]], device: torch.device) -> DecodeWork:
    width = max(len(starts) for _, _, starts in decodes)
    table = np.zeros((len(decodes), 2 + width), np.int64)
    for index, (row, length, starts) in enumerate(decodes):
        table[index, :2] = row, length
        table[index, 2 : 2 + len(starts)] = starts
    whole = device_kind(device).copied(table)
    return DecodeWork(whole[:, 0].contiguous(), whole[:, 1].contiguous(), whole[:, 2:], width)


def block_starts(places: Places) -> NDArray[np.int64]:
    """Where the blocks of a sequence begin; places are whole blocks, but for the last."""
    return np.concatenate(
        [np.arange(place.start, place.end, BLOCK_TOKENS, dtype=np.int64) for place in places]
    )
