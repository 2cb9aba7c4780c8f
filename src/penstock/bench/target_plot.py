"""A result of latency targets as a picture."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.bench.serve_gaps import percentile
from penstock.bench.target_results import SLACK, ArrivalRun, TargetResults
from penstock.bench.target_workload import Sizing

# By target, from the tightest; fixed chunks are grey.
_COLOURS = ("#0b5394", "#2e8b57", "#d9730d", "#8e44ad", "#b8860b", "#c0392b")
_GREY = "#777777"
_LINE = "#c0392b"


def draw(results: TargetResults, path: Path) -> None:
    """Left, the gaps between the streams' tokens over time, a panel for each target; right, when the prompt's first
    token comes against how long the streams wait, for fixed chunks and for targets."""
    targets = [verdict.target_ms for verdict in results.verdicts]
    # By name, so that the package needs matplotlib only here.
    figure = import_module("matplotlib.figure").Figure(
        figsize=(14, max(6.5, 2.6 * len(targets) + 1.4)), layout="constrained"
    )
    over_time, trade = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    axes = over_time.subplots(len(targets), 1, sharex=True, squeeze=False)[:, 0]
    for index, (axis, target) in enumerate(zip(axes, targets, strict=True)):
        _draw_gaps(axis, results, target, _COLOURS[index % len(_COLOURS)])
    axes[-1].set_xlabel("seconds since the long prompt arrived")
    over_time.supylabel("time from a stream's token to its next (ms)", fontsize=10)
    _target_legend(over_time)
    _draw_trade(trade.subplots(), results, targets)
    trade.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    machine, settings = results.machine, results.settings
    work = settings.workload
    figure.suptitle(
        f"{work.streams} streams decode, a prompt of {work.prompt_tokens:,} tokens arrives\n"
        f"{settings.model}, {settings.dtype}: {machine.cpu}, threads: {machine.num_threads}, "
        f"penstock {machine.penstock}, torch {machine.torch}, {machine.date[:10]}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _typical(runs: Sequence[ArrivalRun]) -> ArrivalRun:
    """The run with the median time to the first token (of two in the middle, the shorter)."""
    return sorted(runs, key=lambda run: run.first_token_s)[(len(runs) - 1) // 2]


def _draw_gaps(axis: Any, results: TargetResults, target_ms: int, colour: str) -> None:
    """A gap is a dot where it ends, at the height of its length."""
    run = _typical(results.of(Sizing(target_ms=target_ms)))
    heights = [1000 * gap.seconds for gap in run.gaps]
    axis.plot([gap.end_s for gap in run.gaps], heights, ".", color=colour, markersize=4, zorder=3)
    axis.axhline(target_ms, color=_LINE, linewidth=1.3, zorder=2)
    axis.axhline(SLACK * target_ms, color=_LINE, linewidth=1.0, linestyle="--", zorder=2)
    # What is far off is drawn too, but one long gap must not hide all others.
    axis.set_ylim(0, min(max(1.6 * target_ms, 1.15 * max(heights)), 4 * target_ms))
    above = sum(height > 4 * target_ms for height in heights)
    more = f" ({above} gaps are higher)" if above else ""
    verdict = results.verdict(target_ms)
    reach = "" if verdict.is_reachable else ", out of reach"
    axis.set_title(
        f"target {target_ms:,} ms{reach}: {verdict.share:.1%} within {SLACK * target_ms:g} ms; shown: "
        f"round {run.round_index + 1}{more}",
        loc="left",
        fontsize=10,
        fontweight="bold",
    )
    axis.grid(axis="y", color="#dddddd", linewidth=0.5, zorder=1)
    axis.spines[["top", "right"]].set_visible(False)


def _target_legend(figure: Any) -> None:
    make = import_module("matplotlib.lines").Line2D
    handles = [
        make([], [], color=_GREY, marker=".", linestyle="", label="a gap, where it ends"),
        make([], [], color=_LINE, linewidth=1.3, label="target"),
        make([], [], color=_LINE, linewidth=1.0, linestyle="--", label=f"{SLACK:g} times the target"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _draw_trade(axis: Any, results: TargetResults, targets: Sequence[int]) -> None:
    """Medians over rounds of the first token, 95th percentiles over all gaps; whiskers span the rounds."""
    fixed = [each for each in results.sizings if each.fixed is not None]
    points = {each: _point(results, each) for each in results.sizings}
    if fixed:
        _draw_points(axis, results, fixed, _GREY, "o", 5, "-", "fixed chunk (tokens beside it)")
        for each in fixed:
            # A white ground, so that no line runs through the number.
            axis.annotate(
                f"{each.fixed:,}",
                points[each],
                (0, -9),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=9,
                color=_GREY,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
                zorder=4,
            )
    for index, target in enumerate(targets):
        colour = _COLOURS[index % len(_COLOURS)]
        _draw_points(
            axis, results, [Sizing(target_ms=target)], colour, "*", 15, "", f"auto, target {target:,} ms"
        )
        axis.axvline(SLACK * target, color=colour, linewidth=1.0, linestyle="--", zorder=2)
    axis.plot([], [], color="#444444", linewidth=1.0, linestyle="--", label=f"{SLACK:g} times a target")
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(import_module("matplotlib.ticker").LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.xaxis.set_minor_formatter(lambda value, _: "")
    axis.set_ylim(0, 1.12 * max(results.first_token(each).largest for each in results.sizings))
    axis.set_xlabel("95th percentile of the streams' gaps while the prompt is read (ms)")
    axis.set_ylabel("time to the prompt's first token (s)")
    axis.set_title("Lower left is better", fontsize=10, fontweight="bold", loc="left")
    axis.grid(color="#e5e5e5", linewidth=0.5, zorder=0)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_points(
    axis: Any,
    results: TargetResults,
    sizings: Sequence[Sizing],
    colour: str,
    marker: str,
    marker_size: int,
    style: str,
    label: str,
) -> None:
    points = [_point(results, each) for each in sizings]
    spreads = [results.first_token(each) for each in sizings]
    axis.errorbar(
        [x for x, _ in points],
        [y for _, y in points],
        yerr=[
            [spread.median - spread.smallest for spread in spreads],
            [spread.largest - spread.median for spread in spreads],
        ],
        color=colour,
        marker=marker,
        markersize=marker_size,
        linestyle=style,
        linewidth=1.4,
        elinewidth=1.0,
        capsize=3,
        label=label,
        zorder=3,
    )


def _point(results: TargetResults, sizing: Sizing) -> tuple[float, float]:
    """Milliseconds of waiting, seconds to the first token."""
    return 1000 * percentile(results.gap_seconds(sizing), 95), results.first_token(sizing).median
