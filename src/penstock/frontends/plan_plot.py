"""A plan as a picture: what each chunk size holds at its peak, by part."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import SettingError
from penstock.pictures import finish, new_figure, plain
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
    "delta_net": ("recurrent", "#ddaa33"),
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
    figure = new_figure(12.5, 5.8)
    left, right = figure.subplots(1, 2)
    parts = [
        (label, colour, [row.activations.parts[name] for row in made.rows])
        for name, (label, colour) in _PARTS.items()
    ]
    sizes = (made.weights_bytes, made.kv_cache_bytes, made.recurrent_bytes)
    fixed = [
        (name, colour, [size] * len(made.rows))
        for (name, colour), size in zip(_FIXED.items(), sizes, strict=True)
    ]
    whole, budget = made.rows[-1], made.budget_bytes
    unit = _unit(max(budget or 0, *(row.total_bytes for row in made.rows)))
    _stack(left, made, "all memory", fixed + parts, unit)
    _lines(left, made, whole.total_bytes, budget, unit)
    most = whole.activations.peak_bytes
    unit, room = _unit(most), None if budget is None else budget - made.fixed_bytes
    _stack(right, made, "activations at a step's high-water mark", parts, unit)
    _lines(right, made, most, room if room is not None and 0 < room < 3 * most else None, unit)
    decodes = f", {made.num_decodes} answers beside it" if made.num_decodes else ""
    title = (
        f"{_short(made.model)}: memory of a {made.prompt_tokens:,}-token prompt by chunk size"
        f"\n{made.dtype}, {made.kernels} kernels{decodes}; by arithmetic from the model's shape"
    )
    try:
        finish(figure, (left, right), title, path)
    except OSError as error:
        raise SettingError("plot", str(path), because=error.strerror or str(error)) from error


def _stack(
    axis: Any, made: Plan, title: str, layers: list[tuple[str, str, list[int]]], unit: tuple[int, str]
) -> None:
    axis.set_title(title, fontsize=11)
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
    plain(axis)


def _lines(axis: Any, made: Plan, one_pass: int, room: int | None, unit: tuple[int, str]) -> None:
    axis.axhline(one_pass / unit[0], color="#222222", linestyle="--", linewidth=1.3, label="one pass")
    if room is not None and made.budget_bytes is not None:
        label = f"budget (--memory {format_bytes(made.budget_bytes)}, right: what it leaves)"
        axis.axhline(room / unit[0], color="#cc3311", linestyle="-", linewidth=1.3, label=label)


def _unit(num_bytes: int) -> tuple[int, str]:
    return next((unit for unit in _UNITS if num_bytes >= unit[0]), _UNITS[-1])


def _short(model: str) -> str:
    name = Path(model)
    name = name.parent if name.name == "config.json" else name
    return name.name or model
