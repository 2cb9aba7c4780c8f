"""A comparison with other engines as a page of plain text."""

from collections.abc import Callable
from textwrap import wrap

from penstock.bench.peers_bars import check_bars, scope
from penstock.bench.peers_results import METHOD, PeerResults
from penstock.bench.peers_workload import OURS, PeerSystem, Quantity
from penstock.bench.report import aligned, ratio_with_quartiles
from penstock.bench.serve_report import machine_facts
from penstock.bench.spread import Spread

_WIDTH = 110


def render(results: PeerResults) -> str:
    """Facts, settings, tables and bars, in that order."""
    workload = results.settings.workload
    parts = [
        _facts(results),
        _left_out(results),
        _choices(results),
        "Prefill, tokens/s: prompt tokens over time to first token. Median (quartiles)\n"
        + _speeds(results, "prefill"),
        f"Decode, tokens/s: the {workload.decode_tokens} tokens after the first. Median (quartiles)\n"
        + _speeds(results, "decode"),
        "Penstock's speed over theirs, round by round. Median (quartiles)\n" + _ratios(results),
        _agreements(results),
        _bars(results),
    ]
    return "\n\n".join(part for part in parts if part)


def _facts(results: PeerResults) -> str:
    settings = results.settings
    facts = machine_facts(results.machine, settings.model, settings.dtype, results.duration_s)
    lines = [
        facts,
        f"{'rounds':<10}{settings.workload.repeats}, {settings.num_threads} threads for each engine",
    ]
    lines += [f"{name:<12} {about}{_weights(results, name)}" for name, about in results.about.items()]
    lines += wrap(f"Measured: {METHOD}.", _WIDTH)
    return "\n".join(lines)


def _weights(results: PeerResults, engine: str) -> str:
    return f", weights in memory: {results.weights[engine]}" if engine in results.weights else ""


def _left_out(results: PeerResults) -> str:
    return "\n".join(f"left out: {PeerSystem(name).label}: {why}" for name, why in results.left_out.items())


def _choices(results: PeerResults) -> str:
    """The settings of those that had a choice."""
    tried = {trial.candidate for trial in results.trials}
    rows = [["", "prompt", "for prefill", "for decode"]]
    for choice in results.choices:
        if choice.prefill in tried:
            decode = "-" if choice.decode is None else choice.decode.label
            rows.append([choice.system.label, f"{choice.prompt_tokens:,}", choice.prefill.label, decode])
    return f"Settings, the best of those tried before the rounds\n{aligned(rows)}" if rows[1:] else ""


def _speeds(results: PeerResults, quantity: Quantity) -> str:
    def text(system: PeerSystem, length: int) -> str:
        spread = results.speed(system, length, quantity)
        return "-" if spread is None else _with_quartiles(spread)

    return _table(results, quantity, [(system.label, system) for system in results.systems], text)


def _ratios(results: PeerResults) -> str:
    parts = []
    quantities: tuple[Quantity, ...] = ("prefill", "decode")
    for quantity in quantities:
        for ours in OURS if quantity == "prefill" else OURS[:1]:

            def text(
                theirs: PeerSystem, length: int, ours: PeerSystem = ours, quantity: Quantity = quantity
            ) -> str:
                spread = results.ratio(ours, theirs, length, quantity)
                return "-" if spread is None else ratio_with_quartiles(spread)

            others = [
                (f"{quantity}: {ours.label} over {theirs.label}", theirs)
                for theirs in results.systems
                if theirs not in OURS
            ]
            if others:
                parts.append(_table(results, quantity, others, text))
    return "\n".join(parts)


def _agreements(results: PeerResults) -> str:
    """Whether all run the same model: greedy tokens, which differ where two are as good as equal."""
    rows = [["", *(f"after {length:,}" for length in results.settings.workload.lengths)]]
    for system in results.systems:
        agreed = [results.num_agreed(system, length) for length in results.settings.workload.lengths]
        rows.append([system.label, *("-" if each is None else f"{each[0]} of {each[1]}" for each in agreed)])
    return f"Tokens that are Penstock's too, from the first on\n{aligned(rows)}"


def _bars(results: PeerResults) -> str:
    rows = [["bar", "measured", "wanted", ""]]
    for bar in check_bars(results):
        value = "-" if bar.value is None else f"{bar.value:.2f}"
        rows.append([bar.name, value, f">= {bar.limit:g}", bar.verdict])
    return f"{scope()}\n{aligned(rows)}"


def _table(
    results: PeerResults,
    quantity: Quantity,
    names: list[tuple[str, PeerSystem]],
    text: Callable[[PeerSystem, int], str],
) -> str:
    workload = results.settings.workload
    lengths = workload.lengths if quantity == "prefill" else workload.decode_lengths
    rows = [["", *(f"{length:,} tokens" for length in lengths)]]
    for label, system in names:
        cells = [text(system, length) for length in lengths]
        if any(cell != "-" for cell in cells):
            rows.append([label, *cells])
    return aligned(rows)


def _with_quartiles(spread: Spread) -> str:
    first, third = spread.quartiles
    mark = f" {spread.noise}" if spread.noise else ""
    return f"{spread.median:,.1f} ({first:,.1f} to {third:,.1f}){mark}"
