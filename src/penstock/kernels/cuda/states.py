"""Which states the rows of a pass carry on, as the kernels of a GPU take it: slots in tensors, copied there once.

A slot below 0 is none: what is read from it is zero, and nothing is written to it. A graph that is to be replayed
with other slots is captured over `static_decode_states` or `static_span_states`, whose tensors are filled anew before
each replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.cuda.inputs import keep, made_once
from penstock.kernels.device import device_kind
from penstock.kernels.spans import StateWork


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
class DeviceStates:
    spans: tuple[SpanStates, ...]
    decodes: DecodeStates | None


def device_states(work: StateWork, device: torch.device) -> DeviceStates:
    """The work as a device's kernels take it, made once."""
    return made_once(work, lambda: _prepare(work, device))


def static_decode_states(read: Tensor, write: Tensor) -> StateWork:
    """Of a pass whose rows are a decode each, with its slots in `read` and `write` [rows], int64 on the device."""
    rows = torch.arange(len(read), device=read.device)
    return _known(DeviceStates((), DecodeStates(rows, read, write)), len(read))


def static_span_states(ends: Sequence[int], read: Tensor, write: Tensor) -> StateWork:
    """Of a pass of spans that end at these rows, one behind the other, with their slots in `read` and `write`
    [spans], int64 on the device. Where a span goes on with the state of the one before, it reads what that wrote."""
    spans = tuple(
        SpanStates(start, end, read[index : index + 1], write[index : index + 1])
        for index, (start, end) in enumerate(pairwise((0, *ends)))
    )
    return _known(DeviceStates(spans, None), ends[-1])


def _known(states: DeviceStates, end: int) -> StateWork:
    """Work that only the device knows the slots of."""
    work = StateWork()
    keep(work, states)
    vars(work)["end"] = end
    return work


def _prepare(work: StateWork, device: torch.device) -> DeviceStates:
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
    return DeviceStates(spans, DecodeStates(rows, read, write) if decodes else None)
