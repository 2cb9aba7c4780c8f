"""Times to the first token on a GPU as a picture, against the size of a chunk."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.bench.gpu_results import GpuResults, GpuSystem
from penstock.bench.gpu_targets import TARGETS, VLLM
from penstock.bench.gpu_workload import PLAN, GpuModel, GpuPlan, PrefillCase, sweep_prompts
from penstock.bench.spread import Spread

_COLOURS: dict[GpuSystem, str] = {"Penstock": "#0b5394", "transformers": "#d9730d"}
_VLLM_COLOUR = "#8e44ad"
_LIMIT_COLOUR = "#777777"
_LIMIT = "the card's limit"
_BESIDE = 0.2


def can_draw(results: GpuResults, plan: GpuPlan = PLAN) -> bool:
    """Whether any prompt was read whose times are shown."""
    return any(_chunks(results, plan, *prompt) for prompt in sweep_prompts(plan))


def draw(results: GpuResults, path: Path, plan: GpuPlan = PLAN) -> None:
    """A panel for each model whose chunks were swept."""
    prompts = [prompt for prompt in sweep_prompts(plan) if _chunks(results, plan, *prompt)]
    # By name, so that the package needs matplotlib only here.
    figure = import_module("matplotlib.figure").Figure(
        figsize=(max(7.0, 5.0 * len(prompts)), 5.2), layout="constrained"
    )
    axes = figure.subplots(1, len(prompts), squeeze=False)[0]
    for axis, (model, tokens) in zip(axes, prompts, strict=True):
        _draw_panel(axis, results, model, tokens, _chunks(results, plan, model, tokens))
    machine, card = results.machine, results.card
    figure.suptitle(
        f"Time to first token, one request, bfloat16, random weights: {card.name}\n"
        f"medians, whiskers from smallest to largest; torch {machine.torch}, "
        f"transformers {machine.transformers}, {machine.date[:10]}",
        fontsize=10,
    )
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)) | handles
    order = sorted(handles, key=lambda label: (label not in _COLOURS, label == _LIMIT))
    figure.legend(
        [handles[label] for label in order],
        order,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _chunks(results: GpuResults, plan: GpuPlan, model: GpuModel, tokens: int) -> list[int]:
    """The chunks with which that prompt was read, the whole of it last."""
    cases = [*(case for cases in plan.prefills.values() for case in cases), *plan.sweeps]
    chunks = {
        case.chunk
        for case in cases
        if (case.model, case.prompt_tokens) == (model, tokens) and results.figure(case.label)
    }
    return sorted(chunks, key=lambda chunk: chunk or tokens)


def _draw_panel(axis: Any, results: GpuResults, model: GpuModel, tokens: int, chunks: Sequence[int]) -> None:
    labels = [PrefillCase(model, tokens, chunk).label for chunk in chunks]
    for system in _COLOURS:
        known = [
            (place, found.spread)
            for place, label in enumerate(labels)
            if (found := results.figure(label, system)) is not None
        ]
        if known:
            _draw_line(axis, known, system)
    marks = [next((each for each in TARGETS if each.name == label), None) for label in labels]
    theirs = [(place, mark.vllm) for place, mark in enumerate(marks) if mark and mark.vllm]
    if theirs:
        _draw_reference(axis, theirs)
    limits = [mark.limit for mark in marks if mark and mark.limit]
    if limits:
        axis.axhline(min(limits), color=_LIMIT_COLOUR, linestyle=":", linewidth=1.2, label=_LIMIT)
    axis.set_title(f"{model}, {tokens:,} tokens", fontweight="bold")
    axis.set_xticks(range(len(chunks)), [f"{chunk:,}" if chunk else "whole" for chunk in chunks])
    axis.set_xlabel("chunk (tokens)")
    axis.set_ylabel("time to first token (ms)")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.margins(x=0.1, y=0.12)
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_line(axis: Any, known: Sequence[tuple[int, Spread]], system: GpuSystem) -> None:
    places, spreads = [place for place, _ in known], [spread for _, spread in known]
    medians = [spread.median for spread in spreads]
    axis.errorbar(
        places,
        medians,
        yerr=[
            [spread.median - spread.smallest for spread in spreads],
            [spread.largest - spread.median for spread in spreads],
        ],
        color=_COLOURS[system],
        marker="o",
        markersize=5,
        linewidth=1.8,
        capsize=3,
        label=system,
    )
    # Beside a line that falls steeply; below one that others lie above.
    shift, alignment = ((5, 6), "left") if system == "transformers" else ((0, -14), "center")
    for place, median in zip(places, medians, strict=True):
        _write(axis, f"{median:,.0f}", (place, median), shift, alignment, _COLOURS[system])


def _draw_reference(axis: Any, theirs: Sequence[tuple[int, float]]) -> None:
    """Beside Penstock's points, which would cover them."""
    places = [place + _BESIDE for place, _ in theirs]
    values = [value for _, value in theirs]
    axis.plot(
        places,
        values,
        linestyle="",
        marker="D",
        markersize=5,
        markerfacecolor="white",
        color=_VLLM_COLOUR,
        label=f"{VLLM}, reference, measured apart",
        zorder=4,
    )
    for place, value in zip(places, values, strict=True):
        _write(axis, f"{value:,.0f}", (place, value), (0, 7), "center", _VLLM_COLOUR)


def _write(
    axis: Any, text: str, point: tuple[float, float], shift: tuple[int, int], alignment: str, colour: str
) -> None:
    axis.annotate(
        text,
        point,
        shift,
        textcoords="offset points",
        ha=alignment,
        fontsize=7.5,
        color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8},
        zorder=5,
    )
