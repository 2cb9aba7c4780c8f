"""Results made up of chosen numbers, and small runs of the command line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cli import main
from benchmarks.harness import Results

MACHINE = {
    "cpu": "A processor (x86_64)",
    "num_cpus": 2,
    "num_threads": 2,
    "memory_bytes": 24 * 2**30,
    "system": "Linux 6",
    "python": "3.12.1",
    "torch": "2.13.0",
    "transformers": "5.22.2",
    "penstock": "0.1.0",
    "commit": "0123abc",
    "date": "2026-01-02T03:04:05+00:00",
    "load_average": 0.5,
}


def results_of(suite: str = "prefill", **settings: Any) -> Results:
    return Results(suite, dict(MACHINE), {"model": "model.gguf", "dtype": "bfloat16", **settings})


def add_rounds(
    results: Results, section: str, name: str, values: Mapping[str, Sequence[float]], unit: str = "s"
) -> None:
    """By system, the values of its rounds."""
    for system, numbers in values.items():
        for index, number in enumerate(numbers):
            results.add(section, name, unit, number, system=system, round_index=index)


def run(arguments: Sequence[str], output: Path) -> tuple[int, Results]:
    """The exit status, and what was written."""
    status = main([*arguments, "--json", str(output)])
    return status, Results.of_dict(json.loads(output.read_text()))
