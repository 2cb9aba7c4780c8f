"""Results of serving, made up of chosen numbers."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from penstock.bench.serve_results import Arrival, BurstRun, ServeResults, ServeSettings, StallRun
from penstock.bench.serve_workload import Variant, Workload
from tests.bench.made_up import MACHINE

MODEL = "model.gguf (GGUF, llama, Q4_1)"


def made_up_stall(
    variant: Variant,
    gaps: Sequence[float],
    round_index: int = 0,
    *,
    seconds: float = 30.0,
    first_token_s: float = 20.0,
    first_token: int = 7,
) -> StallRun:
    """Two streams with the same gaps; their first token came a second before the long prompt."""
    stamps = tuple(accumulate(gaps, initial=-1.0))
    return StallRun(variant, round_index, (stamps, stamps), first_token_s, first_token, seconds, 9000)


def made_up_burst(
    arrival: Arrival,
    seconds: float,
    round_index: int = 0,
    *,
    strict: bool = False,
    step_s: float = 0.02,
    tokens: Sequence[tuple[int, ...]] = ((1, 2), (3, 4)),
) -> BurstRun:
    return BurstRun(arrival, strict, round_index, seconds, step_s, tuple(tokens))


# The gap while the long prompt is read, and how long it takes.
_READING: Mapping[Variant, tuple[float, float]] = {
    Variant.UNCHUNKED: (22.0, 22.0),
    Variant.PREFILL_FIRST: (25.0, 25.0),
    Variant.INTERLEAVED: (0.42, 26.0),
    Variant.DECODE_PRIORITY: (0.4, 30.0),
    Variant.MIXED: (0.45, 25.0),
}


def good_serve(
    workload: Workload | None = None,
    *,
    dtype: str = "bfloat16",
    same_bits: bool = True,
    stalls: Sequence[StallRun] | None = None,
    bursts: Sequence[BurstRun] | None = None,
) -> ServeResults:
    """Every bar met, unless other runs are given."""
    made_stalls, made_bursts = [], []
    for index, jitter in enumerate((1.0, 1.04, 0.98)):
        for variant, (gap, reading) in _READING.items():
            gaps = [0.025] * 39 + [gap * jitter] * max(1, round(reading / gap)) + [0.03 * jitter] * 60
            made_stalls.append(
                made_up_stall(
                    variant, gaps, index, seconds=reading * jitter + 6, first_token_s=reading * jitter
                )
            )
        for strict, factor in ((False, 1.0), (True, 1.1)):
            for arrival, seconds in ((Arrival.AT_ONCE, 12.0), (Arrival.IN_TURN, 32.0)):
                made_bursts.append(made_up_burst(arrival, seconds * factor * jitter, index, strict=strict))
    settings = ServeSettings(MODEL, dtype, workload or Workload())
    return ServeResults(
        machine=MACHINE,
        settings=settings,
        same_bits=same_bits,
        stalls=tuple(made_stalls if stalls is None else stalls),
        bursts=tuple(made_bursts if bursts is None else bursts),
        duration_s=400.0,
    )
