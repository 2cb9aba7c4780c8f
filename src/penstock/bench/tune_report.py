"""A profile as a page of plain text."""

from collections.abc import Iterable

from penstock.bench.report import aligned
from penstock.bench.tune_measure import GOOD_ENOUGH, fit_error, slowdowns
from penstock.engine.profile import MemorySample, StepSample, TuneProfile
from penstock.plan.step_time import StepTimeCoefficients


def render(profile: TuneProfile) -> str:
    """Facts, tables, the fit and the chunk that follows."""
    measured = profile.measurements
    parts = [_facts(profile)]
    if measured.steps:
        parts += [_chunks(measured.steps), _decodes(measured.steps)]
    if measured.prefills:
        parts.append(_prefills(profile))
    if measured.memory:
        parts.append(_memory(measured.memory))
    parts.append(_fit(profile))
    parts.append(
        f"best chunk for time to first token: {profile.best_chunk:,} tokens "
        f"(the smallest within {GOOD_ENOUGH - 1:.0%} of the fastest)"
    )
    return "\n\n".join(parts)


def _facts(profile: TuneProfile) -> str:
    key = profile.key
    facts = {
        "model": f"{profile.model_name} ({key.model[:12]})",
        "device": key.device,
        "dtype": f"{key.dtype}, threads: {key.threads}, kernels: {key.kernels}",
        "software": f"penstock {key.penstock}, torch {key.torch}",
        "date": profile.date,
    }
    return "\n".join(f"{name:<10}{text}" for name, text in facts.items())


def _chunks(steps: Iterable[StepSample]) -> str:
    alone = {(each.num_tokens, each.past): each for each in steps if each.num_tokens and not each.num_decodes}
    pasts = sorted({past for _, past in alone})
    rows = [["chunk", *(f"past {past:,}" for past in pasts)]]
    for chunk in sorted({chunk for chunk, _ in alone}):
        cells = [alone.get((chunk, past)) for past in pasts]
        rows.append(
            [
                f"{chunk:,}",
                *("-" if each is None else f"{_speed(each)} ({_ms(each.seconds)})" for each in cells),
            ]
        )
    return f"A step with one chunk: tokens/s (ms a step). Medians\n{aligned(rows)}"


def _decodes(steps: Iterable[StepSample]) -> str:
    rows = [["decodes", "chunk beside", "tokens each sees", "ms a step"]]
    for each in sorted(steps, key=lambda each: (each.num_tokens, each.num_decodes, each.decode_pasts)):
        if each.num_decodes:
            seen = each.decode_pasts // each.num_decodes
            beside = f"{each.num_tokens:,}" if each.num_tokens else "none"
            rows.append([str(each.num_decodes), beside, f"{seen:,}", _ms(each.seconds)])
    return f"A step with decodes. Medians\n{aligned(rows)}"


def _prefills(profile: TuneProfile) -> str:
    prefills = profile.measurements.prefills
    lengths = sorted({each.prompt_tokens for each in prefills})
    seconds = {(each.chunk, each.prompt_tokens): each.seconds for each in prefills}
    scores = slowdowns(prefills)
    rows = [["chunk", *(f"{length:,} tokens" for length in lengths), "over the fastest", ""]]
    for chunk in sorted(scores):
        cells = (seconds.get((chunk, length)) for length in lengths)
        times = ("-" if value is None else f"{value:.3f}" for value in cells)
        mark = "best" if chunk == profile.best_chunk else ""
        rows.append([f"{chunk:,}", *times, f"{scores[chunk]:.3f}", mark])
    return f"Time to first token of a whole prompt, s. Medians\n{aligned(rows)}"


def _memory(memory: Iterable[MemorySample]) -> str:
    rows = [["chunk", "by arithmetic", "measured"]]
    length = 0
    for each in memory:
        measured = "-" if each.measured_bytes is None else f"{each.measured_bytes / 2**20:.1f}"
        rows.append([f"{each.chunk:,}", f"{each.expected_bytes / 2**20:.1f}", measured])
        length = each.prompt_tokens
    title = f"Activation memory of a prompt of {length:,} tokens, MiB (measured: growth of a fresh process)"
    return f"{title}\n{aligned(rows)}"


def _fit(profile: TuneProfile) -> str:
    steps = profile.measurements.steps
    lines = [f"time of a step: {formula(profile.coefficients)}"]
    if steps:
        error = fit_error(profile.coefficients, steps)
        lines.append(
            f"fit error over {len(steps)} kinds of steps: median {error.median:.1%}, 95th percentile {error.p95:.1%}"
        )
    return "\n".join(lines)


def formula(coefficients: StepTimeCoefficients) -> str:
    """In milliseconds and microseconds, with the units a reader can multiply."""
    return (
        f"{1e3 * coefficients.constant:.2f} ms + {1e6 * coefficients.per_token:.1f} us a token "
        f"+ {1e9 * coefficients.per_token_past:.1f} ns a token and token of its past "
        f"+ {1e6 * coefficients.per_decode:.0f} us a decode "
        f"+ {1e9 * coefficients.per_decode_past:.0f} ns a token that a decode sees"
    )


def _speed(sample: StepSample) -> str:
    return f"{sample.num_tokens / sample.seconds:,.0f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
