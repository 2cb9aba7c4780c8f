"""Results as tables (Markdown, so that they can go into a page as they are) and as pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

from benchmarks.harness import Bar, Figure, Results
from penstock.plan.units import format_bytes

# Shades of one hue for an engine: readable by the colour-blind too.
_HUES = {
    "Penstock": ("#0b5394", "#5b9bd5", "#b4d3ee", "#7aa6c2"),
    "transformers": ("#d9730d", "#f6b26b"),
    "llama.cpp": ("#2e8b57", "#8fc9a6"),
    "vLLM": ("#8e44ad",),
}
_COLOURS = ("#0b5394", "#d9730d", "#2e8b57", "#8e44ad", "#b8860b", "#5b9bd5", "#c0392b", "#555555")
_GREY, _LIGHT, _LIMIT = "#777777", "#dddddd", "#c0392b"


def render(results: Results) -> str:
    """The machine, a table for each section, what did not hold, and the bars."""
    sections = list(dict.fromkeys(figure.section for figure in results.figures))
    parts = [_machine(results), *(_section(results.of(section)) for section in sections)]
    parts += [_facts(results), _noise(results), _notes(results), _bars(results.bars)]
    return "\n\n".join(part for part in parts if part)


def _machine(results: Results) -> str:
    machine, settings = results.machine, results.settings
    commit = f" ({machine['commit']})" if machine.get("commit") else ""
    load = machine.get("load_average")
    names = ("model", "dtype")
    lines = {
        "model": ", ".join(str(settings[name]) for name in names if name in settings),
        "machine": f"{machine['cpu']}, {machine['num_cpus']} CPUs, {format_bytes(machine['memory_bytes'])}, "
        f"{machine['num_threads']} threads" + (f", load {load:.1f} at the start" if load is not None else ""),
        "device": ", ".join(f"{name} {value}" for name, value in machine.get("card", {}).items() if value),
        "software": f"penstock {machine['penstock']}{commit}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, Python {machine['python']}, {machine['system']}",
        "date": f"{machine['date']}, took {results.duration_s:.0f} s",
        "method": settings.get("method", ""),
    }
    told = [f"{name:<10}{text}" for name, text in lines.items() if text]
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
class Panel:
    """Figures by series and x. Where every x is a number, lines have it for their place."""

    title: str
    unit: str
    series: Mapping[str, Mapping[Any, Figure]]
    x_label: str = "prompt length"
    kind: Literal["bars", "lines"] = "bars"
    is_log: bool = False
    marks: Mapping[str, Mapping[Any, float]] = field(default_factory=dict)  # references beside the series
    limit: tuple[str, float] | None = None  # a horizontal line


@dataclass(frozen=True)
class Gaps:
    """Times from a stream's token to its next, each where it ended, over the seconds since a prompt arrived."""

    title: str
    gaps: Sequence[tuple[float, float]]  # start and end, in seconds
    until_s: float  # when the prompt's first token came
    limit_ms: float | None = None


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Picture:
    """What a suite's results look like. Panels without series are left out."""

    title: str
    panels: Sequence[Panel]
    gaps: Sequence[Gaps] = ()


def draw(path: Path, results: Results, picture: Picture) -> None:
    """Gaps one below the other on the left, panels beside them or beside each other. Nothing where there are none."""
    panels, gaps = [panel for panel in picture.panels if panel.series], picture.gaps
    if not panels and not gaps:
        return
    # By name, so that only a picture needs matplotlib.
    make = import_module("matplotlib.figure").Figure
    if gaps:
        figure = make(figsize=(13.5, max(6.5, 1.9 * len(gaps))), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=(1.8, 1))
        axes = left.subplots(len(gaps), 1, sharex=True, sharey=gaps[0].limit_ms is None, squeeze=False)[:, 0]
        for index, (axis, each) in enumerate(zip(axes, gaps, strict=True)):
            _draw_gaps(axis, each, _COLOURS[index % len(_COLOURS)])
        left.supylabel("time from a stream's token to its next (ms)", fontsize=10)
        axes[-1].set_xlabel("seconds since the prompt arrived (shaded: until its first token)")
        others = right.subplots(len(panels), 1, squeeze=False)[:, 0] if panels else []
    else:
        figure = make(figsize=(max(8.5, 5.4 * len(panels)), 5.6), layout="constrained")
        others = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(others, panels, strict=True):
        _draw_panel(axis, panel)
    handles: dict[str, Any] = {}
    for axis in others:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    figure.suptitle(title_of(results, picture.title), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def title_of(results: Results, what: str) -> str:
    machine, settings = results.machine, results.settings
    model = f"{settings['model']}, {settings['dtype']}: " if "model" in settings else ""
    card = machine.get("card", {}).get("name") or f"{machine['cpu']}, threads: {machine['num_threads']}"
    return (
        f"{what}\n{model}{card}\npenstock {machine['penstock']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, {machine['date'][:10]}"
    )


def _colour(label: str, labels: Sequence[str]) -> str:
    for engine, shades in _HUES.items():
        if label.startswith(engine):
            own = [each for each in labels if each.startswith(engine)]
            return shades[own.index(label) % len(shades)]
    return _COLOURS[list(labels).index(label) % len(_COLOURS)]


def _draw_panel(axis: Any, panel: Panel) -> None:
    labels = list(panel.series)
    xs = list(dict.fromkeys(x for points in panel.series.values() for x in points))
    is_numeric = panel.kind == "lines" and all(isinstance(x, int | float) for x in xs)
    width = 0.86 / max(len(labels), 1)
    for rank, (label, points) in enumerate(panel.series.items()):
        if not points:
            continue
        medians = [each.median for each in points.values()]
        below = [each.median - min(each.values) for each in points.values()]
        above = [max(each.values) - each.median for each in points.values()]
        style = {"yerr": [below, above], "capsize": 2, "color": _colour(label, labels), "label": label}
        texts = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in medians]
        if panel.kind == "bars":
            shift = (rank - (len(labels) - 1) / 2) * width
            places = [xs.index(x) + shift for x in points]
            axis.bar_label(axis.bar(places, medians, 0.94 * width, **style), texts, padding=2, fontsize=7)
            continue
        places = list(points) if is_numeric else [xs.index(x) + 0.03 * rank for x in points]
        axis.errorbar(places, medians, marker="o", markersize=5, linewidth=1.6, **style)
        for place, median, text in zip(places, medians, texts, strict=True):
            axis.annotate(text, (place, median), (0, 6), textcoords="offset points", ha="center", fontsize=7)
    for label, marks in panel.marks.items():
        places = [x if is_numeric else xs.index(x) + 0.2 for x in marks if x in xs]
        known = [value for x, value in marks.items() if x in xs]
        axis.plot(
            places, known, "D", color=_HUES["vLLM"][0], markerfacecolor="white", markersize=5, label=label
        )
    if panel.limit is not None:
        axis.axhline(panel.limit[1], color=_GREY, linestyle=":", linewidth=1.2, label=panel.limit[0])
    if not is_numeric:
        axis.set_xticks(range(len(xs)), [str(x) for x in xs])
    axis.margins(y=0.12)
    if panel.is_log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    else:
        values = [
            value for points in panel.series.values() for each in points.values() for value in each.values
        ]
        axis.set_ylim(bottom=min(0.0, *values))
    axis.set_title(panel.title, fontsize=10, fontweight="bold")
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.unit)
    axis.grid(axis="y", color=_LIGHT, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_gaps(axis: Any, each: Gaps, colour: str) -> None:
    """A gap is a line from token to token at the height of its length, so a stall is long and high."""
    heights = [1000 * (end - start) for start, end in each.gaps]
    starts, ends = [start for start, _ in each.gaps], [end for _, end in each.gaps]
    axis.axvspan(0.0, each.until_s, color="#ececec", zorder=0)
    axis.hlines(heights, starts, ends, color=colour, linewidth=1.5, zorder=2)
    axis.plot(ends, heights, ".", color=colour, markersize=2.5, zorder=3)
    if each.limit_ms is None:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    else:
        axis.axhline(each.limit_ms, color=_LIMIT, linewidth=1.2, zorder=2)
        # One long gap must not hide all others.
        axis.set_ylim(0, min(max(1.6 * each.limit_ms, 1.15 * max(heights)), 4 * each.limit_ms))
    axis.set_title(each.title, loc="left", fontsize=9, fontweight="bold")
    axis.grid(axis="y", color=_LIGHT, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
