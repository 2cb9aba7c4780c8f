"""A result of latency targets as a page of plain text."""

from penstock.bench.report import aligned, bar_table
from penstock.bench.serve_gaps import percentile
from penstock.bench.serve_report import machine_facts, range_of
from penstock.bench.spread import Spread
from penstock.bench.target_bars import check_bars, scope
from penstock.bench.target_results import ENOUGH, SLACK, TargetResults, Verdict
from penstock.bench.target_workload import Sizing


def render(results: TargetResults) -> str:
    """Facts, tables and bars, in that order."""
    parts = (
        _facts(results),
        _arrivals(results),
        _verdicts(results),
        _lone(results),
        bar_table(scope(), check_bars(results)),
    )
    return "\n\n".join(part for part in parts if part)


def _facts(results: TargetResults) -> str:
    settings = results.settings
    facts = machine_facts(results.machine, settings.model, settings.dtype, results.duration_s)
    start = "a profile of this machine" if results.has_profile else "nothing"
    return (
        f"{facts}\n{'rounds':<10}{settings.repeats} of automatic chunks and of the best fixed ones, 1 of the others; "
        f"all take turns\n{'auto':<10}starts from {start} in the first round, and learns from round to round"
    )


def _arrivals(results: TargetResults) -> str:
    workload = results.settings.workload
    header = ["", "p50", "p95", "longest"]
    header += [f"<= {SLACK * target:g} ms" for target in workload.targets_ms]
    rows = [[*header, "chunks, tokens", "first token, s", "rounds"]]
    for sizing in results.sizings:
        gaps_ms = [1000 * seconds for seconds in results.gap_seconds(sizing)]
        cells = [f"{value:.1f}" for value in (percentile(gaps_ms, 50), percentile(gaps_ms, 95), max(gaps_ms))]
        cells += [f"{results.share(sizing, target):.1%}" for target in workload.targets_ms]
        cells += [_chunks(results, sizing), range_of(results.first_token(sizing))]
        rows.append([sizing.label, *cells, str(len(results.of(sizing)))])
    decode_ms = 1000 * Spread.of(run.decode_gap_s for run in results.arrivals).median
    return (
        f"A prompt of {workload.prompt_tokens:,} tokens arrives while {workload.streams} streams decode, a token "
        f"every {decode_ms:.1f} ms.\nFrom a stream's token to its next while the prompt was read, ms, all "
        f"rounds together; the share of\nthese gaps within {SLACK:g} times each target; and the prompt's first "
        f"token, median (smallest to largest)\n{aligned(rows)}"
    )


def _chunks(results: TargetResults, sizing: Sizing) -> str:
    """From the smallest to the largest; the end of the prompt aside, which may be anything."""
    sizes = [len(chunk) for run in results.of(sizing) for chunk in run.chunks if chunk.rule != "end"]
    if not sizes:
        return "whole"
    return f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"


def _verdicts(results: TargetResults) -> str:
    rows = [
        [
            "target",
            "auto keeps",
            "worst round",
            "best fixed",
            "its first token, s",
            "auto's",
            "auto's over its",
        ]
    ]
    for verdict in results.verdicts:
        rows.append([f"{verdict.target_ms:,} ms", *_verdict(results, verdict)])
    return f"Each target; it is kept where {ENOUGH:.0%} of gaps keep it\n{aligned(rows)}"


def _verdict(results: TargetResults, verdict: Verdict) -> list[str]:
    shares = [f"{verdict.share:.1%}", f"{verdict.worst_share:.1%}"]
    auto = range_of(results.first_token(Sizing(target_ms=verdict.target_ms)))
    if verdict.best_fixed is None:
        return [*shares, "none keeps it" if verdict.is_reachable else "out of reach", "-", auto, "-"]
    best = range_of(results.first_token(Sizing(fixed=verdict.best_fixed)))
    ratio = "-" if verdict.ratio is None else _ratio(verdict.ratio)
    return [*shares, f"chunk {verdict.best_fixed:,}", best, auto, ratio]


def _lone(results: TargetResults) -> str:
    if not results.lone:
        return ""
    lengths = results.lone_lengths
    chunks = list(dict.fromkeys(chunk for length in lengths for chunk in results.lone_chunks(length)))
    rows = [["", *(f"{length:,} tokens" for length in lengths)]]
    for chunk in sorted(chunks, key=lambda size: (size is None, size)):
        seconds = [list(results.lone_seconds(chunk, length).values()) for length in lengths]
        cells = [range_of(Spread.of(values)) if values else "-" for values in seconds]
        rows.append(["auto" if chunk is None else f"chunk {chunk:,}", *cells])
    ratios = {verdict.prompt_tokens: verdict for verdict in results.lone_verdicts}
    cells = [
        f"{_ratio(ratios[length].ratio)}, chunk {ratios[length].best_fixed:,}" if length in ratios else "-"
        for length in lengths
    ]
    rows.append(["auto over the best", *cells])
    return f"First token where nothing else runs, s. Median (smallest to largest)\n{aligned(rows)}"


def _ratio(spread: Spread) -> str:
    """By round; with three digits, since a few percent matter."""
    if len(spread.values) == 1:
        return f"{spread.median:.3f}"
    return f"{spread.median:.3f} ({spread.smallest:.3f} to {spread.largest:.3f})"
