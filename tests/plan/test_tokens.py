from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock.plan import TokenView

bounds = st.none() | st.integers(-12, 12)
slices = st.builds(slice, bounds, bounds, st.none() | st.sampled_from([1, 2, 3, -1, -2]))
tokens_lists = st.lists(st.integers(0, 9), max_size=10)


@given(tokens_lists, st.lists(slices, max_size=4))
def test_a_slice_of_a_slice_is_what_a_list_gives(tokens: list[int], cuts: list[slice]) -> None:
    view, expected = TokenView(tokens), tokens
    for cut in cuts:
        view, expected = view[cut], expected[cut]
    assert list(view) == expected
    assert len(view) == len(expected)
    assert view == expected
    assert expected == view
    assert list(reversed(view)) == expected[::-1]
    assert [view[i] for i in range(-len(view), len(view))] == expected + expected
    assert view._tokens is tokens  # not a view of a view, and not a copy
    assert TokenView(view)._tokens is tokens


@given(tokens_lists, st.data())
def test_a_view_of_a_view(tokens: list[int], data: st.DataObject) -> None:
    start, end = sorted(data.draw(st.lists(st.integers(0, len(tokens)), min_size=2, max_size=2)))
    view = TokenView(TokenView(tokens[:0] + tokens)[::-1], start, end)
    assert list(view) == tokens[::-1][start:end]


@pytest.mark.parametrize("kind", [list, tuple, bytes, lambda tokens: array("q", tokens), TokenView])
def test_equality_with_any_sequence(kind: Any) -> None:
    view = TokenView([9, 1, 2, 3, 9], 1, 4)
    assert view == kind([1, 2, 3])
    assert view != kind([1, 2, 4])
    assert view != kind([1, 2])
    assert view != kind([1, 2, 3, 4])


def test_equality_with_other_things() -> None:
    assert TokenView([1]) != 1
    assert TokenView([1]) != {1}
    assert TokenView([]) == ()


def test_views_are_read_only_and_unhashable() -> None:
    view: Any = TokenView([1, 2, 3])
    with pytest.raises(TypeError):
        view[0] = 5
    with pytest.raises(TypeError):
        hash(view)


def test_out_of_range_is_an_error_and_not_the_neighbour() -> None:
    view = TokenView(range(10), 4, 6)
    for index in (2, -3):
        with pytest.raises(IndexError):
            view[index]


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (0, 4), (3, 2), (4, 4), (0, True), (0.0, 1)])
def test_bounds_are_not_clamped(start: Any, end: Any) -> None:
    with pytest.raises(SettingError, match="is not accepted"):
        TokenView([1, 2, 3], start, end)


def test_repr_is_short() -> None:
    assert repr(TokenView(range(1000), 5, 900)) == "TokenView([5, 6, 7, 8, ...], len=895)"
    assert repr(TokenView([1, 2])) == "TokenView([1, 2], len=2)"
