"""Comparisons of tensors: where they differ, by how much, and what that breaks."""

from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.measure.compare import (
    Comparison,
    Law,
    Series,
    compare_caches,
    compare_greedy,
    compare_logits,
)


def logits(rows: int = 200, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 37, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30)
@given(row=st.integers(0, 199), column=st.integers(0, 36), by=st.floats(0.125, 100))
def test_one_logit_that_differs_is_found(row: int, column: int, by: float) -> None:
    ours, theirs = logits(), logits()
    ours[row, column] += by
    series = compare_logits(range(1000, 1200), ours, theirs)
    assert [
        position for position, same in zip(series.positions, series.is_same, strict=True) if not same
    ] == [1000 + row]
    assert series.first_different() == series.worst_position == 1000 + row
    assert series.largest_absolute == pytest.approx(by, rel=1e-3)
    assert series.largest_relative == pytest.approx(by / float(theirs[row].abs().max()), rel=1e-3)
    assert series.first_different(end=1000 + row) is None


def test_equal_logits() -> None:
    series = compare_logits(range(200), logits(), logits())
    assert series.all_same
    assert series.largest_absolute == series.largest_relative == 0
    assert series.first_different() is None
    assert compare_greedy(range(200), logits(), logits()).num_equal == 200


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("sides", ["ours", "theirs", "both"])
def test_what_is_no_number_is_infinitely_far(value: float, sides: str) -> None:
    ours, theirs = logits(4), logits(4)
    if sides != "theirs":
        ours[2, 5] = value
    if sides != "ours":
        theirs[2, 5] = value
    series = compare_logits(range(4), ours, theirs)
    assert series.largest_absolute == inf
    assert series.first_beyond(1e9) == 2
    cache = compare_caches(range(4), [ours, theirs], [theirs, ours])
    assert cache.first_beyond(1e9) is not None


def test_the_first_greedy_token_that_differs() -> None:
    ours, theirs = logits(), logits()
    ours[[50, 90], 3] = 100
    greedy = compare_greedy(range(200), ours, theirs)
    assert greedy.num_equal == 198
    assert greedy.first is not None
    assert (greedy.first.position, greedy.first.token) == (50, 3)
    assert greedy.first.expected == int(theirs[50].argmax())


def test_the_layer_and_the_token_where_caches_part() -> None:
    def tensors() -> list[torch.Tensor]:
        """Keys and values of three layers."""
        return [logits(9, seed).view(9, 1, 37) for seed in range(6)]

    ours = tensors()
    ours[4][4] += 1  # keys of the last layer
    ours[3][6] += 1
    ours[1][8] -= 1
    cache = compare_caches(range(20, 29), ours, tensors())
    assert cache.first_different() == 24
    assert cache.first_layer == 2
    assert [not same for same in cache.is_same] == [index in (4, 6, 8) for index in range(9)]


SERIES = Series((0, 1, 2, 3), (True, True, False, False), (0.0, 0.0, 1e-6, 1e-2), (0.0, 0.0, 1e-6, 1e-2))


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (Law(0, 0.1), []),
        (Law(2, 0.1), []),
        (Law(3, 0.1), [("logits", 2, "other bits")]),
        (Law(0, 1e-3), [("logits", 3, "beyond the tolerance")]),
        (Law(9, 1e-3), [("logits", 2, "other bits"), ("logits", 3, "beyond the tolerance")]),
    ],
)
def test_what_a_law_forbids(law: Law, expected: list[tuple[str, int, str]]) -> None:
    comparison = Comparison("a way", law, logits=SERIES)
    assert [(each.what, each.position, each.how) for each in comparison.breaks] == expected
    assert comparison.passed == (not expected)


def test_states_have_a_law_too() -> None:
    states = Series((0,), (False,), (1e-3,), (1e-3,))
    assert Comparison("a way", Law(0, 1e-2), states=states).passed
    assert not Comparison("a way", Law(0, 1e-4), states=states).passed
    assert not Comparison("a way", Law(1, 1e-2), states=states).passed
