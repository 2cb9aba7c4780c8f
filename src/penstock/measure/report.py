"""What `tune`, `verify` and `verify --memory` found, as pages of plain text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.engine.profile import MemorySample, StepSample, TuneProfile
from penstock.measure.compare import Comparison, Series
from penstock.measure.memory import MEMORY_METHOD, MOST_OVER, MOST_UNDER, MemoryCase
from penstock.measure.tune import GOOD_ENOUGH, fit_error, slowdowns
from penstock.measure.verify import VerifyResults
from penstock.plan.step_time import StepTimeCoefficients
from penstock.plan.units import format_bytes
from penstock.tables import make_table, table_lines

_NO_BITS = (
    "This machine was not found to give the same bits for any chunks: nothing is claimed bit for bit, "
    "and only the tolerance applies."
)


def table(title: str, rows: Iterable[Mapping[str, str]], *, num_left: int = 1) -> str:
    """A title, and rows by column, of which the first `num_left` are aligned to the left."""
    rows = list(rows)
    columns = list(rows[0]) if rows else []
    lines = table_lines(make_table(columns, [list(row.values()) for row in rows], left=range(num_left)))
    return "\n".join([title, *(f"  {line}" for line in lines)])


def facts(lines: Mapping[str, Iterable[str]]) -> str:
    """A line for each name, with what is known of it."""
    return "\n".join(f"{name:<10}{', '.join(parts)}" for name, parts in lines.items())


def render_tune(profile: TuneProfile) -> str:
    """Facts, tables, the fit and the chunk that follows."""
    key, measured = profile.key, profile.measurements
    head = {
        "model": [f"{profile.model_name} ({key.model[:12]})"],
        "device": [key.device],
        "dtype": [key.dtype, f"threads: {key.threads}", f"kernels: {key.kernels}"],
        "software": [f"penstock {key.penstock}", f"torch {key.torch}"],
        "date": [profile.date],
    }
    parts = [facts(head)]
    if measured.steps:
        parts += [_tune_chunks(measured.steps), _tune_decodes(measured.steps)]
    if measured.prefills:
        parts.append(_tune_prefills(profile))
    if measured.memory:
        parts.append(_tune_memory(measured.memory))
    parts.append(f"time of a step: {formula(profile.coefficients)}")
    if measured.steps:
        error = fit_error(profile.coefficients, measured.steps)
        parts[-1] += f"\nfit error over {len(measured.steps)} kinds of steps: {error}"
    return "\n\n".join(
        [
            *parts,
            f"best chunk for time to first token: {profile.best_chunk:,} tokens "
            f"(the smallest within {GOOD_ENOUGH - 1:.0%} of the fastest)",
        ]
    )


def formula(coefficients: StepTimeCoefficients) -> str:
    """In milliseconds and microseconds, with the units a reader can multiply."""
    return (
        f"{1e3 * coefficients.constant:.2f} ms + {1e6 * coefficients.per_token:.1f} us a token "
        f"+ {1e9 * coefficients.per_token_past:.1f} ns a token and token of its past "
        f"+ {1e6 * coefficients.per_decode:.0f} us a decode "
        f"+ {1e9 * coefficients.per_decode_past:.0f} ns a token that a decode sees"
    )


def _tune_chunks(steps: Iterable[StepSample]) -> str:
    alone = [each for each in steps if each.num_tokens and not each.num_decodes]
    speeds = {
        (each.num_tokens, each.past): f"{each.num_tokens / each.seconds:,.0f} ({1000 * each.seconds:,.1f})"
        for each in alone
    }
    pasts = sorted({each.past for each in alone})
    return table(
        "A step with one chunk: tokens/s (ms a step). Medians",
        (
            {"chunk": f"{chunk:,}", **{f"past {past:,}": speeds.get((chunk, past), "-") for past in pasts}}
            for chunk in sorted({each.num_tokens for each in alone})
        ),
    )


def _tune_decodes(steps: Iterable[StepSample]) -> str:
    return table(
        "A step with decodes. Medians",
        (
            {
                "decodes": str(each.num_decodes),
                "chunk beside": f"{each.num_tokens:,}" if each.num_tokens else "none",
                "tokens each sees": f"{each.decode_pasts // each.num_decodes:,}",
                "ms a step": f"{1000 * each.seconds:,.1f}",
            }
            for each in sorted(steps, key=lambda each: (each.num_tokens, each.num_decodes, each.decode_pasts))
            if each.num_decodes
        ),
    )


def _tune_prefills(profile: TuneProfile) -> str:
    prefills = profile.measurements.prefills
    seconds = {(each.chunk, each.prompt_tokens): f"{each.seconds:.3f}" for each in prefills}
    lengths = sorted({each.prompt_tokens for each in prefills})
    return table(
        "Time to first token of a whole prompt, s. Medians",
        (
            {
                "chunk": f"{chunk:,}",
                **{f"{length:,} tokens": seconds.get((chunk, length), "-") for length in lengths},
                "over the fastest": f"{score:.3f}",
                "": "best" if chunk == profile.best_chunk else "",
            }
            for chunk, score in sorted(slowdowns(prefills).items())
        ),
    )


def _tune_memory(memory: Sequence[MemorySample]) -> str:
    return table(
        f"Activation memory of a prompt of {memory[-1].prompt_tokens:,} tokens, MiB "
        "(measured: growth of a fresh process)",
        (
            {
                "chunk": f"{each.chunk:,}",
                "by arithmetic": f"{each.expected_bytes / 2**20:.1f}",
                "measured": "-" if each.measured_bytes is None else f"{each.measured_bytes / 2**20:.1f}",
            }
            for each in memory
        ),
    )


def render_memory(cases: Sequence[MemoryCase]) -> str:
    """Predicted and measured memory of each case, the bars, and the method."""
    rows = (
        {
            "model": case.model,
            "dtype": case.dtype,
            "kernels": f"{case.device}, {case.kernels}",
            "prompt": f"{case.prompt_tokens:,}",
            "chunk": f"{case.chunk:,}",
            "measured": format_bytes(case.measured_bytes),
            "predicted": format_bytes(case.predicted_bytes),
            "error": f"{case.error:+.1%}",
            "K/V": format_bytes(case.kv_cache_bytes),
            "state": format_bytes(case.recurrent_bytes),
            "activations": f"{format_bytes(case.activation_bytes)} ({case.phase})",
            "": "" if case.is_met else "missed",
        }
        for case in cases
    )
    missed = sum(not case.is_met for case in cases)
    verdict = "all met" if not missed else f"{missed} of {len(cases)} missed"
    return (
        table("Growth of a prefill", rows, num_left=3)
        + f"\n\nbars: at most {MOST_OVER:.0%} over what is measured, {MOST_UNDER:.0%} under: {verdict}"
        f"\nmethod: {MEMORY_METHOD}"
    )


def render_verify(results: VerifyResults) -> str:
    """Facts, a line for each comparison, what differs and where, the verdict."""
    parts = [_verify_facts(results), _verify_table(results), _differences(results), _verdict(results)]
    return "\n\n".join(part for part in parts if part)


def _verify_facts(results: VerifyResults) -> str:
    probe, num_all = results.probe, len(results.token_ids) - 1
    rows = "not row-invariant" if probe.row_floor is None else f"row-invariant from {probe.row_floor} rows"
    if probe.row_slab:
        rows = f"row-invariant in slabs of {probe.row_slab} rows"
    laws = {
        "attention": probe.attention_holds,
        "passes": probe.passes_hold,
        "output head": probe.head_holds,
        "recurrence": probe.recurrence_holds,
    }
    broken = ", ".join(name for name, holds in laws.items() if not holds)
    return facts(
        {
            "model": [results.model, results.dtype],
            "prompt": [
                f"{results.num_prompt} tokens, {num_all + 1 - results.num_prompt} generated after them",
                f"logits compared after {results.num_positions} of {num_all}, keys and values at all {num_all}",
            ],
            "probe": [
                f"same bits: {'yes' if probe.same_bits else 'no'}",
                f"products {rows}",
                *([f"broken: {broken}"] if broken else []),
            ],
            "kernels": [results.kernels],
            **results.machine.facts,
            "date": [results.machine.date, f"{results.duration_s:.0f} s"],
        }
    )


def _verify_table(results: VerifyResults) -> str:
    def largest(name: str, series: Series | None) -> dict[str, str]:
        sizes = {} if series is None else {"abs": series.largest_absolute, "rel": series.largest_relative}
        same = series is not None and series.all_same
        return {f"{name}, {kind}": _number(sizes.get(kind), same) for kind in ("abs", "rel")}

    rows = []
    for each in results.comparisons:
        greedy = each.greedy
        rows.append(
            {
                "": each.name,
                "must be": _law(each, results),
                **largest("logits", each.logits),
                **largest("keys/values", each.cache),
                "states, rel": largest("states", each.states)["states, rel"],
                "greedy equal": "-" if greedy is None else f"{greedy.num_equal}/{greedy.num_tokens}",
                "law": "PASS" if each.passed else "FAIL",
            }
        )
    return table(
        "Largest differences, absolute and in parts of the largest value; 0: the same bits. "
        "All but transformers' against the whole prompt in one chunk",
        rows,
        num_left=2,
    )


def _law(comparison: Comparison, results: VerifyResults) -> str:
    law = comparison.law
    within = f"within {law.tolerance:g}"
    if not law.bits_until:
        return within
    is_all = law.bits_until > results.num_prompt or comparison.logits is None
    return "same bits" if is_all else f"same bits, then {within}"


def _number(value: float | None, is_same: bool) -> str:
    return "-" if value is None else "0" if is_same else f"{value:.1e}"


def _differences(results: VerifyResults) -> str:
    """For each comparison that has any: where they begin, where they are largest, and what they break."""
    lines = []
    for each in results.comparisons:
        own = list(_own_differences(each, results))
        lines += [each.name, *(f"  {line}" for line in own)] if own else []
    return "\n".join(["Where they differ", *lines]) if lines else ""


def _own_differences(comparison: Comparison, results: VerifyResults) -> Iterator[str]:
    for what, series in comparison.series.items():
        if (first := series.first_different()) is not None:
            layer = "" if series.first_layer is None else f"; there from layer {series.first_layer} on"
            yield (
                f"{what} differ at {series.is_same.count(False)} of {len(series.positions)} tokens, first at "
                f"{results.describe(first)}, most ({series.largest_relative:.1e}) at "
                f"{results.describe(series.worst_position)}{layer}"
            )
    if comparison.greedy is not None and (other := comparison.greedy.first) is not None:
        yield (
            f"greedy tokens differ first after {results.describe(other.position)}: "
            f"{results.texts[other.token]!r} in place of {results.texts[other.expected]!r}"
        )
    for broken in comparison.breaks:
        where = "" if broken.position is None else f", first at {results.describe(broken.position)}"
        yield f"BROKEN: {broken.what}: {broken.how}{where}"


def _verdict(results: VerifyResults) -> str:
    failed = [each.name for each in results.comparisons if not each.passed]
    verdict = f"PASS: all {len(results.comparisons)} comparisons keep their law"
    if failed:
        verdict = f"FAIL: {len(failed)} of {len(results.comparisons)} break their law: {'; '.join(failed)}"
    return verdict if results.probe.same_bits else f"{_NO_BITS}\n{verdict}"
