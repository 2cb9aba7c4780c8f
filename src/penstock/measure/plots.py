"""What `tune` and `verify` found, as pictures. matplotlib is imported by name, so that nothing else needs it."""

from collections.abc import Sequence
from importlib import import_module
from math import isfinite, log10
from pathlib import Path
from typing import Any

from penstock.engine.profile import TuneProfile
from penstock.measure.compare import Comparison, Series
from penstock.measure.report import formula
from penstock.measure.tune import fit_error
from penstock.measure.verify import VerifyResults

# Light to dark with the past or the length; the mark of what was chosen stands out.
_BLUES = ("#9cc3e6", "#5b9bd5", "#2f75b5", "#0b3d6b", "#061f38")
_MARK = "#d9730d"
_SAME, _WITHIN, _BROKEN = "#5b9bd5", "#f6b26b", "#b00020"
_CURVES = ("#0b5394", "#d9730d", "#38761d", "#741b47", "#666666", "#bf9000", "#0097a7", "#a64d79", "#6aa84f")


def new_figure(width: float, height: float) -> Any:
    return import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def draw_tune(profile: TuneProfile, path: Path) -> None:
    """Against the chunk size: tokens/s for several pasts, time to first token, and activation memory."""
    figure = new_figure(16.5, 5.6)
    speed, first_token, memory = figure.subplots(1, 3)
    _draw_speed(speed, profile)
    _draw_first_token(first_token, profile)
    _draw_memory(memory, profile)
    key = profile.key
    error = fit_error(profile.coefficients, profile.measurements.steps)
    figure.suptitle(
        f"{profile.model_name}, {key.dtype}: {key.device}, threads: {key.threads}, kernels: {key.kernels}; "
        f"penstock {key.penstock}, torch {key.torch}, {profile.date[:10]}\n"
        f"step = {formula(profile.coefficients)}\n"
        f"fit error: median {error.median:.1%}, 95th percentile {error.p95:.1%}",
        fontsize=9.5,
    )
    figure.savefig(path, dpi=130)


def _draw_speed(axis: Any, profile: TuneProfile) -> None:
    steps = [each for each in profile.measurements.steps if each.num_tokens and not each.num_decodes]
    pasts = sorted({each.past for each in steps})
    for past, colour in zip(pasts, _shades(len(pasts)), strict=True):
        own = sorted((each for each in steps if each.past == past), key=lambda each: each.num_tokens)
        sizes = [each.num_tokens for each in own]
        label = f"past of {past:,}" if past else "no past"
        axis.plot(sizes, [each.num_tokens / each.seconds for each in own], "o-", color=colour, label=label)
        fitted = [each.num_tokens / profile.coefficients.seconds(each.shape) for each in own]
        axis.plot(sizes, fitted, ":", color=colour, linewidth=1.2)
    axis.plot([], [], ":", color="#666666", label="as fitted")
    _finish(axis, "Speed of a step", "prompt tokens per second", sorted({each.num_tokens for each in steps}))


def _draw_first_token(axis: Any, profile: TuneProfile) -> None:
    prefills = sorted(profile.measurements.prefills, key=lambda each: each.chunk)
    lengths = sorted({each.prompt_tokens for each in prefills})
    for length, colour in zip(lengths, _shades(len(lengths)), strict=True):
        own = [each for each in prefills if each.prompt_tokens == length]
        sizes, seconds = [each.chunk for each in own], [each.seconds for each in own]
        axis.plot(sizes, seconds, "o-", color=colour, label=f"{length:,} tokens")
    highest = 1.06 * max(each.seconds for each in prefills)
    label = f"best chunk: {profile.best_chunk:,}"
    axis.vlines(profile.best_chunk, 0, highest, color=_MARK, linestyle="--", label=label, zorder=0)
    sizes = sorted({each.chunk for each in prefills})
    _finish(axis, "Time to first token, by prompt length", "seconds", sizes)


def _draw_memory(axis: Any, profile: TuneProfile) -> None:
    memory = sorted(profile.measurements.memory, key=lambda each: each.chunk)
    sizes = [each.chunk for each in memory]
    expected = [each.expected_bytes / 2**20 for each in memory]
    axis.plot(sizes, expected, "-", color=_BLUES[2], label="by arithmetic")
    measured = [
        (each.chunk, each.measured_bytes / 2**20) for each in memory if each.measured_bytes is not None
    ]
    if measured:
        axis.plot(*zip(*measured, strict=True), "s", color=_MARK, label="measured, in a fresh process")
    length = f", prompt of {memory[0].prompt_tokens:,} tokens" if memory else ""
    _finish(axis, f"Activation memory{length}", "MiB", sizes)


def _finish(axis: Any, title: str, unit: str, sizes: Sequence[int]) -> None:
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


def _shades(count: int) -> list[str]:
    """Of as many lines, the darkest last."""
    if count == 1:
        return [_BLUES[3]]
    return [_BLUES[round(index * (len(_BLUES) - 1) / (count - 1))] for index in range(count)]


def draw_verify(results: VerifyResults, path: Path) -> None:
    """Above, what differs, on a logarithmic axis with a place for zero; below, a strip for every comparison, coloured
    by what each token is. On the left logits, on the right keys and values."""
    comparisons = results.comparisons
    figure = new_figure(14.0, 5.0 + 0.27 * len(comparisons))
    axes = figure.subplots(2, 2, sharex=True, height_ratios=[3.2, 0.27 * len(comparisons)])
    columns: tuple[tuple[str, list[Series | None]], ...] = (
        ("Logits", [each.logits for each in comparisons]),
        ("Keys and values, the worst of all layers", [each.cache for each in comparisons]),
    )
    for (curves, strips), (title, series) in zip(axes.T, columns, strict=True):
        _draw_curves(curves, series, results)
        curves.set_title(title)
        _draw_strips(strips, series, results)
    verdicts = [f"{each.name}   {'PASS' if each.passed else 'FAIL'}" for each in comparisons]
    axes[1][0].set_yticks(range(len(comparisons)), verdicts, fontsize=8.5)
    axes[1][1].set_yticks([])
    machine = results.machine
    verdict = "all laws hold" if results.passed else "A LAW IS BROKEN"
    figure.suptitle(
        f"{results.model}, {results.dtype}: {verdict}\n"
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
    own = [
        (index, comparison.name, series)
        for index, (comparison, series) in enumerate(zip(results.comparisons, all_series, strict=True))
        if series is not None
    ]
    values = [value for _, _, series in own for value in series.relative if value > 0 and isfinite(value)]
    low, high = min([results.tolerance, *values]), max([results.tolerance, *values])
    # Zeros have a band below the smallest difference; what is no number is drawn above the largest.
    top = high * 10
    band = max(log10(top / low) / 3, 0.6)  # decades
    edge, zero, words, bottom = (low / 10 ** (band * share) for share in (0.2, 0.5, 0.8, 1.0))
    for index, name, series in own:
        if not series.all_same:
            heights = [zero if value == 0 else min(value, high * 5) for value in series.relative]
            colour = _CURVES[index % len(_CURVES)]
            axis.plot(series.positions, heights, ".", markersize=4, alpha=0.75, color=colour, label=name)
    axis.axhline(results.tolerance, color=_BROKEN, linewidth=1, linestyle="--", label="tolerance")
    axis.axhspan(bottom, edge, color=_SAME, alpha=0.18, linewidth=0)
    num_same = sum(series.all_same for _, _, series in own)
    text = f"{num_same} of {len(own)} comparisons are 0 at every token"
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
    axis.axvline(
        results.num_prompt - 0.5, color="#999999", linewidth=1, linestyle=":", label="end of the prompt"
    )
    axis.set_ylabel("largest difference,\nin parts of the largest value")
    axis.spines[["top", "right"]].set_visible(False)


def _draw_strips(axis: Any, all_series: Sequence[Series | None], results: VerifyResults) -> None:
    for row, (comparison, series) in enumerate(zip(results.comparisons, all_series, strict=True)):
        if series is None:
            axis.text(0, row, "not compared", va="center", fontsize=8, color="#777777")
            continue
        colours = [_colour(comparison, series, index) for index in range(len(series.positions))]
        for colour in sorted(set(colours)):
            places = [
                (at - 0.5, 1) for at, own in zip(series.positions, colours, strict=True) if own == colour
            ]
            axis.broken_barh(places, (row - 0.36, 0.72), facecolors=colour, linewidth=0)
    axis.set_ylim(len(all_series) - 0.4, -0.6)
    axis.set_xlim(-0.01 * len(results.token_ids), 1.01 * len(results.token_ids))
    axis.axvline(results.num_prompt - 0.5, color="#999999", linewidth=1, linestyle=":")
    axis.set_xlabel("token (position in the prompt and what follows it)")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _colour(comparison: Comparison, series: Series, index: int) -> str:
    if series.is_same[index]:
        return _SAME
    must_be_same = series.positions[index] < comparison.law.bits_until
    return _BROKEN if must_be_same or series.relative[index] > comparison.law.tolerance else _WITHIN
