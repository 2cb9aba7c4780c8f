"""Pictures, by matplotlib: for every layer that draws some. It is imported by name, so that nothing else needs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Literal

# Shades of one hue for an engine: readable by the colour-blind too.
_HUES = {
    "Penstock": ("#0b5394", "#5b9bd5", "#b4d3ee", "#7aa6c2"),
    "transformers": ("#d9730d", "#f6b26b"),
    "llama.cpp": ("#2e8b57", "#8fc9a6"),
    "vLLM": ("#8e44ad",),
}
COLOURS = ("#0b5394", "#d9730d", "#2e8b57", "#8e44ad", "#b8860b", "#5b9bd5", "#c0392b", "#555555")
_GREY = "#777777"


@dataclass(frozen=True)
class Panel:
    """Repeated values by series and x. Where every x is a number, lines have it for their place."""

    title: str
    unit: str
    series: Mapping[str, Mapping[Any, Sequence[float]]]
    x_label: str = "prompt length"
    kind: Literal["bars", "lines"] = "bars"
    is_log: bool = False
    marks: Mapping[str, Sequence[tuple[Any, float]]] = field(default_factory=dict)  # beside the series
    limit: tuple[str, float] | None = None  # a horizontal line


def new_figure(width: float, height: float) -> Any:
    return import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Panels beside each other."""
    figure = new_figure(max(8.5, 5.4 * len(panels)), 5.6)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        draw_panel(axis, panel)
    finish(figure, axes, title, path)


def finish(figure: Any, axes: Sequence[Any], title: str, path: Path) -> None:
    """One legend for all axes below them, a title above, and the file."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    place = {"loc": "outside lower center", "ncols": 4, "frameon": False, "fontsize": 9}
    figure.legend(handles.values(), handles.keys(), **place)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def plain(axis: Any, *, is_log: bool = False) -> None:
    """Lines to read heights by, and no box around them."""
    if is_log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def draw_panel(axis: Any, panel: Panel) -> None:
    """Medians, with whiskers from the least value to the most."""
    labels = list(panel.series)
    xs = list(dict.fromkeys(x for points in panel.series.values() for x in points))
    is_numeric = panel.kind == "lines" and all(isinstance(x, int | float) for x in xs)
    width = 0.86 / max(len(labels), 1)
    for rank, (label, points) in enumerate(panel.series.items()):
        if not points:
            continue
        medians = [median(values) for values in points.values()]
        below = [middle - min(values) for middle, values in zip(medians, points.values(), strict=True)]
        above = [max(values) - middle for middle, values in zip(medians, points.values(), strict=True)]
        style = {"yerr": [below, above], "capsize": 2, "color": _colour(label, labels), "label": label}
        texts = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in medians]
        if panel.kind == "bars":
            shift = (rank - (len(labels) - 1) / 2) * width
            places = [xs.index(x) + shift for x in points]
            axis.bar_label(axis.bar(places, medians, 0.94 * width, **style), texts, padding=2, fontsize=7)
            continue
        places = list(points) if is_numeric else [xs.index(x) + 0.03 * rank for x in points]
        axis.errorbar(places, medians, marker="o", markersize=5, linewidth=1.6, **style)
        for place, middle, text in zip(places, medians, texts, strict=True):
            axis.annotate(text, (place, middle), (0, 6), textcoords="offset points", ha="center", fontsize=7)
    for label, marks in panel.marks.items():
        places = [x if is_numeric else xs.index(x) + 0.2 for x, _ in marks]
        style = {"color": _HUES["vLLM"][0], "markerfacecolor": "white", "markersize": 5, "label": label}
        axis.plot(places, [value for _, value in marks], "D", **style)
    if panel.limit is not None:
        axis.axhline(panel.limit[1], color=_GREY, linestyle=":", linewidth=1.2, label=panel.limit[0])
    if not is_numeric:
        axis.set_xticks(range(len(xs)), [str(x) for x in xs])
    axis.margins(y=0.12)
    plain(axis, is_log=panel.is_log)
    if not panel.is_log:
        every = [value for points in panel.series.values() for values in points.values() for value in values]
        axis.set_ylim(bottom=min(0.0, *every))
    axis.set_title(panel.title, fontsize=10, fontweight="bold")
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.unit)


def _colour(label: str, labels: Sequence[str]) -> str:
    for engine, shades in _HUES.items():
        if label.startswith(engine):
            own = [each for each in labels if each.startswith(engine)]
            return shades[own.index(label) % len(shades)]
    return COLOURS[list(labels).index(label) % len(COLOURS)]
