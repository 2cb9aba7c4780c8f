"""A plan as a picture: what each chunk size holds at its peak, by part."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import SettingError
from penstock.plan import format_bytes
from penstock.plan.prompt_plan import Plan

_ENDINGS = (".png", ".svg", ".pdf")
# What does not depend on the chunk in greys, activations in colours that the colour-blind can tell apart.
_FIXED = {"weights": "#9e9e9e", "K/V cache": "#c9c9c9", "recurrent states": "#e6e6e6"}
_PARTS = {
    "input": ("inputs and rotary tables", "#332288"),
    "hidden": ("hidden states", "#0077bb"),
    "projection": ("projections", "#33bbee"),
    "attention": ("attention", "#009988"),
    "delta_net": ("delta net", "#ddaa33"),
    "mlp": ("MLP or experts", "#ee7733"),
    "logits": ("logits", "#cc3311"),
}
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def require_plotting(path: Path) -> None:
    """Refuse what cannot be drawn, before any work."""
    if path.suffix.lower() not in _ENDINGS:
        raise SettingError("plot", str(path), f"a name that ends in {', '.join(_ENDINGS)}")
    if not path.parent.is_dir():
        raise SettingError("plot", str(path), because=f"there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise SettingError(
            "plot", str(path), because="it needs matplotlib, which is not installed: pip install matplotlib"
        )


def draw(made: Plan, path: Path) -> None:
    """Everything on the left, the activations alone on the right; one bar for each chunk size."""
    require_plotting(path)
    figure = import_module("matplotlib.figure").Figure(figsize=(12.5, 5.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_total(left, made)
    _draw_activations(right, made)
    decodes = f", {made.num_decodes} answers beside it" if made.num_decodes else ""
    figure.suptitle(
        f"{_short(made.model)}: memory of a {made.prompt_tokens:,}-token prompt by chunk size"
        f"\n{made.dtype}, {made.kernels} kernels{decodes}; by arithmetic from the model's shape",
        fontsize=12,
    )
    handles: dict[str, Any] = {}
    for axis in (left, right):
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise SettingError("plot", str(path), because=error.strerror or str(error)) from error


def _draw_total(axis: Any, made: Plan) -> None:
    fixed = dict(zip(_FIXED, (made.weights_bytes, made.kv_cache_bytes, made.recurrent_bytes), strict=True))
    layers = [(name, _FIXED[name], [num_bytes] * len(made.rows)) for name, num_bytes in fixed.items()]
    unit = _unit(max(made.budget_bytes or 0, *(row.total_bytes for row in made.rows)))
    _stack(axis, made, layers + _activation_layers(made), unit)
    _line(axis, made.rows[-1].total_bytes, unit, "one pass", "#222222", "--")
    if made.budget_bytes is not None:
        _line(axis, made.budget_bytes, unit, _budget_label(made.budget_bytes), "#cc3311", "-")
    axis.set_title("all memory", fontsize=11)


def _draw_activations(axis: Any, made: Plan) -> None:
    unit = _unit(made.rows[-1].activations.peak_bytes)
    _stack(axis, made, _activation_layers(made), unit)
    _line(axis, made.rows[-1].activations.peak_bytes, unit, "one pass", "#222222", "--")
    most = made.rows[-1].activations.peak_bytes
    if made.budget_bytes is not None and 0 < (room := made.budget_bytes - made.fixed_bytes) < 3 * most:
        _line(axis, room, unit, _budget_label(made.budget_bytes), "#cc3311", "-")
    axis.set_title("activations at a step's high-water mark", fontsize=11)


def _activation_layers(made: Plan) -> list[tuple[str, str, list[int]]]:
    return [
        (label, colour, [row.activations.parts[name] for row in made.rows])
        for name, (label, colour) in _PARTS.items()
    ]


def _stack(axis: Any, made: Plan, layers: list[tuple[str, str, list[int]]], unit: tuple[int, str]) -> None:
    places = range(len(made.rows))
    bottoms = [0.0] * len(made.rows)
    for label, colour, sizes in layers:
        if not any(sizes):
            continue
        heights = [size / unit[0] for size in sizes]
        axis.bar(places, heights, 0.72, bottom=bottoms, color=colour, label=label, linewidth=0)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    names = ["whole" if row.chunk == made.prompt_tokens else f"{row.chunk:,}" for row in made.rows]
    axis.set_xticks(list(places), names, rotation=45 if len(names) > 8 else 0)
    for place, row in zip(places, made.rows, strict=True):
        if row.chunk == made.chosen:
            axis.get_xticklabels()[place].set_fontweight("bold")
            axis.annotate(
                "chosen",
                (place, bottoms[place]),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                fontweight="bold",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
            )
    axis.set_xlabel("chunk (tokens)")
    axis.set_ylabel(unit[1])
    axis.margins(y=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def _line(axis: Any, num_bytes: int, unit: tuple[int, str], label: str, colour: str, style: str) -> None:
    axis.axhline(num_bytes / unit[0], color=colour, linestyle=style, linewidth=1.3, label=label)


def _budget_label(budget_bytes: int) -> str:
    return f"budget (--memory {format_bytes(budget_bytes)}, right: what it leaves)"


def _unit(num_bytes: int) -> tuple[int, str]:
    return next((unit for unit in _UNITS if num_bytes >= unit[0]), _UNITS[-1])


def _short(model: str) -> str:
    name = Path(model)
    name = name.parent if name.name == "config.json" else name
    return name.name or model
