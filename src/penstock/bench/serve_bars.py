"""What Penstock promises to many users at once, checked against a result."""

from collections.abc import Mapping

from penstock.bench.bars import Bar
from penstock.bench.serve_results import (
    AT_ONCE_OVER_IN_TURN,
    STALL_UNCHUNKED_OVER_MIXED,
    THROUGHPUT_MIXED_OVER_UNCHUNKED,
    ServeResults,
)
from penstock.bench.serve_workload import Workload

_DTYPE = "bfloat16"
_WORKLOAD = Workload()
# By ratio: the limit, and whether it is a lower one.
_LIMITS: Mapping[str, tuple[float, bool]] = {
    STALL_UNCHUNKED_OVER_MIXED: (10.0, True),
    THROUGHPUT_MIXED_OVER_UNCHUNKED: (0.9, True),
    AT_ONCE_OVER_IN_TURN: (0.5, False),
}


def scope() -> str:
    """Where the bars on speed hold."""
    return (
        f"Bars on speed are for {_DTYPE} and the numbers of requests, tokens and chunks that are the default."
    )


def check_speed(results: ServeResults) -> list[Bar]:
    """The bars for which there is a measurement, where `scope` says that they hold."""
    if results.settings.dtype != _DTYPE or results.settings.workload != _WORKLOAD:
        return []
    return [
        Bar(ratio.name, ratio.spread.median, *_LIMITS[ratio.name], ratio.spread.noise)
        for ratio in results.ratios
        if ratio.name in _LIMITS
    ]


def check_answers(results: ServeResults) -> list[Bar]:
    """However steps are shared, the long prompt's first token is the same one; in strict mode all tokens are those of
    a request alone. The latter is promised only where the machine was found to keep the laws it rests on."""
    bars = []
    first = [run.first_token for run in results.stalls]
    if first:
        name = "share of runs with the same first token of the long prompt"
        bars.append(Bar(name, first.count(first[0]) / len(first), 1.0, True))
    if results.same_bits:
        bars += [
            Bar(
                "share of requests with the same tokens, strict",
                each.num_equal / each.num_requests,
                1.0,
                True,
            )
            for each in results.agreements
            if each.strict
        ]
    return bars


def check_bars(results: ServeResults) -> list[Bar]:
    return [*check_speed(results), *check_answers(results)]
