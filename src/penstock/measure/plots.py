"""What `tune` and `verify` found, as pictures."""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from penstock.engine.profile import TuneProfile
from penstock.measure.compare import Series
from penstock.measure.report import formula
from penstock.measure.tune import fit_error
from penstock.measure.verify import VerifyResults
from penstock.pictures import Panel, draw, finish, new_figure

_SAME, _WITHIN, _BROKEN = "#5b9bd5", "#f6b26b", "#b00020"
_MEANINGS = {"same bits": _SAME, "differs as it may": _WITHIN, "breaks the law": _BROKEN}


def draw_tune(profile: TuneProfile, path: Path) -> None:
    """Against the chunk size: tokens/s for several pasts, time to first token, and activation memory."""
    key, measured = profile.key, profile.measurements
    speeds: dict[str, dict[str, list[float]]] = {}
    fitted: list[tuple[str, float]] = []
    for step in sorted(measured.steps, key=lambda step: (step.past, step.num_tokens)):
        if step.num_tokens and not step.num_decodes:
            size, label = step.num_tokens, f"past of {step.past:,}" if step.past else "no past"
            speeds.setdefault(label, {})[f"{size:,}"] = [size / step.seconds]
            fitted.append((f"{size:,}", size / profile.coefficients.seconds(step.shape)))
    times: dict[str, dict[str, list[float]]] = {}
    for each in sorted(measured.prefills, key=lambda each: (each.prompt_tokens, each.chunk)):
        times.setdefault(f"{each.prompt_tokens:,} tokens", {})[f"{each.chunk:,}"] = [each.seconds]
    samples = sorted(measured.memory, key=lambda each: each.chunk)
    expected = {f"{each.chunk:,}": [each.expected_bytes / 2**20] for each in samples}
    grown = [(f"{each.chunk:,}", each.measured_bytes / 2**20) for each in samples if each.measured_bytes]
    length = f", prompt of {samples[0].prompt_tokens:,} tokens" if samples else ""
    x_label, best = "chunk size (tokens)", f"best chunk: {profile.best_chunk:,}"
    speed = Panel("Speed of a step", "prompt tokens per second", speeds, x_label, "lines")
    memory = Panel(f"Activation memory{length}", "MiB", {"by arithmetic": expected}, x_label, "lines")
    panels = [
        replace(speed, marks={"as fitted": fitted}),
        Panel(f"Time to first token; {best}", "seconds", times, x_label, "lines"),
        replace(memory, marks={"in a fresh process": grown} if grown else {}),
    ]
    title = (
        f"{profile.model_name}, {key.dtype}: {key.device}, threads: {key.threads}, kernels: {key.kernels}; "
        f"penstock {key.penstock}, torch {key.torch}, {profile.date[:10]}\n"
        f"step = {formula(profile.coefficients)}\n"
        f"fit error: {fit_error(profile.coefficients, measured.steps)}"
    )
    draw(path, title, panels)


def draw_verify(results: VerifyResults, path: Path) -> None:
    """Above, what differs, on a logarithmic axis with a place for zero; below, a strip for every comparison, coloured
    by what each token is. On the left logits, on the right keys and values."""
    comparisons = results.comparisons
    figure = new_figure(14.0, 5.0 + 0.27 * len(comparisons))
    axes = figure.subplots(2, 2, sharex=True, height_ratios=[3.2, 0.27 * len(comparisons)])
    columns = {
        "Logits": [each.logits for each in comparisons],
        "Keys and values (worst layer)": [each.cache for each in comparisons],
    }
    for (curves, strips), (title, series) in zip(axes.T, columns.items(), strict=True):
        compared = [each for each in series if each is not None]
        num_same = sum(each.all_same for each in compared)
        curves.set_title(
            f"{title}: 0 at every token in {num_same} of {len(compared)} comparisons", fontsize=10
        )
        _draw_curves(curves, series, results)
        _draw_strips(strips, series, results)
        for axis in (curves, strips):
            at = results.num_prompt - 0.5
            axis.axvline(at, color="#999999", linewidth=1, linestyle=":", label="end of the prompt")
            axis.spines[["top", "right"]].set_visible(False)
    verdicts = [f"{each.name}   {'PASS' if each.passed else 'FAIL'}" for each in comparisons]
    axes[1][0].set_yticks(range(len(comparisons)), verdicts, fontsize=8.5)
    axes[1][1].set_yticks([])
    for label, colour in _MEANINGS.items():
        axes[0][0].plot([], [], "s", color=colour, label=label)
    machine = results.machine
    title = (
        f"{results.model}, {results.dtype}: {'all laws hold' if results.passed else 'A LAW IS BROKEN'}\n"
        f"{results.kernels} kernels, {machine.cpu}, threads: {machine.num_threads}, torch {machine.torch}, "
        f"{machine.date[:10]}"
    )
    finish(figure, axes[0], title, path)


def _draw_curves(axis: Any, all_series: Sequence[Series | None], results: VerifyResults) -> None:
    """What differs. What is no number is above the largest."""
    sizes = [value for series in all_series if series is not None for value in series.relative]
    seen = [results.tolerance, *(value for value in sizes if value > 0 and isfinite(value))]
    for index, series in enumerate(all_series):
        if series is not None and not series.all_same:
            heights = [min(value, 5 * max(seen)) for value in series.relative]
            style = {"color": f"C{index % 10}", "label": results.comparisons[index].name}
            axis.plot(series.positions, heights, ".", markersize=4, alpha=0.75, **style)
    axis.axhline(results.tolerance, color=_BROKEN, linewidth=1, linestyle="--", label="tolerance")
    axis.set_yscale("symlog", linthresh=min(seen))
    axis.set_ylim(-min(seen) / 4, 10 * max(seen))
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
