"""What a header may say: each number up to its last, and none beyond."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.cache import EMPTY, SequenceCache, TokenRange
from penstock.cache.space import CacheSpace
from penstock.engine.stages.header import HeaderError, HeaderLimits, read_header, write_header
from penstock.engine.step import SpanInput, build_batch
from penstock.kernels.spans import AttendedSpan, AttentionWork, StateRows, StateWork, WrittenPlaces
from penstock.layers.forward_batch import ForwardBatch
from penstock.plan.grids import RowLaw
from penstock.plan.step import Span
from tests.cache.test_groups import Model
from tests.cache.test_windows import windowed

SPACE = CacheSpace.for_tokens(Model(windowed(100, recurrent=True)), 10 * 64, num_slots=6)


def span_of(cache: SequenceCache, start: int, end: int, first_id: int, **more: Any) -> SpanInput:
    state = cache.reserve(start, [end])
    return SpanInput(
        Span(start, end), range(first_id, first_id + end - start), cache.kv_groups, state=state, **more
    )


def new_batch() -> ForwardBatch:
    """A chunk of a long prompt, then a decode behind 320 tokens of which a window has gone, with logits of both."""
    reading, decoding = SPACE.new_sequence(), SPACE.new_sequence()
    for start, end in ((0, 192), (192, 320)):
        decoding.reserve(start, [end])
        decoding.commit(end)
        decoding.slide()
    batch = build_batch(
        [
            span_of(reading, 0, 70, 0, is_prompt=True, wants_logits=True, is_long=True),
            span_of(decoding, 320, 321, 200, is_prompt=False, wants_logits=True),
        ],
        canon=RowLaw(64),
    )
    for cache in (reading, decoding):
        cache.free()
    return batch


BATCH = new_batch()
SLOTS = [slot for rows in BATCH.states.rows for slot in (rows.read, rows.write)]
LIMITS = HeaderLimits(
    vocab_size=201,
    max_position=321,
    num_places=tuple(max(place.end for place in work.places.ranges) for work in BATCH.groups),
    num_slots=max(SLOTS) + 1,
)
NUM_ROWS = len(BATCH.token_ids)


def accepts(batch: ForwardBatch, limits: HeaderLimits = LIMITS) -> bool:
    try:
        read = read_header(write_header(batch), limits)
    except HeaderError:
        return False
    assert write_header(read) == write_header(batch)
    return True


def test_it_is_read_as_it_was_written_where_its_numbers_just_fit() -> None:
    read = read_header(write_header(BATCH), LIMITS)
    assert (read.num_tokens, read.num_logits, read.end_position) == (71, 2, 321)
    for name in ("token_ids", "positions", "logit_rows", "long_rows"):
        assert np.array_equal(getattr(read, name), getattr(BATCH, name)), name
    assert write_header(read) == write_header(BATCH)
    assert read.states == BATCH.states
    assert read.windows[0].all_layers.spans[1].first_token == 192
    assert EMPTY in SLOTS


def test_the_last_layer_s_work_is_that_of_all_where_it_was() -> None:
    """Which kernels prepare once then."""
    cache = SPACE.new_sequence()
    decodes = build_batch([span_of(cache, 0, 1, 0, is_prompt=False, wants_logits=True)], canon=RowLaw(64))
    cache.free()
    for written, is_same in ((BATCH, False), (decodes, True)):
        for each in read_header(write_header(written), LIMITS).groups:
            assert (each.last_layer is each.all_layers) == is_same


@pytest.mark.parametrize("name", ["vocab_size", "max_position", "num_slots"])
def test_one_less_is_too_little(name: str) -> None:
    assert accepts(BATCH, replace(LIMITS, **{name: getattr(LIMITS, name) + 1}))
    assert not accepts(BATCH, replace(LIMITS, **{name: getattr(LIMITS, name) - 1}))


@pytest.mark.parametrize("group", [0, 1])
def test_each_group_has_its_places(group: int) -> None:
    for difference in (0, -1):
        places = list(LIMITS.num_places)
        places[group] += difference
        assert accepts(BATCH, replace(LIMITS, num_places=tuple(places))) == (difference == 0)
    assert not accepts(BATCH, replace(LIMITS, num_places=LIMITS.num_places[:1]))


def with_number(name: str, place: int, value: int) -> ForwardBatch:
    numbers = getattr(BATCH, name).copy()
    numbers[place] = value
    return replace(BATCH, **{name: numbers})


@pytest.mark.parametrize("place", [0, 70, -1])
@pytest.mark.parametrize(
    ("name", "most"), [("token_ids", 200), ("positions", 320), ("long_rows", 1), ("logit_rows", NUM_ROWS - 1)]
)
def test_numbers_of_rows(name: str, most: int, place: int) -> None:
    place = min(place, len(getattr(BATCH, name)) - 1)
    for value, is_right in ((0, True), (most, True), (-1, False), (most + 1, False)):
        assert accepts(with_number(name, place, value)) == is_right, value


@pytest.mark.parametrize(
    ("changes", "is_right"),
    [
        ({"num_tokens": 0}, False),
        ({"num_tokens": NUM_ROWS + 1}, False),
        ({"num_tokens": 70}, False),
        ({"num_logits": -1}, False),
        ({"num_logits": len(BATCH.logit_rows)}, True),
        ({"num_logits": len(BATCH.logit_rows) + 1}, False),
        ({"num_logits": 1}, False),  # the last layer has two rows
        ({"positions": BATCH.positions[:-1]}, False),
        ({"end_position": 320}, False),
        ({"end_position": 5000}, True),
        ({"long_rows": BATCH.long_rows[:0]}, True),
        ({"long_rows": BATCH.long_rows[:-1]}, False),
        ({"logit_rows": BATCH.logit_rows[:0], "num_logits": 0}, False),
        ({"windows": ()}, False),
        ({"places": WrittenPlaces(BATCH.places.ranges[:-1])}, False),
    ],
)
def test_rows_agree(changes: dict[str, Any], is_right: bool) -> None:
    assert accepts(replace(BATCH, **changes)) == is_right


def with_state(**changes: Any) -> ForwardBatch:
    first, second = BATCH.states.rows
    return replace(BATCH, states=StateWork((first, replace(second, **changes))))


SECOND: StateRows = BATCH.states.rows[1]


@pytest.mark.parametrize(
    ("changes", "is_right"),
    [
        ({"read": EMPTY}, True),
        ({"read": EMPTY - 1}, False),
        ({"read": LIMITS.num_slots}, False),
        ({"write": 0 if SECOND.read else 1}, True),
        ({"write": -1}, False),
        ({"write": LIMITS.num_slots}, False),
        ({"write": SECOND.read}, False),
        ({"start": 71}, False),
        ({"start": 69}, False),  # that is another's row
        ({"end": 72}, False),
    ],
)
def test_states_lie_in_slots_and_rows(changes: dict[str, int], is_right: bool) -> None:
    assert accepts(with_state(**changes)) == is_right


def with_span(place: int, change: Callable[[AttendedSpan], AttendedSpan]) -> ForwardBatch:
    spans = list(BATCH.all_layers.spans)
    spans[place] = change(spans[place])
    return replace(BATCH, all_layers=AttentionWork(tuple(spans)))


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        (0, {"start": -1}),
        (0, {"end": 71}),
        (1, {"start": 71}),
        (1, {"start": 69}),
        (1, {"end": 72}),
        (0, {"position": -1}),
        (0, {"first_token": 1}),
        (0, {"first_token": -1}),
        (1, {"first_token": 321}),
        (0, {"tile_size": -1}),
        (0, {"origin": -1}),
        (0, {"places": ()}),
        (0, {"places": (TokenRange(0, 69),)}),
        (0, {"places": (TokenRange(-1, 69),)}),
        (0, {"places": (TokenRange(5, 4), TokenRange(0, 71))}),
    ],
)
def test_spans_lie_in_rows_and_places(place: int, changes: dict[str, Any]) -> None:
    try:
        changed = with_span(place, lambda span: replace(span, **changes))
    except ValueError:  # which nothing can say
        return
    assert not accepts(changed)
    assert accepts(with_span(place, lambda span: replace(span, tile_size=0, origin=0)))


def test_other_bytes_are_no_header() -> None:
    data = write_header(BATCH)
    numbers = np.frombuffer(data, dtype="<i8")
    for length in range(len(data)):
        with pytest.raises(HeaderError):
            read_header(data[:length], LIMITS)
    for more in (1, 8):
        with pytest.raises(HeaderError):
            read_header(data + bytes(more), LIMITS)
    for version in (0, 1, 3):
        with pytest.raises(HeaderError, match=f"version {version}"):
            read_header(np.array([version, *numbers[1:]], dtype="<i8").tobytes(), LIMITS)
