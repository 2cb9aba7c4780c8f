"""A sweep as a picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.bench.sweep_results import SweepResults
from penstock.bench.sweep_workload import Cell, Configuration
from penstock.bench.systems import SystemName

# From the shortest length to the longest: one hue from light to dark would hide the lines of baselines.
_COLOURS = ("#0b5394", "#d9730d", "#2e8b57", "#8e44ad", "#b8860b", "#5b9bd5", "#c0392b", "#555555")
_WHOLE, _AUTO = "whole", "auto"
_MIB = 2**20


@dataclass(frozen=True)
class _Line:
    """An engine's way to be drawn."""

    name: str
    systems: tuple[SystemName, ...]
    style: str
    marker: str
    marker_size: int = 5


_LINES = (
    _Line("Penstock", (SystemName.PENSTOCK, SystemName.PENSTOCK_WHOLE), "-", "o"),
    _Line("transformers", (SystemName.TRANSFORMERS, SystemName.TRANSFORMERS_CHUNKED), "--", "s"),
    _Line("llama.cpp", (SystemName.LLAMA_CPP,), ":", "^"),
    _Line("Penstock, auto", (SystemName.PENSTOCK_AUTO,), "", "*", 12),
)


@dataclass(frozen=True)
class _Point:
    """A median, and what its whiskers span."""

    value: float
    low: float
    high: float


Points = Callable[[Cell], _Point | None]


def draw(results: SweepResults, path: Path) -> None:
    """Against the chunk size: time to first token, tokens/s and, where measured, memory. A colour per length, a style
    per system; what is noisy is left out."""
    panels: list[tuple[str, str, Points, bool]] = [
        ("Time to first token", "seconds", lambda cell: _seconds(results, cell), True),
        ("Prefill speed", "prompt tokens per second", lambda cell: _speed(results, cell), False),
    ]
    if results.memory:
        panels.append(("Activation memory", "peak growth, cache aside (MiB)", _memory(results), False))
    # By name, so that the package needs matplotlib only here.
    figure = import_module("matplotlib.figure").Figure(
        figsize=(max(11.0, 5.6 * len(panels)), 5.8), layout="constrained"
    )
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, unit, points, is_log) in zip(axes, panels, strict=True):
        _draw_panel(axis, results, points)
        axis.set_title(title, fontweight="bold")
        axis.set_ylabel(unit)
        if is_log:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(import_module("matplotlib.ticker").LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.yaxis.set_minor_formatter(lambda value, _: "")
        else:
            axis.set_ylim(bottom=0)
    _legends(figure, results)
    machine, settings = results.machine, results.settings
    left_out = {each.cell for each in results.noisy if each.quantity == "first_token_s"}
    noisy = f"; {len(left_out)} noisy points left out" if left_out else ""
    figure.suptitle(
        f"{settings.model}, {settings.dtype}: {machine.cpu}, threads: {machine.num_threads}\n"
        f"medians of {settings.repeats}, whiskers from quartile to quartile{noisy}; penstock {machine.penstock}, "
        f"torch {machine.torch}, {machine.date[:10]}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_panel(axis: Any, results: SweepResults, points: Points) -> None:
    lengths, places = results.settings.lengths, _places(results)
    for index, length in enumerate(lengths):
        for rank, line in enumerate(_LINES):
            # Beside each other, so that no whisker covers another.
            shift = 0.08 * (rank % 3) + 0.025 * (index - (len(lengths) - 1) / 2) - 0.08
            known = [
                (places.index(_place(each)) + shift, point)
                for each in results.configurations
                if each.system in line.systems and (point := points(Cell(each, length))) is not None
            ]
            _draw_line(axis, known, line, _COLOURS[index % len(_COLOURS)])
    axis.set_xticks(range(len(places)), places)
    axis.set_xlim(-0.4, len(places) - 0.6)
    axis.set_xlabel("chunk size (tokens)")
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_line(axis: Any, known: Sequence[tuple[float, _Point]], line: _Line, colour: str) -> None:
    if known:
        known = sorted(known, key=lambda item: item[0])
        points = [point for _, point in known]
        axis.errorbar(
            [place for place, _ in known],
            [point.value for point in points],
            yerr=[
                [point.value - point.low for point in points],
                [point.high - point.value for point in points],
            ],
            color=colour,
            linestyle=line.style,
            marker=line.marker,
            markersize=line.marker_size,
            linewidth=1.6,
            elinewidth=1.0,
            capsize=3,
        )


def _places(results: SweepResults) -> list[str]:
    """Chunk sizes from left to right, then the whole prompt, then what Penstock chooses itself."""
    found = [_place(each) for each in results.configurations]
    sizes = sorted({place for place in found if place not in (_WHOLE, _AUTO)}, key=_tokens)
    return [*sizes, *(place for place in (_WHOLE, _AUTO) if place in found)]


def _place(configuration: Configuration) -> str:
    if configuration.system is SystemName.PENSTOCK_AUTO:
        return _AUTO
    return f"{configuration.chunk:,}" if configuration.chunk else _WHOLE


def _tokens(place: str) -> int:
    return int(place.replace(",", ""))


def _legends(figure: Any, results: SweepResults) -> None:
    make = import_module("matplotlib.lines").Line2D
    handles = [
        make([], [], color=_COLOURS[index % len(_COLOURS)], linewidth=3, label=f"{length:,} tokens")
        for index, length in enumerate(results.settings.lengths)
    ]
    systems = {each.system for each in results.configurations}
    handles += [
        make(
            [],
            [],
            color="#444444",
            linestyle=line.style,
            marker=line.marker,
            markersize=line.marker_size,
            label=line.name,
        )
        for line in _LINES
        if systems & set(line.systems)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


def _seconds(results: SweepResults, cell: Cell) -> _Point | None:
    figure = results.figure(cell, "first_token_s")
    return None if figure is None else _Point(figure.median, *figure.quartiles)


def _speed(results: SweepResults, cell: Cell) -> _Point | None:
    seconds = _seconds(results, cell)
    if seconds is None:
        return None
    return _Point(*(cell.prompt_tokens / value for value in (seconds.value, seconds.high, seconds.low)))


def _memory(results: SweepResults) -> Points:
    growths = {each.cell: each.growth.activation_bytes / _MIB for each in results.memory}

    def point(cell: Cell) -> _Point | None:
        value = growths.get(cell)
        return None if value is None else _Point(value, value, value)

    return point
