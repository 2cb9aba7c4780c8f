"""A result of serving as a picture."""

from collections.abc import Callable, Sequence
from importlib import import_module
from math import nan
from pathlib import Path
from typing import Any

from penstock.bench.serve_results import ServeResults, StallRun
from penstock.bench.serve_workload import Variant

# Unchunked in orange, what keeps streams going in blues: readable by the colour-blind too.
_COLOURS = {
    Variant.UNCHUNKED: "#d9730d",
    Variant.PREFILL_FIRST: "#b8860b",
    Variant.INTERLEAVED: "#5b9bd5",
    Variant.DECODE_PRIORITY: "#7aa6c2",
    Variant.MIXED: "#0b5394",
}
_SHADE = "#ececec"
_TEXT = "#222222"


def draw(results: ServeResults, path: Path) -> None:
    """Left, the gaps between the streams' tokens over time, a panel per variant; right, what each costs."""
    variants = [variant for variant in Variant if results.of_variant(variant)]
    # By name, so that the package needs matplotlib only here.
    figure = import_module("matplotlib.figure").Figure(figsize=(13, 9.5), layout="constrained")
    over_time, totals = figure.subfigures(1, 2, width_ratios=(2.1, 1))
    axes = over_time.subplots(len(variants), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    runs = [_typical(results.of_variant(variant)) for variant in variants]
    for axis, run in zip(axes, runs, strict=True):
        _draw_gaps(axis, run, results.settings.workload.stall_chunk)
    _set_scales(axes, runs)
    for axis, run in zip(axes, runs, strict=True):
        _mark_longest(axis, run)
    over_time.supylabel("time from a stream's token to its next (ms)", fontsize=10)
    axes[-1].set_xlabel("seconds since the long prompt arrived (shaded: until its first token)")
    _draw_totals(totals, results, variants)
    machine, settings = results.machine, results.settings
    work = settings.workload
    figure.suptitle(
        f"{work.streams} streams decode, a prompt of {work.long_prompt:,} tokens arrives\n"
        f"{settings.model}, {settings.dtype}: {machine.cpu}, threads: {machine.num_threads}, "
        f"torch {machine.torch}, {machine.date[:10]}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _typical(runs: Sequence[StallRun]) -> StallRun:
    """The run with the median longest stall (of two in the middle, the better one)."""
    return sorted(runs, key=lambda run: run.longest_gap.seconds)[(len(runs) - 1) // 2]


def _draw_gaps(axis: Any, run: StallRun, chunk: int) -> None:
    """A gap is a line from token to token at the height of its length, so a stall is long and high."""
    colour = _COLOURS[run.variant]
    axis.axvspan(0.0, run.first_token_s, color=_SHADE, zorder=0)
    gaps = run.gaps
    heights = [1000 * gap.seconds for gap in gaps]
    axis.hlines(
        heights,
        [gap.start_s for gap in gaps],
        [gap.end_s for gap in gaps],
        color=colour,
        linewidth=1.6,
        zorder=2,
    )
    axis.plot([gap.end_s for gap in gaps], heights, ".", color=colour, markersize=2.5, zorder=3)
    axis.set_title(run.variant.label(chunk), loc="left", fontsize=10, fontweight="bold")
    axis.grid(axis="y", color="#d5d5d5", linewidth=0.5, zorder=1)
    axis.spines[["top", "right"]].set_visible(False)


def _mark_longest(axis: Any, run: StallRun) -> None:
    """A label above the longest gap, moved inwards where it would leave the panel."""
    gap = run.longest_gap
    middle, height = (gap.start_s + gap.end_s) / 2, 1000 * gap.seconds
    left, right = axis.get_xlim()
    margin = 0.1 * (right - left)
    axis.plot([middle], [height], "v", color=_TEXT, markersize=5, zorder=4)
    axis.annotate(
        f"longest stall: {_duration(gap.seconds)}",
        (min(max(middle, left + margin), right - margin), height),
        (0, 7),
        textcoords="offset points",
        ha="center",
        fontsize=9,
        color=_TEXT,
    )


def _set_scales(axes: Sequence[Any], runs: Sequence[StallRun]) -> None:
    """Logarithmic, with room above the longest stall for its label."""
    seconds = [gap.seconds for run in runs for gap in run.gaps]
    axes[0].set_yscale("log")
    axes[0].set_ylim(1000 * min(seconds) / 1.5, 1000 * max(seconds) * 6)
    for axis in axes:
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.yaxis.set_minor_formatter(lambda value, _: "")


def _draw_totals(figure: Any, results: ServeResults, variants: Sequence[Variant]) -> None:
    stall, speed = figure.subplots(2, 1)
    _draw_bars(stall, results, variants, lambda run: run.longest_gap.seconds, _duration)
    stall.set_title("Longest stall of a stream (s)", fontsize=10, fontweight="bold")
    _draw_bars(speed, results, variants, lambda run: run.tokens_per_s, lambda value: f"{value:,.0f}")
    speed.set_title("Throughput (all tokens/s)", fontsize=10, fontweight="bold")


def _draw_bars(
    axis: Any,
    results: ServeResults,
    variants: Sequence[Variant],
    value: Callable[[StallRun], float],
    label: Callable[[float], str],
) -> None:
    """Medians; whiskers from the smallest value to the largest where there are several."""
    spreads = [results.spread_of(variant, value) for variant in variants]
    medians = [spread.median for spread in spreads]
    places = range(len(variants))
    whiskers = [
        [spread.median - spread.smallest if len(spread.values) > 1 else nan for spread in spreads],
        [spread.largest - spread.median if len(spread.values) > 1 else nan for spread in spreads],
    ]
    colours = [_COLOURS[variant] for variant in variants]
    axis.barh(places, medians, 0.65, color=colours, xerr=whiskers, capsize=2, ecolor="#444444")
    for place, spread in zip(places, spreads, strict=True):
        axis.annotate(
            label(spread.median),
            (spread.largest, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axis.set_yticks(places, [variant.value for variant in variants], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * max(spread.largest for spread in spreads))  # room for the labels
    axis.spines[["top", "right"]].set_visible(False)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
