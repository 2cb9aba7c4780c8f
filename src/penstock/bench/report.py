"""A result as a page of plain text."""

from collections.abc import Sequence
from textwrap import wrap

from penstock.bench.bars import Bar, check_bars, scope
from penstock.bench.results import GrowthSummary, Results
from penstock.bench.spread import Spread
from penstock.bench.suites import SuiteName
from penstock.measure.growth import METHOD
from penstock.plan.units import format_bytes

_WIDTH = 110
_NEAR_TIES = "with random weights many logits nearly tie, and rounding decides"


def render(results: Results) -> str:
    """Facts, tables and bars, in that order."""
    return "\n\n".join(
        part
        for part in (
            _facts(results),
            _speeds(results),
            _ratios(results),
            _memory(results),
            bar_table(scope(results.settings.suite), check_bars(results)),
        )
        if part
    )


def _facts(results: Results) -> str:
    machine, settings = results.machine, results.settings
    hardware = [machine.cpu, f"{machine.num_cpus} CPUs", format_bytes(machine.memory_bytes), machine.system]
    threads = [str(machine.num_threads)]
    if machine.load_average is not None:
        threads.append(f"load average {machine.load_average:.1f} at the start")
    penstock = f"penstock {machine.penstock}" + (f" ({machine.commit})" if machine.commit else "")
    software = [penstock, f"torch {machine.torch}", f"transformers {machine.transformers}"]
    facts = {
        "model": [settings.model, settings.dtype],
        "machine": hardware,
        "threads": threads,
        "software": [*software, f"Python {machine.python}"],
        "date": [machine.date, f"{results.duration_s:.0f} s"],
    }
    if results.passes:
        facts["rounds"] = [*_rounds(results), "systems take turns, another begins each round"]
    return "\n".join(f"{name:<10}{', '.join(parts)}" for name, parts in facts.items())


def _rounds(results: Results) -> list[str]:
    """At each length, with the systems that had fewer than the others."""
    speeds, parts = results.speeds, []
    for length in sorted({each.prompt_tokens for each in speeds}):
        counts = {each.system: len(each.prefill.values) for each in speeds if each.prompt_tokens == length}
        most = max(counts.values())
        fewer = [
            f"{count} for {name.label(results.settings.chunk)}"
            for name, count in counts.items()
            if count < most
        ]
        rest = f" ({'; '.join(fewer)})" if fewer else ""
        parts.append(f"{most} at {length:,} tokens{rest}")
    return parts


def _speeds(results: Results) -> str:
    speeds, chunk = results.speeds, results.settings.chunk
    if not speeds:
        return ""
    prefill = {(each.system.label(chunk), each.prompt_tokens): _range(each.prefill) for each in speeds}
    decode = {
        (each.system.label(chunk), each.prompt_tokens): _range(each.decode) for each in speeds if each.decode
    }
    parts = [
        "Prefill, tokens/s: prompt tokens over time to first token. Median (smallest to largest)",
        _by_length(prefill),
    ]
    if decode:
        num_tokens = results.settings.decode_tokens
        parts += [
            "",
            f"Decode, tokens/s: the {num_tokens} tokens after the first. Median (smallest to largest)",
            _by_length(decode),
        ]
    if results.agreements:
        doubt = f" ({_NEAR_TIES})" if results.settings.suite is SuiteName.HYBRID else ""
        parts += ["", f"Greedy tokens that Penstock and transformers agree on{doubt}:"]
        parts += [
            f"  after {each.prompt_tokens:,} tokens: {each.num_equal} of {each.num_tokens}, "
            f"the first {each.num_equal_from_start} in a row"
            for each in results.agreements
        ]
    return "\n".join(parts)


def _ratios(results: Results) -> str:
    cells = {(each.name, each.prompt_tokens): ratio_with_quartiles(each.spread) for each in results.ratios}
    if not cells:
        return ""
    title = "Ratios, round by round. Median (quartiles); noisy: the quartiles lie more than 15% apart"
    return f"{title}\n{_by_length(cells)}"


def _memory(results: Results) -> str:
    if not results.memory:
        return ""
    chunk = results.settings.chunk
    cells = {(each.system.label(chunk), each.prompt_tokens): _growth(each) for each in results.memory}
    return "\n".join(
        [
            "Peak memory growth during prefill, MiB: activations (smallest to largest) + cache. Median",
            _by_length(cells),
            *wrap(f"Measured {METHOD}.", _WIDTH, initial_indent="  ", subsequent_indent="  "),
        ]
    )


def bar_table(where: str, bars: Sequence[Bar]) -> str:
    """What the bars are for, and which are met."""
    rows = [["bar", "measured", "wanted", ""]]
    rows += [[bar.name, f"{bar.value:.3f}", _limit(bar), _verdict(bar)] for bar in bars]
    return f"{where}\n{aligned(rows)}" if bars else where


def _limit(bar: Bar) -> str:
    return f"{'>=' if bar.is_lower_limit else '<='} {bar.limit:g}"


def _verdict(bar: Bar) -> str:
    return ("pass" if bar.is_met else "MISS") + (f" ({bar.noise})" if bar.noise else "")


def _range(spread: Spread) -> str:
    return f"{spread.median:.1f} ({spread.smallest:.1f} to {spread.largest:.1f})"


def ratio_with_quartiles(spread: Spread) -> str:
    first, third = spread.quartiles
    mark = f" {spread.noise}" if spread.noise else ""
    return f"{spread.median:.3f} ({first:.3f} to {third:.3f}){mark}"


def _growth(summary: GrowthSummary) -> str:
    spread = summary.activation_bytes
    several = f" ({_mib(spread.smallest)} to {_mib(spread.largest)})" if len(spread.values) > 1 else ""
    return f"{_mib(spread.median)}{several} + {_mib(summary.cache_bytes)}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}"


def _by_length(cells: dict[tuple[str, int], str]) -> str:
    """A row for each name, a column for each length; a dash where nothing was measured."""
    names = list(dict.fromkeys(name for name, _ in cells))
    lengths = sorted({length for _, length in cells})
    header = ["", *(f"{length:,} tokens" for length in lengths)]
    return aligned(
        [header, *([name, *(cells.get((name, length), "-") for length in lengths)] for name in names)]
    )


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, indented, with the columns as wide as they need be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)
