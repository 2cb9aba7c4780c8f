"""Results as tables (Markdown, so that they can go into a page as they are) and as pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any

from benchmarks.harness import Bar, Figure, Results
from penstock import pictures
from penstock.measure.machine import Machine
from penstock.measure.report import facts
from penstock.pictures import COLOURS, Panel


def render(results: Results) -> str:
    """The machine, a table for each section, what did not hold, and the bars."""
    sections = list(dict.fromkeys(figure.section for figure in results.figures))
    parts = [_machine(results), *(_section(results.of(section)) for section in sections)]
    parts += [_facts(results), _noise(results), _notes(results), _bars(results.bars)]
    return "\n\n".join(part for part in parts if part)


def _machine(results: Results) -> str:
    settings, load = results.settings, results.machine.get("load_average")
    card = results.machine.get("card", {})
    machine = Machine(**{name: value for name, value in results.machine.items() if name != "card"})
    lines = {
        "model": [str(settings[name]) for name in ("model", "dtype") if name in settings],
        **machine.facts,
        "load": [] if load is None else [f"{load:.1f} at the start"],
        "device": [f"{name} {value}" for name, value in card.items() if value],
        "date": [machine.date, f"took {results.duration_s:.0f} s"],
        "method": [settings["method"]] if "method" in settings else [],
    }
    told = facts({name: parts for name, parts in lines.items() if parts}).splitlines()
    return "\n".join(part for line in told for part in wrap(line, 118, subsequent_indent=10 * " "))


def _section(figures: Sequence[Figure]) -> str:
    """Cases against systems; whichever are fewer are the columns."""
    cells = {(figure.name, figure.system): figure for figure in figures}
    units = list(dict.fromkeys(figure.unit for figure in figures))
    names, systems = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    by_name = len(systems) < len(names)
    rows, columns = (names, systems) if by_name else (systems, names)

    def text(row: str, column: str) -> str:
        figure = cells.get((row, column) if by_name else (column, row))
        return "" if figure is None else shown(figure, with_unit=len(units) > 1)

    head = f"{figures[0].section}{f', {units[0]}' if len(units) == 1 else ''}"
    return table([[head, *columns], *([row, *(text(row, column) for column in columns)] for row in rows)])


def shown(figure: Figure, *, with_unit: bool = True) -> str:
    """The median, and from where to where values lie: of ratios the quartiles, else all of them."""
    if figure.is_noisy:
        return f"noisy ({figure.relative_spread:.0%})"
    as_share = figure.unit == "share"
    low, high = figure.quartiles if figure.unit == "x" else (min(figure.values), max(figure.values))
    median, first, last = (f"{v:.1%}" if as_share else with_digits(v) for v in (figure.median, low, high))
    text = f"{median} {figure.unit}" if with_unit and not as_share else median
    if len(figure.values) > 1:
        text += f" ({first} to {last}, n={len(figure.values)})"
    return text + (" noisy" if figure.noise == "noisy" else "")


def with_digits(value: float) -> str:
    """Three digits or more."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"


def _facts(results: Results) -> str:
    if not results.facts:
        return ""
    broken = [f"- NOT so: {fact.section}: {fact.name}" for fact in results.facts if not fact.holds]
    num_held = len(results.facts) - len(broken)
    return "\n".join([f"{num_held} of {len(results.facts)} facts hold.", *broken])


def _noise(results: Results) -> str:
    """Why some figures are not given, and what to do."""
    if not results.noisy:
        return ""
    worst = max(results.noisy, key=lambda figure: figure.relative_spread)
    return (
        f"{len(results.noisy)} figures are too noisy to be given: their quartiles lie too far apart (worst: "
        f"{worst.section}, {worst.name}, {worst.system}: {worst.relative_spread:.0%} of the median, where "
        f"{worst.most_spread:.0%} is the most). End other programs, or give more --repeats."
    )


def _notes(results: Results) -> str:
    lines = [f"- {run.section} failed: {run.error}" for run in results.sections if run.error]
    lines += [f"- {note}" for note in results.notes]
    took = ", ".join(f"{run.section} {run.seconds:.0f} s" for run in results.sections)
    return "\n".join([*lines, *([f"- took {took}"] if took else [])])


def _bars(bars: Sequence[Bar]) -> str:
    if not bars:
        return "No bar is for these settings."

    def row(bar: Bar) -> list[str]:
        value = "-" if bar.value is None else with_digits(bar.value)
        verdict = "pass" if bar.is_met else "MISS"
        return [
            bar.name,
            value,
            f"{'>=' if bar.is_lower_limit else '<='} {bar.limit:,g}",
            f"{verdict} {bar.noise}",
        ]

    return table([["bar", "measured", "wanted", ""], *map(row, bars)])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown with aligned columns; the first row is the head."""
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


@dataclass(frozen=True)
class Gaps:
    """Times from a stream's token to its next, each where it ended, over the seconds since a prompt arrived."""

    title: str
    gaps: Sequence[tuple[float, float]]  # start and end, in seconds
    until_s: float  # when the prompt's first token came
    limit_ms: float | None = None


@dataclass(frozen=True)
class Picture:
    """What a suite's results look like. Panels without series are left out."""

    title: str
    panels: Sequence[Panel]
    gaps: Sequence[Gaps] = ()


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw(path: Path, results: Results, picture: Picture) -> None:
    """Panels beside each other, or, where there are gaps, one below the other on their right. Nothing where there are
    none."""
    panels, gaps = [panel for panel in picture.panels if panel.series], picture.gaps
    title = title_of(results, picture.title)
    if not gaps:
        if panels:
            pictures.draw(path, title, panels)
        return
    figure = pictures.new_figure(13.5, max(6.5, 1.9 * len(gaps)))
    left, right = figure.subfigures(1, 2, width_ratios=(1.8, 1))
    axes = left.subplots(len(gaps), 1, sharex=True, sharey=gaps[0].limit_ms is None, squeeze=False)[:, 0]
    for index, (axis, each) in enumerate(zip(axes, gaps, strict=True)):
        _draw_gaps(axis, each, COLOURS[index % len(COLOURS)])
    left.supylabel("time from a stream's token to its next (ms)", fontsize=10)
    axes[-1].set_xlabel("seconds since the prompt arrived (shaded: until its first token)")
    others = right.subplots(len(panels), 1, squeeze=False)[:, 0] if panels else []
    for axis, panel in zip(others, panels, strict=True):
        pictures.draw_panel(axis, panel)
    pictures.finish(figure, others, title, path)


def title_of(results: Results, what: str) -> str:
    machine, settings = results.machine, results.settings
    model = f"{settings['model']}, {settings['dtype']}: " if "model" in settings else ""
    card = machine.get("card", {}).get("name") or f"{machine['cpu']}, threads: {machine['num_threads']}"
    return (
        f"{what}\n{model}{card}\npenstock {machine['penstock']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, {machine['date'][:10]}"
    )


def _draw_gaps(axis: Any, each: Gaps, colour: str) -> None:
    """A gap is a line from token to token at the height of its length, so a stall is long and high."""
    heights = [1000 * (end - start) for start, end in each.gaps]
    starts, ends = [start for start, _ in each.gaps], [end for _, end in each.gaps]
    axis.axvspan(0.0, each.until_s, color="#ececec", zorder=0)
    axis.hlines(heights, starts, ends, color=colour, linewidth=1.5, zorder=2)
    axis.plot(ends, heights, ".", color=colour, markersize=2.5, zorder=3)
    if each.limit_ms is not None:
        axis.axhline(each.limit_ms, color="#c0392b", linewidth=1.2, zorder=2)
        # One long gap must not hide all others.
        axis.set_ylim(0, min(max(1.6 * each.limit_ms, 1.15 * max(heights)), 4 * each.limit_ms))
    axis.set_title(each.title, loc="left", fontsize=9, fontweight="bold")
    pictures.plain(axis, is_log=each.limit_ms is None)
