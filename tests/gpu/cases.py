"""Tests with cases, for pytest and for `python3 -m tests.gpu` alike."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

Case = TypeVar("Case")


def over(cases: Iterable[Case]) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Mark a test to be run with each of the cases, whose argument is called `case`."""
    known = tuple(cases)

    def mark(test: Callable[[Case], None]) -> Callable[[Case], None]:
        test.cases = known  # type: ignore[attr-defined]
        return test

    return mark


def calls(test: Callable[..., None]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The test with each of its cases: a name and what to call."""
    cases = getattr(test, "cases", None)
    if cases is None:
        yield test.__name__, test
        return
    for case in cases:
        yield f"{test.__name__}[{case}]", partial(test, case)
