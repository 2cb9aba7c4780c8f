"""A sweep as a page of plain text."""

from collections.abc import Callable
from textwrap import wrap

from penstock.bench.report import aligned
from penstock.bench.sweep_results import Quantity, SweepResults
from penstock.bench.sweep_workload import Cell
from penstock.bench.systems import SystemName
from penstock.measure.growth import METHOD
from penstock.plan.units import format_bytes

_WIDTH = 110
NOISY = "noisy"


def render(results: SweepResults) -> str:
    """Facts, tables, and what is not to be trusted."""
    settings = results.settings
    tables = [
        (
            "Time to first token, s. Median (quartiles)",
            lambda cell: _seconds(results, cell, "first_token_s"),
        ),
        ("Prefill, tokens/s: prompt tokens over the median time", lambda cell: _speed(results, cell)),
        (
            f"Total time, s, with {settings.decode_tokens} generated tokens. Median (quartiles)",
            lambda cell: _seconds(results, cell, "total_s"),
        ),
    ]
    parts = [_facts(results), *(f"{title}\n{_by_length(results, text)}" for title, text in tables)]
    if results.memory:
        parts.append(_memory(results))
    if results.noisy:
        parts.append(_refusal(results))
    return "\n\n".join(parts)


def _refusal(results: SweepResults) -> str:
    """Why some figures are not given, and what to do."""
    worst = max(results.noisy, key=lambda each: each.share)
    limit = results.settings.max_spread
    return (
        f"{len(results.noisy)} of {2 * len(results.cells)} figures are {NOISY}: their quartiles lie more than "
        f"{limit:.0%} of the median apart (worst: {worst.share:.0%}, {worst.cell.configuration.label} at "
        f"{worst.cell.prompt_tokens:,} tokens), so none is given; end other programs, or give more --repeats"
    )


def _facts(results: SweepResults) -> str:
    machine, settings = results.machine, results.settings
    load = "" if machine.load_average is None else f", load average {machine.load_average:.1f} at the start"
    facts = {
        "model": f"{settings.model}, {settings.dtype}",
        "machine": f"{machine.cpu}, {machine.num_cpus} CPUs, {format_bytes(machine.memory_bytes)}",
        "threads": f"{machine.num_threads}{load}",
        "software": f"penstock {machine.penstock}, torch {machine.torch}, transformers {machine.transformers}",
        "date": f"{machine.date}, {results.duration_s:.0f} s",
        "rounds": f"{settings.repeats} after a warm-up; all take turns, in another order each round",
    }
    if results.llama_cpp is not None:
        facts["llama.cpp"] = (
            f"{results.llama_cpp}, flash attention; it multiplies the file's blocks as they are"
        )
    return "\n".join(f"{name:<10} {text}" for name, text in facts.items())


def _seconds(results: SweepResults, cell: Cell, quantity: Quantity) -> str:
    figure = results.figure(cell, quantity)
    if figure is None:
        return NOISY
    first, third = figure.quartiles
    return f"{figure.median:.3f} ({first:.3f} to {third:.3f})"


def _speed(results: SweepResults, cell: Cell) -> str:
    figure = results.figure(cell, "first_token_s")
    return NOISY if figure is None else f"{cell.prompt_tokens / figure.median:,.1f}"


def _memory(results: SweepResults) -> str:
    growths = {each.cell: each.growth for each in results.memory}

    def text(cell: Cell) -> str:
        growth = growths.get(cell)
        if growth is None:
            return "-"
        return f"{growth.activation_bytes / 2**20:.1f} + {growth.cache_bytes / 2**20:.1f}"

    parts = ["Peak memory growth, MiB: activations + cache", _by_length(results, text)]
    absent = {each.system for each in results.configurations} & {
        SystemName.PENSTOCK_AUTO,
        SystemName.LLAMA_CPP,
    }
    parts += wrap(f"Measured {METHOD}.", _WIDTH, initial_indent="  ", subsequent_indent="  ")
    if absent:
        parts.append(f"  Not measured for {' and '.join(sorted(absent))}.")
    return "\n".join(parts)


def _by_length(results: SweepResults, text: Callable[[Cell], str]) -> str:
    """A row for each configuration, a column for each length."""
    lengths = results.settings.lengths
    rows = [["", *(f"{length:,} tokens" for length in lengths)]]
    for configuration in results.configurations:
        rows.append([configuration.label, *(text(Cell(configuration, length)) for length in lengths)])
    return aligned(rows)
