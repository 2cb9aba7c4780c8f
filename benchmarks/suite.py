"""What a suite is, and how its options are declared."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, Bench, Results
from benchmarks.show import Picture
from penstock.models.hub import DEFAULT_MODEL

Option = dict[str, Any]  # arguments of argparse's `add_argument`


@dataclass(frozen=True)
class Suite:
    """A workload and its numbers; `benchmarks.cli` does the rest."""

    about: str
    measure: Callable[[argparse.Namespace, Bench], None]  # fills the results, and their settings
    bars: Callable[[Results], list[Bar]] = lambda results: []
    picture: Callable[[Results], Picture] | None = None
    repeats: str = "rounds"  # what --repeats counts
    takes: tuple[str, ...] = ("--model", "--dtype", "--device", "--threads")  # of COMMON
    options: Mapping[str, Option] = field(default_factory=dict)


def count(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Several of them, with commas between; in order, each once."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def some_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """What reads names with commas between; `none` is none of them."""

    def names(text: str) -> tuple[str, ...]:
        found = () if text == "none" else tuple(dict.fromkeys(text.split(",")))
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of some of {', '.join(known)}")
        return found

    return names


def number(default: int | tuple[int, ...] | None, meaning: str, *, several: bool = False) -> Option:
    """One, or several with commas between. Without a default the meaning tells what it is."""
    several = several or isinstance(default, tuple)
    usual = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return {
        "type": counts if several else count,
        "default": default,
        "metavar": "N,N" if several else "N",
        "help": meaning if default is None else f"{meaning} ({usual})",
    }


def switch(meaning: str) -> Option:
    return {"action": "store_true", "help": meaning}


def value(kind: Callable[[str], Any], default: Any, metavar: str, meaning: str) -> Option:
    return {"type": kind, "default": default, "metavar": metavar, "help": meaning}


COMMON: Mapping[str, Option] = {
    "--model": value(
        str, DEFAULT_MODEL, "NAME", "smollm2, a folder, a GGUF file or a Hugging Face name (%(default)s)"
    ),
    "--dtype": {"choices": ("bfloat16", "float32"), "default": "bfloat16", "help": "(%(default)s)"},
    "--device": value(str, None, "NAME", "auto, cpu, cuda, cuda:1, mps (PENSTOCK_DEVICE, else auto)"),
    "--threads": number(None, "threads to compute with (torch's own choice)"),
}
SEED = value(int, 0, "N", "of the order of turns (%(default)s)")
PEERS_FOLDER = value(Path, Path(".peers"), "FOLDER", "where other engines are (%(default)s)")
