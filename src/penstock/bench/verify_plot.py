"""What a verification found, as a picture: the largest difference at every token."""

from collections.abc import Sequence
from importlib import import_module
from math import isfinite, log10
from pathlib import Path
from typing import Any

from penstock.bench.verify_results import Comparison, Series, VerifyResults

_SAME, _WITHIN, _BROKEN = "#5b9bd5", "#f6b26b", "#b00020"
_CURVES = ("#0b5394", "#d9730d", "#38761d", "#741b47", "#666666", "#bf9000", "#0097a7", "#a64d79", "#6aa84f")


def draw(results: VerifyResults, path: Path) -> None:
    """Above, what differs, on a logarithmic axis with a place for zero; below, a strip for every comparison, coloured
    by what each token is. On the left logits, on the right keys and values."""
    comparisons = results.comparisons
    figure = import_module("matplotlib.figure").Figure(
        figsize=(14.0, 5.0 + 0.27 * len(comparisons)), layout="constrained"
    )
    axes = figure.subplots(2, 2, sharex=True, height_ratios=[3.2, 0.27 * len(comparisons)])
    colours = {each.name: _CURVES[index % len(_CURVES)] for index, each in enumerate(_differing(results))}
    columns: tuple[tuple[str, list[Series | None]], ...] = (
        ("Logits", [each.logits for each in comparisons]),
        ("Keys and values, the worst of all layers", [each.cache for each in comparisons]),
    )
    for (curves, strips), (title, series) in zip(axes.T, columns, strict=True):
        pairs = [(each, own) for each, own in zip(comparisons, series, strict=True) if own is not None]
        _draw_curves(curves, title, pairs, colours, results)
        _draw_strips(strips, series, results)
    axes[1][0].set_yticks(
        range(len(comparisons)),
        [f"{each.name}   {'PASS' if each.passed else 'FAIL'}" for each in comparisons],
        fontsize=8.5,
    )
    axes[1][1].set_yticks([])
    machine = results.machine
    verdict = "all laws hold" if results.passed else "A LAW IS BROKEN"
    figure.suptitle(
        f"{results.model}, {results.dtype}: {verdict}\n"
        f"{results.kernels} kernels, {machine.cpu}, threads: {machine.num_threads}, torch {machine.torch}, "
        f"{machine.date[:10]}",
        fontsize=11,
    )
    _draw_legend(figure, axes)
    figure.savefig(path, dpi=120)


def _differing(results: VerifyResults) -> list[Comparison]:
    return [
        each
        for each in results.comparisons
        if any(series is not None and not series.all_same for series in (each.logits, each.cache))
    ]


def _draw_curves(
    axis: Any,
    title: str,
    pairs: list[tuple[Comparison, Series]],
    colours: dict[str, str],
    results: VerifyResults,
) -> None:
    values = [value for _, series in pairs for value in series.relative if value > 0 and isfinite(value)]
    low, high = min([results.tolerance, *values]), max([results.tolerance, *values])
    # Zeros have a band below the smallest difference; what is no number is drawn above the largest.
    top = high * 10
    band = max(log10(top / low) / 3, 0.6)  # decades
    zero, words, bottom = (low / 10 ** (band * share) for share in (0.5, 0.8, 1.0))
    for comparison, series in pairs:
        if not series.all_same:
            heights = [zero if value == 0 else min(value, high * 5) for value in series.relative]
            axis.plot(
                series.positions,
                heights,
                linestyle="none",
                marker=".",
                markersize=4,
                alpha=0.75,
                color=colours[comparison.name],
                label=comparison.name,
            )
    axis.axhline(results.tolerance, color=_BROKEN, linewidth=1, linestyle="--", label="tolerance")
    axis.axhspan(bottom, low / 10 ** (0.2 * band), color=_SAME, alpha=0.18, linewidth=0)
    num_same = sum(series.all_same for _, series in pairs)
    axis.text(
        0.5,
        words,
        f"{num_same} of {len(pairs)} comparisons are 0 at every token",
        transform=axis.get_yaxis_transform(),
        ha="center",
        va="center",
        fontsize=9,
    )
    axis.set_yscale("log")
    axis.set_ylim(bottom, top)
    _label_zero(axis, zero, low / 10 ** (0.2 * band))
    axis.axvline(
        results.num_prompt - 0.5, color="#999999", linewidth=1, linestyle=":", label="end of the prompt"
    )
    axis.set_title(title)
    axis.set_ylabel("largest difference,\nin parts of the largest value")
    axis.spines[["top", "right"]].set_visible(False)


def _label_zero(axis: Any, zero: float, low: float) -> None:
    """Decades as they are, and `0` where zeros are drawn."""
    ticker = import_module("matplotlib.ticker")
    powers = [power for power in range(-45, 40) if low < 10.0**power < axis.get_ylim()[1]]
    powers = powers[:: max(1, -(-len(powers) // 8))]
    axis.yaxis.set_major_locator(ticker.FixedLocator([zero, *(10.0**power for power in powers)]))
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    axis.set_yticklabels(["0", *(f"$10^{{{power}}}$" for power in powers)])


def _draw_strips(axis: Any, all_series: Sequence[Series | None], results: VerifyResults) -> None:
    for row, (comparison, series) in enumerate(zip(results.comparisons, all_series, strict=True)):
        if series is None:
            axis.text(0, row, "not compared", va="center", fontsize=8, color="#777777")
            continue
        for colour in (_SAME, _WITHIN, _BROKEN):
            places = [
                (position - 0.5, 1)
                for index, position in enumerate(series.positions)
                if _colour(comparison, series, index) == colour
            ]
            axis.broken_barh(places, (row - 0.36, 0.72), facecolors=colour, linewidth=0)
    axis.set_ylim(len(all_series) - 0.4, -0.6)
    axis.set_xlim(-0.01 * len(results.token_ids), 1.01 * len(results.token_ids))
    axis.axvline(results.num_prompt - 0.5, color="#999999", linewidth=1, linestyle=":")
    axis.set_xlabel("token (position in the prompt and what follows it)")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _colour(comparison: Comparison, series: Series, index: int) -> str:
    law = comparison.law
    if series.is_same[index]:
        return _SAME
    must_be_same = series.positions[index] < law.bits_until
    return _BROKEN if must_be_same or series.relative[index] > law.tolerance else _WITHIN


def _draw_legend(figure: Any, axes: Any) -> None:
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    patch = import_module("matplotlib.patches").Patch
    handles |= {
        "same bits": patch(color=_SAME),
        "differs as it may": patch(color=_WITHIN),
        "breaks the law": patch(color=_BROKEN),
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=9,
        markerscale=2.5,
    )
