"""What a suite is, and the kinds of values that its options have."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Bar, Bench, Results


@dataclass(frozen=True)
class Suite:
    """A workload and its numbers; `benchmarks.cli` does the rest."""

    about: str
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Bench], None]  # fills the results, and their settings
    bars: Callable[[Results], list[Bar]]
    draw: Callable[[Results, Path], None] | None = None
    repeats: str = "rounds"  # what --repeats counts
    takes: tuple[str, ...] = (
        "model",
        "dtype",
        "device",
        "threads",
    )  # of the options that several suites have


def count(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Several of them, with commas between; in order, each once."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def add_numbers(
    parser: argparse.ArgumentParser, numbers: dict[str, tuple[int | tuple[int, ...], str]]
) -> None:
    """Options that are a number, or several, each with its default and its meaning."""
    for option, (default, meaning) in numbers.items():
        if isinstance(default, int):
            parser.add_argument(
                option, type=count, default=default, metavar="N", help=f"{meaning} (%(default)s)"
            )
        else:
            usual = ",".join(map(str, default))
            parser.add_argument(
                option, type=counts, default=default, metavar="N,N", help=f"{meaning} ({usual})"
            )
