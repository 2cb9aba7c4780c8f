"""A comparison with other engines as a picture."""

from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.bench.peers_results import PeerResults
from penstock.bench.peers_workload import PeerSystem, Quantity

# Penstock in blues, the others in hues of their own: readable by the colour-blind too.
_COLOURS = {
    PeerSystem.PENSTOCK: "#0b5394",
    PeerSystem.PENSTOCK_AUTO: "#5b9bd5",
    PeerSystem.TRANSFORMERS: "#d9730d",
    PeerSystem.LLAMA_FILE: "#2e8b57",
    PeerSystem.LLAMA_BEST: "#8fc9a6",
    PeerSystem.VLLM: "#8e44ad",
}


def draw(results: PeerResults, path: Path) -> None:
    """Bars for every system and length, prefill on the left, decode on the right; whiskers span the quartiles."""
    workload = results.settings.workload
    # By name, so that the package needs matplotlib only here.
    figure = import_module("matplotlib.figure").Figure(figsize=(13.0, 5.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_panel(left, results, "prefill", workload.lengths)
    left.set_title("Reading a prompt", fontweight="bold")
    left.set_ylabel("prompt tokens per second")
    _draw_panel(right, results, "decode", workload.decode_lengths)
    right.set_title("Decoding after it", fontweight="bold")
    right.set_ylabel("tokens per second")
    machine, settings = results.machine, results.settings
    figure.suptitle(
        f"{settings.model}: {machine.cpu}, threads: {settings.num_threads}\n"
        f"medians of {workload.repeats} rounds, all taking turns, each with its best settings; whiskers span the "
        f"quartiles; {machine.date[:10]}",
        fontsize=10,
    )
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False, fontsize=9
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_panel(axis: Any, results: PeerResults, quantity: Quantity, lengths: tuple[int, ...]) -> None:
    systems = [
        system
        for system in results.systems
        if any(results.speed(system, length, quantity) for length in lengths)
    ]
    width = 0.86 / max(1, len(systems))
    for rank, system in enumerate(systems):
        shift = (rank - (len(systems) - 1) / 2) * width
        known = [
            (place + shift, spread)
            for place, length in enumerate(lengths)
            if (spread := results.speed(system, length, quantity)) is not None
        ]
        medians = [spread.median for _, spread in known]
        bars = axis.bar(
            [place for place, _ in known],
            medians,
            0.94 * width,
            yerr=[
                [spread.median - spread.quartiles[0] for _, spread in known],
                [spread.quartiles[1] - spread.median for _, spread in known],
            ],
            capsize=2,
            color=_COLOURS[system],
            label=system.label,
        )
        texts = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in medians]
        axis.bar_label(bars, texts, padding=2, fontsize=7)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_xlabel("prompt length (tokens)")
    axis.margins(y=0.12)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
