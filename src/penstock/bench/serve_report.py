"""A result of serving as a page of plain text."""

from collections.abc import Callable

from penstock.bench.report import aligned, bar_table, ratio_with_quartiles
from penstock.bench.serve_bars import check_bars, scope
from penstock.bench.serve_gaps import GapSummary
from penstock.bench.serve_results import Arrival, ServeResults, StallRun
from penstock.bench.serve_workload import Variant
from penstock.bench.spread import Spread
from penstock.measure.machine import Machine
from penstock.plan.units import format_bytes


def render(results: ServeResults) -> str:
    """Facts, tables and bars, in that order."""
    parts = (
        _facts(results),
        _stalls(results),
        _bursts(results),
        _ratios(results),
        bar_table(scope(), check_bars(results)),
    )
    return "\n\n".join(part for part in parts if part)


def _facts(results: ServeResults) -> str:
    settings = results.settings
    facts = machine_facts(results.machine, settings.model, settings.dtype, results.duration_s)
    return f"{facts}\n{'rounds':<10}{_rounds(results)}, variants take turns, another begins each round"


def machine_facts(machine: Machine, model: str, dtype: str, duration_s: float) -> str:
    """What a result belongs to, a line for each fact."""
    threads = [str(machine.num_threads)]
    if machine.load_average is not None:
        threads.append(f"load average {machine.load_average:.1f} at the start")
    penstock = f"penstock {machine.penstock}" + (f" ({machine.commit})" if machine.commit else "")
    facts = {
        "model": [model, dtype],
        "machine": [
            machine.cpu,
            f"{machine.num_cpus} CPUs",
            format_bytes(machine.memory_bytes),
            machine.system,
        ],
        "threads": threads,
        "software": [penstock, f"torch {machine.torch}", f"Python {machine.python}"],
        "date": [machine.date, f"{duration_s:.0f} s"],
    }
    return "\n".join(f"{name:<10}{', '.join(parts)}" for name, parts in facts.items())


def _rounds(results: ServeResults) -> str:
    counts = {variant: len(results.of_variant(variant)) for variant in Variant}
    most = max(counts.values())
    fewer = [f"{count} for {variant.value}" for variant, count in counts.items() if 0 < count < most]
    return f"{most}" + (f" ({', '.join(fewer)})" if fewer else "")


def _stalls(results: ServeResults) -> str:
    workload = results.settings.workload
    variants = [variant for variant in Variant if results.of_variant(variant)]
    if not variants:
        return ""

    def table(header: list[str], *values: Callable[[StallRun], float]) -> str:
        rows = [["", *header]]
        for variant in variants:
            cells = [range_of(results.spread_of(variant, value)) for value in values]
            rows.append([variant.label(workload.stall_chunk), *cells])
        return aligned(rows)

    def percentiles(summary: Callable[[StallRun], GapSummary]) -> list[Callable[[StallRun], float]]:
        return [
            lambda run: 1000 * summary(run).p50_s,
            lambda run: 1000 * summary(run).p95_s,
            lambda run: 1000 * summary(run).p99_s,
        ]

    parts = [
        f"A prompt of {workload.long_prompt:,} tokens arrives while {workload.streams} streams decode. All values: "
        "median (smallest to largest)",
        "",
        "Time from a stream's token to its next, ms, while the prompt was read, and the longest of the whole run",
        table(
            ["p50", "p95", "p99", "longest"],
            *percentiles(lambda run: run.reading),
            lambda run: 1000 * run.longest_gap.seconds,
        ),
        "",
        "The same over the whole run",
        table(["p50", "p95", "p99"], *percentiles(lambda run: run.whole)),
        "",
        "First token of the long prompt, end of everything, and all tokens (read and generated) over that time",
        table(
            ["first token, s", "all done, s", "tokens/s"],
            lambda run: run.first_token_s,
            lambda run: run.seconds,
            lambda run: run.tokens_per_s,
        ),
    ]
    parts += _ended_early(results)
    return "\n".join(parts)


def _ended_early(results: ServeResults) -> list[str]:
    """Streams that had ended before the prompt was read felt nothing of the rest."""
    lines = []
    for variant in Variant:
        early = [len(run.stream_stamps) - run.num_outlasting for run in results.of_variant(variant)]
        if any(early):
            lines.append(f"  {variant.value}: up to {max(early)} streams ended before the prompt was read")
    return lines


def _bursts(results: ServeResults) -> str:
    workload = results.settings.workload
    rows = [["", "all done, s", "tokens/s", "decode step, ms"]]
    for strict in (False, True):
        for arrival in Arrival:
            runs = results.of_burst(arrival, strict=strict)
            if runs:
                rows.append(
                    [
                        f"{arrival.value.replace('-', ' ')}{', strict' if strict else ''}",
                        range_of(Spread.of(run.seconds for run in runs)),
                        range_of(Spread.of(workload.burst_total / run.seconds for run in runs)),
                        range_of(Spread.of(1000 * run.decode_step_s for run in runs)),
                    ]
                )
    if len(rows) == 1:
        return ""
    parts = [
        f"{workload.requests} requests of {workload.request_prompt} tokens and {workload.request_tokens} generated "
        f"after them, mixed, chunk {workload.chunk}. Median (smallest to largest)",
        aligned(rows),
    ]
    parts += [
        f"  {'strict' if each.strict else 'plain'}: {each.num_equal} of {each.num_requests} requests have the same "
        "tokens at once and one after the other"
        for each in results.agreements
    ]
    if not results.same_bits:
        parts.append(
            "  this machine does not keep the laws that strict decoding rests on: nothing is promised"
        )
    return "\n".join(parts)


def _ratios(results: ServeResults) -> str:
    rows = [[ratio.name, ratio_with_quartiles(ratio.spread)] for ratio in results.ratios]
    title = "Ratios, round by round. Median (quartiles); noisy: the quartiles lie more than 15% apart"
    return f"{title}\n{aligned(rows)}" if rows else ""


def range_of(spread: Spread) -> str:
    """The median, and from the smallest to the largest where there are several."""
    if len(spread.values) == 1:
        return _figure(spread.median)
    return f"{_figure(spread.median)} ({_figure(spread.smallest)} to {_figure(spread.largest)})"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
