"""A step's batch as bytes: what the driver tells every stage of it.

The form follows from the batch's types: its numbers, 64 bits each, field by field; what has a length begins with it.
Nothing in it says of what type it is, so nothing but a batch can come of it; and what comes of it is checked.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from penstock.cache import TokenRange
from penstock.cache.states import EMPTY
from penstock.errors import PenstockError
from penstock.kernels.spans import AttendedSpan, GroupWork, StateRows
from penstock.layers.forward_batch import ForwardBatch

_VERSION = 1
_NUMBER = np.dtype("<i8")
Group = TypeVar("Group", bound=GroupWork)


class HeaderError(PenstockError, ValueError):
    """Bytes that are no step, or one that cannot be of this model and cache."""


@dataclass(frozen=True)
class HeaderLimits:
    """What the numbers of a header must lie within."""

    vocab_size: int
    max_position: int
    num_places: tuple[int, ...]  # of each K/V group of the cache
    num_slots: int


def write_header(batch: ForwardBatch) -> bytes:
    numbers = array("q", [_VERSION])
    _write(numbers, ForwardBatch, batch)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def read_header(data: bytes | bytearray | memoryview, limits: HeaderLimits) -> ForwardBatch:
    """The batch, as it was written. HeaderError where something about it cannot be."""
    if len(data) % _NUMBER.itemsize:
        raise HeaderError(f"a header of {len(data)} bytes")
    reader = _Reader(np.frombuffer(bytes(data), dtype=_NUMBER).astype(np.int64), limits)
    if (version := reader.number()) != _VERSION:
        raise HeaderError(f"a header of version {version}, not {_VERSION}")
    batch: ForwardBatch = reader.read(ForwardBatch)
    reader.check_end()
    _check(batch, limits)
    return replace(_joined(batch), windows=tuple(map(_joined, batch.windows)))


def _joined(work: Group) -> Group:
    """Where the last layer has the work of all others, it is the same object."""
    return replace(work, last_layer=work.all_layers) if work.last_layer == work.all_layers else work


def _is_array(kind: Any) -> bool:
    return kind == NDArray[np.int64] or get_origin(kind) is np.ndarray


@cache
def _fields_of(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


def _write(numbers: "array[int]", kind: Any, value: Any) -> None:
    if kind in (int, bool):
        numbers.append(value)
    elif is_dataclass(kind):
        for name, inner in _fields_of(kind):  # type: ignore[arg-type]
            _write(numbers, inner, getattr(value, name))
    elif _is_array(kind):
        numbers.append(len(value))
        numbers.frombytes(np.ascontiguousarray(value, dtype=np.int64).tobytes())
    else:
        numbers.append(len(value))
        for item in value:
            _write(numbers, get_args(kind)[0], item)


class _Reader:
    """Takes values from the front."""

    def __init__(self, numbers: NDArray[np.int64], limits: HeaderLimits) -> None:
        self._numbers = numbers
        self._limits = limits
        self._start = 0

    def number(self) -> int:
        return int(self._take(1)[0])

    def read(self, kind: Any) -> Any:
        if kind is int:
            return self.number()
        if kind is bool:
            if (number := self.number()) not in (0, 1):
                raise HeaderError(f"a header with {number} in place of a truth")
            return bool(number)
        if is_dataclass(kind):
            return self._made(kind, {name: self.read(inner) for name, inner in _fields_of(kind)})  # type: ignore[arg-type]
        if _is_array(kind):
            return self._take(self.number())
        assert get_origin(kind) in (tuple, Sequence), kind
        item, count = get_args(kind)[0], self.number()
        if not 0 <= count <= len(self._numbers) - self._start:  # each has a number at least
            raise HeaderError(f"a header of {len(self._numbers)} numbers with a list of {count}")
        return tuple(self.read(item) for _ in range(count))

    def check_end(self) -> None:
        if self._start != len(self._numbers):
            raise HeaderError(f"a header with {len(self._numbers) - self._start} numbers too many")

    def _take(self, count: int) -> NDArray[np.int64]:
        if not 0 <= count <= len(self._numbers) - self._start:
            raise HeaderError(f"a header of {len(self._numbers)} numbers with {count} more to come")
        self._start += count
        return self._numbers[self._start - count : self._start]

    def _made(self, kind: Any, values: dict[str, Any]) -> Any:
        value = kind(**values)
        limits = self._limits
        match value:
            case TokenRange(start=start, end=end):
                is_right = 0 <= start <= end
            case AttendedSpan():
                num_seen = value.num_tokens - value.first_token
                is_right = (
                    0 <= value.start < value.end
                    and 0 <= value.first_token <= value.position < value.num_tokens <= limits.max_position
                    and min(value.tile_size, value.origin) >= 0
                    and sum(map(len, value.places)) == num_seen
                )
            case StateRows(start=start, end=end, read=read, write=write):
                has_slots = EMPTY <= read < limits.num_slots and 0 <= write < limits.num_slots
                is_right = 0 <= start < end and has_slots and read != write
            case _:
                return value
        if not is_right:
            raise HeaderError(f"a header with {value}, which cannot be")
        return value


def _check(batch: ForwardBatch, limits: HeaderLimits) -> None:
    """Rows, of which all parts speak."""
    num_rows = len(batch.token_ids)
    end = min(batch.end_position, limits.max_position)
    is_right = (
        0 < batch.num_tokens <= num_rows == len(batch.positions)
        and 0 <= batch.num_logits <= len(batch.logit_rows)
        and _lie_within(batch.token_ids, limits.vocab_size)
        and _lie_within(batch.positions, end)
        and len(batch.long_rows) in (0, num_rows)
        and _lie_within(batch.long_rows, 2)
        and _lie_within(batch.logit_rows, num_rows)
        and _follow(batch.states.rows, batch.num_tokens)
        and len(batch.groups) == len(limits.num_places)
        and all(map(partial(_is_right, batch), batch.groups, limits.num_places))
    )
    if not is_right:
        raise HeaderError(f"a header whose {num_rows} rows do not agree")


def _is_right(batch: ForwardBatch, work: GroupWork, num_places: int) -> bool:
    """Whether the work of a K/V group is of the batch's rows, and of places that the group has."""
    spans = (*work.all_layers.spans, *work.last_layer.spans)
    places = chain(work.places.ranges, *(span.places for span in spans))
    return (
        work.places.num_tokens == batch.num_tokens
        and _follow(work.all_layers.spans, batch.num_tokens)
        and _follow(work.last_layer.spans, batch.num_logits)
        and all(place.end <= num_places for place in places)
    )


def _lie_within(numbers: NDArray[np.int64], end: int) -> bool:
    return not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < end)


def _follow(parts: Sequence[AttendedSpan | StateRows], num_rows: int) -> bool:
    """Whether they are of rows [0, num_rows), none before the one before it."""
    ends = [0, *(part.end for part in parts)]
    return (
        all(part.start >= before for part, before in zip(parts, ends, strict=False)) and ends[-1] <= num_rows
    )
