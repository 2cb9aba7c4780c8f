"""A profile as a picture."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.bench.tune_measure import fit_error
from penstock.bench.tune_report import formula
from penstock.engine.profile import TuneProfile

# Light to dark with the past or the length; the mark of what was chosen stands out.
_BLUES = ("#9cc3e6", "#5b9bd5", "#2f75b5", "#0b3d6b", "#061f38")
_MARK = "#d9730d"


def draw(profile: TuneProfile, path: Path) -> None:
    """Against the chunk size: tokens/s for several pasts, time to first token, and activation memory."""
    # By name, so that the package needs matplotlib only here.
    figure = import_module("matplotlib.figure").Figure(figsize=(16.5, 5.6), layout="constrained")
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
    path.parent.mkdir(parents=True, exist_ok=True)
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
    axis.set_title("Speed of a step", fontweight="bold")
    axis.set_ylabel("prompt tokens per second")
    _finish(axis, sorted({each.num_tokens for each in steps}))


def _draw_first_token(axis: Any, profile: TuneProfile) -> None:
    prefills = profile.measurements.prefills
    lengths = sorted({each.prompt_tokens for each in prefills})
    for length, colour in zip(lengths, _shades(len(lengths)), strict=True):
        own = sorted((each for each in prefills if each.prompt_tokens == length), key=lambda each: each.chunk)
        axis.plot(
            [each.chunk for each in own],
            [each.seconds for each in own],
            "o-",
            color=colour,
            label=f"{length:,} tokens",
        )
    highest = max(each.seconds for each in prefills)
    label = f"best chunk: {profile.best_chunk:,}"
    axis.vlines(profile.best_chunk, 0, 1.06 * highest, color=_MARK, linestyle="--", label=label, zorder=0)
    axis.set_title("Time to first token, by prompt length", fontweight="bold")
    axis.set_ylabel("seconds")
    _finish(axis, sorted({each.chunk for each in prefills}))


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
    axis.set_title(f"Activation memory{length}", fontweight="bold")
    axis.set_ylabel("MiB")
    _finish(axis, sizes)


def _finish(axis: Any, sizes: Sequence[int]) -> None:
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
