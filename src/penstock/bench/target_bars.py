"""What Penstock promises of latency targets and of automatic sizes, checked against a result."""

from penstock.bench.bars import Bar
from penstock.bench.target_results import ENOUGH, SLACK, TargetResults

# Two runs of the same thing lie so far apart on a quiet machine: less is not told apart from none.
NOISE_MARGIN = 0.05


def scope() -> str:
    """Where the bars hold."""
    return (
        f"A gap keeps its target up to {SLACK:g} times it. Times to the first token are ratios by round:\n"
        f"the median counts, and {NOISE_MARGIN:.0%} more is noise. Targets out of reach have no bar."
    )


def check_bars(results: TargetResults) -> list[Bar]:
    """Bars for every target that some chunk can keep, for prompts that come alone, and for the answers."""
    bars = []
    for verdict in results.verdicts:
        if not verdict.is_reachable:
            continue
        name = f"share of gaps that keep {verdict.target_ms:,} ms"
        bars.append(Bar(name, verdict.share, ENOUGH, True))
        if verdict.ratio is not None:
            name = f"first token at {verdict.target_ms:,} ms, auto over chunk {verdict.best_fixed:,}"
            bars.append(Bar(name, verdict.ratio.median, 1 + NOISE_MARGIN, False, verdict.ratio.noise))
    for lone in results.lone_verdicts:
        name = f"first token of {lone.prompt_tokens:,} tokens alone, auto over chunk {lone.best_fixed:,}"
        bars.append(Bar(name, lone.ratio.median, 1 + NOISE_MARGIN, False, lone.ratio.noise))
    return [*bars, *_answers(results)]


def _answers(results: TargetResults) -> list[Bar]:
    """However a prompt is cut, its first token is the same one."""
    first = [run.first_token for run in results.arrivals]
    if not first:
        return []
    name = "share of runs with the same first token of the long prompt"
    return [Bar(name, first.count(first[0]) / len(first), 1.0, True)]
