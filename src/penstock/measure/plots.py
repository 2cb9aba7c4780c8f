"""What `tune` and `verify` found, as pictures. matplotlib is imported by name, so that nothing else needs it."""

from collections.abc import Sequence
from importlib import import_module
from math import isfinite, log10
from pathlib import Path
from typing import Any

from penstock.engine.profile import TuneProfile
from penstock.measure.compare import Series
from penstock.measure.report import formula
from penstock.measure.tune import fit_error
from penstock.measure.verify import VerifyResults

Lines = dict[str, dict[int, float]]  # by label: a value at each chunk size

# Light to dark with the past or the length; the mark of what was chosen stands out.
_BLUES = ("#9cc3e6", "#5b9bd5", "#2f75b5", "#0b3d6b", "#061f38")
_MARK = "#d9730d"
_SAME, _WITHIN, _BROKEN = "#5b9bd5", "#f6b26b", "#b00020"
_CURVES = ("#0b5394", "#d9730d", "#38761d", "#741b47", "#666666", "#bf9000", "#0097a7", "#a64d79", "#6aa84f")


def _new_figure(width: float, height: float) -> Any:
    return import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def draw_tune(profile: TuneProfile, path: Path) -> None:
    """Against the chunk size: tokens/s for several pasts, time to first token, and activation memory."""
    key, measured = profile.key, profile.measurements
    figure = _new_figure(16.5, 5.6)
    speed, first_token, memory = figure.subplots(1, 3)

    speeds: Lines = {}
    fitted: Lines = {}
    for step in sorted(measured.steps, key=lambda step: (step.past, step.num_tokens)):
        if step.num_tokens and not step.num_decodes:
            label, size = f"past of {step.past:,}" if step.past else "no past", step.num_tokens
            speeds.setdefault(label, {})[size] = size / step.seconds
            fitted.setdefault(label, {})[size] = size / profile.coefficients.seconds(step.shape)
    _draw_lines(speed, speeds)
    _draw_lines(speed, fitted, ":", is_labelled=False)
    speed.plot([], [], ":", color="#666666", label="as fitted")
    _finish(speed, "Speed of a step", "prompt tokens per second")

    times: Lines = {}
    for prefill in sorted(measured.prefills, key=lambda prefill: (prefill.prompt_tokens, prefill.chunk)):
        times.setdefault(f"{prefill.prompt_tokens:,} tokens", {})[prefill.chunk] = prefill.seconds
    _draw_lines(first_token, times)
    highest = 1.06 * max(prefill.seconds for prefill in measured.prefills)
    label = f"best chunk: {profile.best_chunk:,}"
    first_token.vlines(profile.best_chunk, 0, highest, color=_MARK, linestyle="--", label=label, zorder=0)
    _finish(first_token, "Time to first token, by prompt length", "seconds")

    samples = sorted(measured.memory, key=lambda each: each.chunk)
    _draw_lines(memory, {"by arithmetic": {each.chunk: each.expected_bytes / 2**20 for each in samples}}, "-")
    grown = {each.chunk: each.measured_bytes / 2**20 for each in samples if each.measured_bytes is not None}
    if grown:
        label = "measured, in a fresh process"
        memory.plot(list(grown), list(grown.values()), "s", color=_MARK, label=label)
    length = f", prompt of {samples[0].prompt_tokens:,} tokens" if samples else ""
    _finish(memory, f"Activation memory{length}", "MiB")

    figure.suptitle(
        f"{profile.model_name}, {key.dtype}: {key.device}, threads: {key.threads}, kernels: {key.kernels}; "
        f"penstock {key.penstock}, torch {key.torch}, {profile.date[:10]}\n"
        f"step = {formula(profile.coefficients)}\n"
        f"fit error: {fit_error(profile.coefficients, measured.steps)}",
        fontsize=9.5,
    )
    figure.savefig(path, dpi=130)


def _draw_lines(axis: Any, lines: Lines, style: str = "o-", *, is_labelled: bool = True) -> None:
    """In shades of one hue, the darkest last."""
    last = len(lines) - 1
    for index, (label, points) in enumerate(lines.items()):
        colour = _BLUES[round(index * (len(_BLUES) - 1) / last) if last else 3]
        axis.plot(
            list(points), list(points.values()), style, color=colour, label=label if is_labelled else None
        )


def _finish(axis: Any, title: str, unit: str) -> None:
    sizes = sorted({int(x) for line in axis.lines for x in line.get_xdata()})
    axis.set_title(title, fontweight="bold")
    axis.set_ylabel(unit)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("chunk size (tokens)")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_ylim(0, 1.22 * axis.dataLim.ymax)  # room for the legend
    axis.grid(color="#e2e2e2", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.legend(loc="upper center", ncols=3, frameon=False, fontsize=9, columnspacing=1.2)
    axis.spines[["top", "right"]].set_visible(False)


def draw_verify(results: VerifyResults, path: Path) -> None:
    """Above, what differs, on a logarithmic axis with a place for zero; below, a strip for every comparison, coloured
    by what each token is. On the left logits, on the right keys and values."""
    comparisons = results.comparisons
    figure = _new_figure(14.0, 5.0 + 0.27 * len(comparisons))
    axes = figure.subplots(2, 2, sharex=True, height_ratios=[3.2, 0.27 * len(comparisons)])
    columns: tuple[tuple[str, list[Series | None]], ...] = (
        ("Logits", [each.logits for each in comparisons]),
        ("Keys and values, the worst of all layers", [each.cache for each in comparisons]),
    )
    for (curves, strips), (title, series) in zip(axes.T, columns, strict=True):
        _draw_curves(curves, series, results)
        curves.set_title(title)
        _draw_strips(strips, series, results)
        for axis in (curves, strips):
            at = results.num_prompt - 0.5
            axis.axvline(at, color="#999999", linewidth=1, linestyle=":", label="end of the prompt")
            axis.spines[["top", "right"]].set_visible(False)
    verdicts = [f"{each.name}   {'PASS' if each.passed else 'FAIL'}" for each in comparisons]
    axes[1][0].set_yticks(range(len(comparisons)), verdicts, fontsize=8.5)
    axes[1][1].set_yticks([])
    machine = results.machine
    figure.suptitle(
        f"{results.model}, {results.dtype}: {'all laws hold' if results.passed else 'A LAW IS BROKEN'}\n"
        f"{results.kernels} kernels, {machine.cpu}, threads: {machine.num_threads}, torch {machine.torch}, "
        f"{machine.date[:10]}",
        fontsize=11,
    )
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    patch = import_module("matplotlib.patches").Patch
    for label, colour in (("same bits", _SAME), ("differs as it may", _WITHIN), ("breaks the law", _BROKEN)):
        handles[label] = patch(color=colour)
    place = {"loc": "outside lower center", "ncols": 5, "frameon": False, "fontsize": 9, "markerscale": 2.5}
    figure.legend(handles.values(), handles.keys(), **place)
    figure.savefig(path, dpi=120)


def _draw_curves(axis: Any, all_series: Sequence[Series | None], results: VerifyResults) -> None:
    """What differs, on a logarithmic axis. Zeros have a band below the smallest difference; what is no number is
    above the largest."""
    own = {index: series for index, series in enumerate(all_series) if series is not None}
    values = [value for series in own.values() for value in series.relative if value > 0 and isfinite(value)]
    low, high = min([results.tolerance, *values]), max([results.tolerance, *values])
    top = high * 10
    band = max(log10(top / low) / 3, 0.6)  # decades
    edge, zero, words, bottom = (low / 10 ** (band * share) for share in (0.2, 0.5, 0.8, 1.0))
    for index, series in own.items():
        if not series.all_same:
            heights = [zero if value == 0 else min(value, high * 5) for value in series.relative]
            style = {"color": _CURVES[index % len(_CURVES)], "label": results.comparisons[index].name}
            axis.plot(series.positions, heights, ".", markersize=4, alpha=0.75, **style)
    axis.axhline(results.tolerance, color=_BROKEN, linewidth=1, linestyle="--", label="tolerance")
    axis.axhspan(bottom, edge, color=_SAME, alpha=0.18, linewidth=0)
    text = f"{sum(each.all_same for each in own.values())} of {len(own)} comparisons are 0 at every token"
    centred = {"ha": "center", "va": "center", "fontsize": 9}
    axis.text(0.5, words, text, transform=axis.get_yaxis_transform(), **centred)
    axis.set_yscale("log")
    axis.set_ylim(bottom, top)
    # Decades as they are, and `0` where zeros are drawn.
    powers = [power for power in range(-45, 40) if edge < 10.0**power < top]
    powers = powers[:: max(1, -(-len(powers) // 8))]
    labels = ["0", *(f"$10^{{{power}}}$" for power in powers)]
    axis.set_yticks([zero, *(10.0**power for power in powers)], labels)
    axis.minorticks_off()
    axis.set_ylabel("largest difference,\nin parts of the largest value")


def _draw_strips(axis: Any, all_series: Sequence[Series | None], results: VerifyResults) -> None:
    """A row for each comparison, coloured by what each token is."""
    for row, (comparison, series) in enumerate(zip(results.comparisons, all_series, strict=True)):
        if series is None:
            axis.text(0, row, "not compared", va="center", fontsize=8, color="#777777")
            continue
        places: dict[str, list[tuple[float, int]]] = {}
        for at, is_same, relative in zip(series.positions, series.is_same, series.relative, strict=True):
            is_broken = at < comparison.law.bits_until or relative > comparison.law.tolerance
            colour = _SAME if is_same else _BROKEN if is_broken else _WITHIN
            places.setdefault(colour, []).append((at - 0.5, 1))
        for colour, bars in sorted(places.items()):
            axis.broken_barh(bars, (row - 0.36, 0.72), facecolors=colour, linewidth=0)
    axis.set_ylim(len(all_series) - 0.4, -0.6)
    axis.set_xlim(-0.01 * len(results.token_ids), 1.01 * len(results.token_ids))
    axis.set_xlabel("token (position in the prompt and what follows it)")
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)
