"""A result as a picture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.bench.results import Results
from penstock.bench.spread import Spread
from penstock.bench.systems import SystemName

# Penstock in blues, transformers in oranges: readable by the colour-blind too.
_COLOURS = {
    SystemName.PENSTOCK: "#0b5394",
    SystemName.PENSTOCK_WHOLE: "#5b9bd5",
    SystemName.PENSTOCK_UNTILED: "#b4d3ee",
    SystemName.PENSTOCK_TOKENWISE: "#7aa6c2",
    SystemName.TRANSFORMERS: "#d9730d",
    SystemName.TRANSFORMERS_CHUNKED: "#f6b26b",
}
_MIB = 2**20

Cells = Mapping[tuple[SystemName, int], Spread]


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


@dataclass(frozen=True)
class _Panel:
    title: str
    unit: str
    cells: Cells
    shows_growth: bool = False  # lines over the prompt's length; otherwise bars, side by side


def draw(results: Results, path: Path) -> None:
    """A panel per quantity, by length and system; whiskers from the smallest value to the largest."""
    panels = _panels(results)
    # By name, so that the package needs matplotlib only here.
    figure = import_module("matplotlib.figure").Figure(
        figsize=(max(7.5, 5.2 * len(panels)), 5.4), layout="constrained"
    )
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel, lambda name: name.label(results.settings.chunk))
    machine, settings = results.machine, results.settings
    figure.suptitle(
        f"{settings.model}, {settings.dtype}: {machine.cpu}, threads: {machine.num_threads}\n"
        f"medians, whiskers from smallest to largest; torch {machine.torch}, "
        f"transformers {machine.transformers}, {machine.date[:10]}",
        fontsize=10,
    )
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=5 if len(panels) == 3 else 3,
        frameon=False,
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _panels(results: Results) -> list[_Panel]:
    speeds = results.speeds
    prefill = {(each.system, each.prompt_tokens): each.prefill for each in speeds}
    decode = {(each.system, each.prompt_tokens): each.decode for each in speeds if each.decode}
    memory = {(each.system, each.prompt_tokens): _in_mib(each.activation_bytes) for each in results.memory}
    panels = [
        _Panel("Prefill", "prompt tokens per second", prefill),
        _Panel("Decode after the prompt", "tokens per second", decode),
        _Panel("Activation memory during prefill", "peak growth, cache aside (MiB)", memory, True),
    ]
    return [panel for panel in panels if panel.cells]


def _draw_panel(axis: Any, panel: _Panel, label: Callable[[SystemName], str]) -> None:
    cells = panel.cells
    lengths = sorted({length for _, length in cells})
    names = [name for name in SystemName if any(system is name for system, _ in cells)]
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        own = [length for length in lengths if (name, length) in cells]
        spreads = [cells[name, length] for length in own]
        medians = [spread.median for spread in spreads]
        style = {
            "yerr": [
                [spread.median - spread.smallest for spread in spreads],
                [spread.largest - spread.median for spread in spreads],
            ],
            "capsize": 2,
            "color": _COLOURS[name],
            "label": label(name),
        }
        texts = [f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in medians]
        if panel.shows_growth:
            axis.errorbar(own, medians, marker="o", **style)
            # Short prompts' labels would cover each other.
            axis.annotate(
                texts[-1], (own[-1], medians[-1]), (0, 5), textcoords="offset points", ha="center", fontsize=7
            )
        else:
            shift = (index - (len(names) - 1) / 2) * width
            places = [lengths.index(length) + shift for length in own]
            axis.bar_label(axis.bar(places, medians, 0.94 * width, **style), texts, padding=2, fontsize=7)
    ticks = lengths if panel.shows_growth else list(range(len(lengths)))
    axis.set_xticks(ticks, [f"{length:,}" for length in lengths])
    axis.set_title(panel.title)
    axis.set_xlabel("prompt length (tokens)")
    axis.set_ylabel(panel.unit)
    axis.margins(y=0.12)
    if panel.shows_growth:
        axis.margins(x=0.1)
        axis.set_ylim(bottom=min([0.0, *(spread.smallest for spread in cells.values())]))
    axis.spines[["top", "right"]].set_visible(False)


def _in_mib(spread: Spread) -> Spread:
    return Spread.of(value / _MIB for value in spread.values)
