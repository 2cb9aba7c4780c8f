"""A step's batch as bytes: what the driver tells every stage of it.

The form follows from the batch's types: its numbers, 64 bits each, field by field; what has a length begins with it.
Nothing in it says of what type it is, so nothing but a batch can come of it; and what comes of it is checked.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from penstock.cache import TokenRange
from penstock.cache.states import EMPTY
from penstock.errors import PenstockError
from penstock.kernels.spans import AttendedSpan, GroupWork, StateRows
from penstock.layers.forward_batch import ForwardBatch

_VERSION = 2
_NUMBER = np.dtype("<i8")
_AS_ALL = -1  # in place of the last layer's spans: they are those of all layers


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
    numbers = [_VERSION]
    _writer(ForwardBatch)(numbers, batch)
    packed = array("q", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def read_header(data: bytes | bytearray | memoryview, limits: HeaderLimits) -> ForwardBatch:
    """The batch, as it was written. HeaderError where something about it cannot be."""
    if len(data) % _NUMBER.itemsize:
        raise HeaderError(f"a header of {len(data)} bytes")
    reader = _Reader(np.frombuffer(bytes(data), dtype=_NUMBER).astype(np.int64), limits)
    if (version := reader.number()) != _VERSION:
        raise HeaderError(f"a header of version {version}, not {_VERSION}")
    batch: ForwardBatch = _reading(ForwardBatch)(reader)
    reader.check_end()
    _check(batch, limits)
    return batch


def _is_array(kind: Any) -> bool:
    return kind == NDArray[np.int64] or get_origin(kind) is np.ndarray


def _fields_of(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


@cache
def _writer(kind: Any) -> Callable[[list[int], Any], None]:
    """What appends a value of such a type to numbers."""
    if kind in (int, bool):
        return list.append
    if isinstance(kind, type) and is_dataclass(kind):
        parts = [(name, _writer(inner)) for name, inner in _fields_of(kind).items()]

        def write_parts(numbers: list[int], value: Any) -> None:
            for name, write in parts:
                part = getattr(value, name)
                if name == "last_layer" and part is value.all_layers:
                    numbers.append(_AS_ALL)
                else:
                    write(numbers, part)

        return write_parts
    if _is_array(kind):

        def write_array(numbers: list[int], value: Any) -> None:
            numbers.append(len(value))
            numbers += value.tolist()

        return write_array
    write = _writer(get_args(kind)[0])

    def write_items(numbers: list[int], value: Any) -> None:
        numbers.append(len(value))
        for item in value:
            write(numbers, item)

    return write_items


@cache
def _reading(kind: Any) -> "Callable[[_Reader], Any]":
    """What takes a value of such a type."""
    if kind is int:
        return _Reader.number
    if kind is bool:
        return _Reader.truth
    if isinstance(kind, type) and is_dataclass(kind):
        parts = [(name, _reading(inner)) for name, inner in _fields_of(kind).items()]

        def read_parts(reader: _Reader) -> Any:
            values: dict[str, Any] = {}
            for name, read in parts:
                is_same = name == "last_layer" and reader.takes(_AS_ALL)
                values[name] = values["all_layers"] if is_same else read(reader)
            return _checked(kind(**values), reader.limits)

        return read_parts
    if _is_array(kind):
        return _Reader.array
    assert get_origin(kind) in (tuple, Sequence), kind
    read = _reading(get_args(kind)[0])

    def read_items(reader: _Reader) -> tuple[Any, ...]:
        return tuple([read(reader) for _ in range(reader.count())])

    return read_items


class _Reader:
    """Takes values from the front."""

    def __init__(self, numbers: NDArray[np.int64], limits: HeaderLimits) -> None:
        self.limits = limits
        self._array = numbers
        self._numbers: list[int] = numbers.tolist()
        self._start = 0

    def number(self) -> int:
        start = self._start
        if start == len(self._numbers):
            raise HeaderError(f"a header of {start} numbers with more to come")
        self._start = start + 1
        return self._numbers[start]

    def truth(self) -> bool:
        if (number := self.number()) not in (0, 1):
            raise HeaderError(f"a header with {number} in place of a truth")
        return bool(number)

    def count(self) -> int:
        """Of what follows, each of a number at least."""
        if not 0 <= (count := self.number()) <= len(self._numbers) - self._start:
            raise HeaderError(f"a header of {len(self._numbers)} numbers with a list of {count}")
        return count

    def array(self) -> NDArray[np.int64]:
        count = self.count()
        self._start += count
        return self._array[self._start - count : self._start]

    def takes(self, number: int) -> bool:
        """Whether this number is the next, which is then taken."""
        is_next = self._numbers[self._start : self._start + 1] == [number]
        self._start += is_next
        return is_next

    def check_end(self) -> None:
        if self._start != len(self._numbers):
            raise HeaderError(f"a header with {len(self._numbers) - self._start} numbers too many")


def _checked(value: Any, limits: HeaderLimits) -> Any:
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
    works = {id(each): each for each in (work.all_layers, work.last_layer)}.values()
    places = chain(work.places.ranges, *(span.places for each in works for span in each.spans))
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
