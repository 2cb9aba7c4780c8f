"""A result of the prefix cache as a picture."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.bench.cache_bars import check_speed
from penstock.bench.cache_results import (
    COLD_OVER_DISK,
    COLD_OVER_MEMORY,
    COLD_OVER_RESUMED,
    WRITING_OVER_COLD,
    CacheResults,
)
from penstock.bench.cache_workload import Way
from penstock.bench.spread import Spread

_COLOURS = {
    Way.COLD: "#777777",
    Way.WRITING: "#d9730d",
    Way.RESUMED: "#8e44ad",
    Way.DISK: "#2e8b57",
    Way.MEMORY: "#0b5394",
}
_BAR_COLOUR = "#c0392b"
_COMPARED: Mapping[Way, str] = {
    Way.WRITING: WRITING_OVER_COLD,
    Way.RESUMED: COLD_OVER_RESUMED,
    Way.DISK: COLD_OVER_DISK,
    Way.MEMORY: COLD_OVER_MEMORY,
}
_BARRED = (Way.DISK, Way.MEMORY)  # each has a promised time, by the cold one's


def draw(results: CacheResults, path: Path) -> None:
    """A row for each way, from the slowest to the soonest: a dot for every round, and the median of them."""
    ways = results.ways
    # By name, so that the package needs matplotlib only here.
    figure = import_module("matplotlib.figure").Figure(
        figsize=(10, 1.6 + 0.75 * len(ways)), layout="constrained"
    )
    axis = figure.subplots()
    cold = results.first_token(Way.COLD)
    for row, way in enumerate(ways):
        _draw_way(axis, row, way, results)
    _draw_bars(axis, results, cold)
    axis.set_xscale("log")
    smallest = min(results.first_token(way).smallest for way in ways)
    largest = max(results.first_token(way).largest for way in ways)
    axis.set_xlim(smallest / 1.8, largest * 1.8)
    ticker = import_module("matplotlib.ticker")
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.xaxis.set_minor_formatter(lambda value, _: "")
    axis.set_xlabel("time to the first token (s), logarithmic; model loading aside")
    axis.set_yticks(range(len(ways)), [way.label for way in ways])
    axis.set_ylim(len(ways) - 0.4, -0.6)
    axis.grid(axis="x", color="#e5e5e5", linewidth=0.5, zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    _legend(figure, has_bars=bool(check_speed(results)))
    machine, settings = results.machine, results.settings
    figure.suptitle(
        f"A prompt of {settings.workload.prompt_tokens:,} tokens, the first time and again\n"
        f"{settings.model}, {settings.dtype}\n{machine.cpu}, threads: {machine.num_threads}, "
        f"penstock {machine.penstock}, torch {machine.torch}, {machine.date[:10]}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_way(axis: Any, row: int, way: Way, results: CacheResults) -> None:
    colour, seconds, figure = _COLOURS[way], results.first_token(way), results.figure(way)
    dots = {"color": colour, "alpha": 0.35, "markersize": 6, "zorder": 3}
    axis.plot(seconds.values, [row] * len(seconds.values), "o", **dots)
    if figure is not None:
        axis.plot([figure.median], [row], "|", color=colour, markersize=22, markeredgewidth=3, zorder=4)
    axis.annotate(
        "noisy" if figure is None else _figure(way, figure, results),
        (seconds.median, row),
        (0, 13),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=9,
        color=colour,
        fontweight="bold",
    )


def _figure(way: Way, figure: Spread, results: CacheResults) -> str:
    """The median, and what it is to the cold one, round by round."""
    text = f"{figure.median:.2f} s" if figure.median >= 1 else f"{1000 * figure.median:.0f} ms"
    name = _COMPARED.get(way)
    ratio = results.ratios.get(name) if name else None
    if ratio is None:
        return text
    if way is Way.WRITING:
        return f"{text}, {ratio.median - 1:+.1%}"
    return f"{text}, {ratio.median:.{0 if ratio.median >= 10 else 1}f}x sooner"


def _draw_bars(axis: Any, results: CacheResults, cold: Spread) -> None:
    """Where the first token must have come by, with the median of the cold runs."""
    limits = {bar.name: bar.limit for bar in check_speed(results)}
    for row, way in enumerate(results.ways):
        if way in _BARRED and (limit := limits.get(_COMPARED[way])):
            axis.plot([cold.median / limit] * 2, [row - 0.2, row + 0.3], "--", color=_BAR_COLOUR, zorder=2)


def _legend(figure: Any, *, has_bars: bool) -> None:
    make = import_module("matplotlib.lines").Line2D
    grey = "#444444"
    handles = [
        make([], [], color=grey, marker="o", alpha=0.35, linestyle="", label="a round"),
        make([], [], color=grey, marker="|", markersize=12, markeredgewidth=3, linestyle="", label="median"),
    ]
    if has_bars:
        handles.append(make([], [], color=_BAR_COLOUR, linestyle="--", label="promised: no later than this"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
