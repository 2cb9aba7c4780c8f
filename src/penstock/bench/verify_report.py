"""What a verification found, as a page of plain text."""

from penstock.bench.report import aligned
from penstock.bench.verify_results import Comparison, Series, VerifyResults
from penstock.plan.units import format_bytes

_NO_BITS = (
    "This machine was not found to give the same bits for any chunks: nothing is claimed bit for bit, "
    "and only the tolerance applies."
)


def render(results: VerifyResults) -> str:
    """Facts, a line for each comparison, what differs and where, the verdict."""
    parts = [_facts(results), _table(results), _differences(results), _verdict(results)]
    return "\n\n".join(part for part in parts if part)


def _facts(results: VerifyResults) -> str:
    machine, probe = results.machine, results.probe
    penstock = f"penstock {machine.penstock}" + (f" ({machine.commit})" if machine.commit else "")
    num_generated = len(results.token_ids) - results.num_prompt
    num_all = len(results.token_ids) - 1
    rows = "not row-invariant" if probe.row_floor is None else f"row-invariant from {probe.row_floor} rows"
    if probe.row_slab:
        rows = f"row-invariant in slabs of {probe.row_slab} rows"
    laws = {
        "attention": probe.attention_holds,
        "passes": probe.passes_hold,
        "output head": probe.head_holds,
        "recurrence": probe.recurrence_holds,
    }
    broken = [name for name, holds in laws.items() if not holds]
    facts = {
        "model": [results.model, results.dtype],
        "prompt": [
            f"{results.num_prompt} tokens, {num_generated} generated after them",
            f"logits compared after {results.num_positions} of {num_all}, keys and values at all {num_all}",
        ],
        "probe": [
            f"same bits: {'yes' if probe.same_bits else 'no'}",
            f"products {rows}",
            *([f"broken: {', '.join(broken)}"] if broken else []),
        ],
        "kernels": [results.kernels],
        "machine": [
            machine.cpu,
            f"{machine.num_cpus} CPUs",
            format_bytes(machine.memory_bytes),
            machine.system,
        ],
        "threads": [str(machine.num_threads)],
        "software": [
            penstock,
            f"torch {machine.torch}",
            f"transformers {machine.transformers}",
            f"Python {machine.python}",
        ],
        "date": [machine.date, f"{results.duration_s:.0f} s"],
    }
    return "\n".join(f"{name:<10}{', '.join(parts)}" for name, parts in facts.items())


def _table(results: VerifyResults) -> str:
    header = [
        "",
        "must be",
        "logits, abs",
        "rel",
        "keys/values, abs",
        "rel",
        "states, rel",
        "greedy equal",
        "",
    ]
    rows = [header]
    for each in results.comparisons:
        greedy = each.greedy
        rows.append(
            [
                each.name,
                _law(each, results),
                *_largest(each.logits),
                *_largest(each.cache),
                "-" if each.states is None else _number(each.states.relative, each.states.is_same),
                "-" if greedy is None else f"{greedy.num_equal}/{greedy.num_tokens}",
                "PASS" if each.passed else "FAIL",
            ]
        )
    title = (
        "Largest differences, absolute and in parts of the largest value; 0: the same bits. "
        "All but transformers' against the whole prompt in one chunk"
    )
    return f"{title}\n{aligned(rows)}"


def _law(comparison: Comparison, results: VerifyResults) -> str:
    law = comparison.law
    within = f"within {law.tolerance:g}"
    if not law.bits_until:
        return within
    is_all = law.bits_until > results.num_prompt or comparison.logits is None
    return "same bits" if is_all else f"same bits, then {within}"


def _largest(series: Series | None) -> tuple[str, str]:
    if series is None:
        return "-", "-"
    same = series.all_same
    return _number(series.largest_absolute, same), _number(series.largest_relative, same)


def _number(value: float, is_same: bool) -> str:
    return "0" if is_same else f"{value:.1e}"


def _differences(results: VerifyResults) -> str:
    """For each comparison that has any: where they begin, where they are largest, and what they break."""
    blocks = []
    for each in results.comparisons:
        lines = [*_series_lines("logits", each.logits, results), *_cache_lines(each, results)]
        if each.greedy is not None and (first := each.greedy.first) is not None:
            lines.append(
                f"greedy tokens differ first after {results.describe(first.position)}: "
                f"{results.texts[first.token]!r} in place of {results.texts[first.expected]!r}"
            )
        lines += [
            f"BROKEN: {broken.what}: {broken.how}"
            + ("" if broken.position is None else f", first at {results.describe(broken.position)}")
            for broken in each.breaks
        ]
        if lines:
            blocks.append("\n".join([each.name, *(f"  {line}" for line in lines)]))
    return "\n".join(["Where they differ", *blocks]) if blocks else ""


def _series_lines(what: str, series: Series | None, results: VerifyResults) -> list[str]:
    if series is None or (first := series.first_different()) is None:
        return []
    num_different = len(series.is_same) - sum(series.is_same)
    return [
        f"{what} differ at {num_different} of {len(series.positions)} tokens, first at {results.describe(first)}, "
        f"most ({series.largest_relative:.1e}) at {results.describe(series.worst_position)}"
    ]


def _cache_lines(comparison: Comparison, results: VerifyResults) -> list[str]:
    cache = comparison.cache
    lines = _series_lines("keys and values", cache, results)
    if cache is None or cache.first_layer is None:
        return lines
    return [f"{line}; there from layer {cache.first_layer} on" for line in lines]


def _verdict(results: VerifyResults) -> str:
    lines = [] if results.probe.same_bits else [_NO_BITS]
    failed = [each.name for each in results.comparisons if not each.passed]
    if failed:
        lines.append(
            f"FAIL: {len(failed)} of {len(results.comparisons)} break their law: {'; '.join(failed)}"
        )
    else:
        lines.append(f"PASS: all {len(results.comparisons)} comparisons keep their law")
    return "\n".join(lines)
