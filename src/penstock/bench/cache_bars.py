"""What Penstock promises of prompts that were read before, checked against a result."""

from collections.abc import Mapping

from penstock.bench.bars import Bar
from penstock.bench.cache_results import (
    COLD_OVER_DISK,
    COLD_OVER_MEMORY,
    WRITING_OVER_COLD,
    CacheResults,
    CacheSettings,
)
from penstock.bench.cache_workload import CacheWorkload
from penstock.bench.spread import NOISY_SHARE, Noise, Spread

_DTYPE = "bfloat16"
_USUAL = CacheWorkload()
_WRITING_COST = 0.05
# By ratio: the limit, and whether it is a lower one.
_LIMITS: Mapping[str, tuple[float, bool]] = {
    COLD_OVER_MEMORY: (50.0, True),
    COLD_OVER_DISK: (10.0, True),
    WRITING_OVER_COLD: (1 + _WRITING_COST, False),
}


def scope() -> str:
    """Where the bars on speed hold."""
    return (
        f"Bars on speed are for {_DTYPE}, chunk {_USUAL.chunk} and {_USUAL.prompt_tokens:,} tokens or more: "
        "the median of ratios by round."
    )


def check_speed(results: CacheResults) -> list[Bar]:
    """The bars for which there is a measurement, where `scope` says that they hold."""
    if not _has_bars(results.settings):
        return []
    ratios = results.ratios
    return [
        Bar(name, ratios[name].median, *limit, _noise(name, ratios[name]))
        for name, limit in _LIMITS.items()
        if name in ratios
    ]


def check_answers(results: CacheResults) -> list[Bar]:
    """Whatever came from the cache, the answer is a cold engine's; and all that can come from it does."""
    if not results.runs:
        return []
    num_right = sum(results.has_right_answer(run) for run in results.runs)
    num_cached = sum(run.answer.cached_tokens == run.expected_tokens for run in results.runs)
    return [
        Bar("share of answers that are those of the cold run", num_right / len(results.runs), 1.0, True),
        Bar(
            "share of runs with as many tokens from the cache as there are",
            num_cached / len(results.runs),
            1.0,
            True,
        ),
    ]


def check_bars(results: CacheResults) -> list[Bar]:
    return [*check_speed(results), *check_answers(results)]


def noisy(results: CacheResults) -> list[str]:
    """What nothing can be said of, since its repeats lie too far apart, and how far. The cost of writing is judged
    by a few percent, so its quartiles must lie no further apart than that."""
    found = [
        f"{way.label} ({results.first_token(way).relative:.0%}, where {NOISY_SHARE:.0%} is the most)"
        for way in results.ways
        if results.figure(way) is None
    ]
    cost = results.ratios.get(WRITING_OVER_COLD)
    if cost is not None and _has_bars(results.settings) and _noise(WRITING_OVER_COLD, cost) == "noisy":
        found.append(f"{WRITING_OVER_COLD} ({cost.relative:.1%}, where {_WRITING_COST:.0%} is the most)")
    return found


def _has_bars(settings: CacheSettings) -> bool:
    workload = settings.workload
    return (
        settings.dtype == _DTYPE
        and workload.chunk == _USUAL.chunk
        and workload.prompt_tokens >= _USUAL.prompt_tokens
    )


def _noise(name: str, ratio: Spread) -> Noise:
    return "noisy" if name == WRITING_OVER_COLD and ratio.relative > _WRITING_COST else ratio.noise
