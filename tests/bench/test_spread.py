"""Laws of the statistics."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.spread import Spread

VALUES = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=15)


@given(values=VALUES)
def test_the_numbers_are_in_order(values: list[float]) -> None:
    spread = Spread.of(values)
    first, third = spread.quartiles
    ordered = [spread.smallest, first, spread.median, third, spread.largest]
    assert all(one <= other * (1 + 1e-12) for one, other in pairwise(ordered))


@given(values=VALUES, data=st.data())
def test_the_order_of_measurement_does_not_matter(values: list[float], data: st.DataObject) -> None:
    shuffled = Spread.of(data.draw(st.permutations(values)))
    spread = Spread.of(values)
    assert (shuffled.median, shuffled.quartiles, shuffled.noise) == (
        spread.median,
        spread.quartiles,
        spread.noise,
    )


@given(value=st.floats(0.01, 1e6), count=st.integers(3, 9))
def test_equal_values_are_not_noisy(value: float, count: int) -> None:
    spread = Spread.of([value] * count)
    assert spread.median == value
    assert spread.noise == ""


@given(values=VALUES, factor=st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_unit_does_not_matter(values: list[float], factor: float) -> None:
    scaled = Spread.of(value * factor for value in values)
    assert scaled.median == pytest.approx(Spread.of(values).median * factor)
    assert scaled.noise == Spread.of(values).noise


def test_noise_is_named() -> None:
    assert Spread.of([1.0, 1.0]).noise == "too few"
    assert Spread.of([1.0, 1.1, 1.2, 1.0, 1.1]).noise == ""
    assert Spread.of([1.0, 1.5, 1.2, 1.0, 1.8]).noise == "noisy"
    # One wild value among five does not move the quartiles.
    assert Spread.of([1.0, 1.0, 1.0, 1.0, 9.0]).noise == ""


def test_there_must_be_a_value() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])
