"""A result of the prefix cache as a page of plain text."""

from collections.abc import Iterable
from textwrap import wrap

from penstock.bench.cache_bars import check_bars, noisy, scope
from penstock.bench.cache_results import METHOD, CacheResults
from penstock.bench.cache_workload import Way
from penstock.bench.report import aligned, bar_table, ratio_with_quartiles
from penstock.bench.serve_report import machine_facts
from penstock.bench.spread import Spread
from penstock.plan.units import format_bytes

_WIDTH = 110


def render(results: CacheResults) -> str:
    """Facts, tables, bars, and what is not to be trusted, in that order."""
    parts = (
        _facts(results),
        _ways(results),
        _ratios(results),
        _resumed(results),
        bar_table(scope(), check_bars(results)),
        _refusal(results),
    )
    return "\n\n".join(part for part in parts if part)


def _facts(results: CacheResults) -> str:
    settings = results.settings
    facts = machine_facts(results.machine, settings.model, settings.dtype, results.duration_s)
    folder = results.file_system or "a file system of unknown kind"
    return (
        f"{facts}\n{'rounds':<10}{settings.repeats}, all ways take turns, another begins each round"
        f"\n{'disk':<10}{folder}, files in the system's cache"
    )


def _ways(results: CacheResults) -> str:
    workload = results.settings.workload
    rows = [["", "first token, s", "tokens from the cache", "all on disk after, s", "model loaded in, s"]]
    for way in results.ways:
        figure, runs = results.figure(way), results.of(way)
        cells = [
            "noisy" if figure is None else seconds_of(figure),
            _counts(run.answer.cached_tokens for run in runs),
            _median(run.flushed_s for run in runs),
            _median(run.load_s for run in runs),
        ]
        rows.append([way.label, *cells])
    written = [run.disk_bytes for run in results.of(Way.WRITING) if run.disk_bytes is not None]
    size = f", {format_bytes(max(written))} on disk" if written else ""
    return "\n".join(
        [
            f"A prompt of {workload.prompt_tokens:,} tokens{size}, chunks of {workload.chunk:,}. Median (quartiles)",
            aligned(rows),
            *wrap(f"Measured so: {METHOD}.", _WIDTH, initial_indent="  ", subsequent_indent="  "),
        ]
    )


def _ratios(results: CacheResults) -> str:
    rows = [[name, ratio_with_quartiles(spread)] for name, spread in results.ratios.items()]
    title = "Ratios, round by round. Median (quartiles); noisy: the quartiles lie more than 15% apart"
    return f"{title}\n{aligned(rows)}" if rows else ""


def _resumed(results: CacheResults) -> str:
    saved = results.saved_s
    if saved is None:
        return ""
    tokens = _counts(run.answer.cached_tokens for run in results.of(Way.RESUMED))
    return f"After a kill half way {tokens} tokens are not read again: {seconds_of(saved)} s are saved."


def _refusal(results: CacheResults) -> str:
    """Why some figures are not given, and what to do."""
    found = noisy(results)
    if not found:
        return ""
    return (
        f"Noisy: quartiles lie too far apart, as a share of the median, of {'; '.join(found)}. "
        "End other programs, or give more --repeats."
    )


def seconds_of(spread: Spread) -> str:
    """With three digits, since some take a tenth of a second."""
    if len(spread.values) == 1:
        return f"{spread.median:.3f}"
    first, third = spread.quartiles
    return f"{spread.median:.3f} ({first:.3f} to {third:.3f})"


def _median(values: Iterable[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{Spread.of(found).median:.2f}" if found else "-"


def _counts(values: Iterable[int]) -> str:
    found = sorted(set(values))
    return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"
