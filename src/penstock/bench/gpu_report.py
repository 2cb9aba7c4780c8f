"""Results on a GPU as a page of Markdown."""

from penstock.bench.gpu_results import Figure, GpuResults, shown
from penstock.bench.gpu_targets import TARGETS, VLLM, Judged, judge

_METHOD = (
    "Time to first token of one request on a cold cache, from the call to the token on the host, after warm-up; "
    "transformers with sdpa attention and its own cache, fed slices of the prompt, taking turns with Penstock. "
    f"Decode is a whole step of the engine, sampling included. {VLLM} was measured apart, on the same kind of card. "
    "Medians; in brackets the smallest and the largest value, and how many there are."
)


def render(results: GpuResults) -> str:
    parts = [
        _facts(results),
        _METHOD,
        _targets(results),
        _others(results),
        _bits(results),
        _troubles(results),
    ]
    return "\n\n".join(part for part in parts if part)


def _facts(results: GpuResults) -> str:
    machine, card = results.machine, results.card
    versions = {
        "driver": card.driver,
        "CUDA": card.cuda,
        "cuDNN": card.cudnn,
        "torch": machine.torch,
        "Triton": card.triton,
        "transformers": machine.transformers,
        "flash-linear-attention": card.flash_linear_attention,
        "Python": machine.python,
    }
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return (
        f"{card.name}, {card.memory_bytes / 2**30:.0f} GiB, bfloat16, random weights; {known}; "
        f"penstock {machine.penstock} ({machine.commit or 'no commit'}), {machine.date}"
    )


def _targets(results: GpuResults) -> str:
    rows = [_row(each) for each in judge(results, results.sections)]
    if not rows:
        return ""
    head = ["", "Penstock", "transformers", f"{VLLM}, ref.", "bar", "stretch", "limit", ""]
    return _table([head, *rows])


def _row(judged: Judged) -> list[str]:
    target, ours, theirs = judged.target, judged.ours, judged.theirs
    unit = target.unit

    def mark(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:.0%}" if unit == "share" else f"{value:,g}"

    peer = "-"
    if theirs is not None:
        ratio = f", {theirs.median / ours.median:.2f}x" if ours else ""
        peer = f"{_value(theirs)}{ratio}"
    return [
        target.name,
        "-" if ours is None else _value(ours),
        peer,
        mark(target.vllm),
        mark(target.bar),
        mark(target.stretch),
        mark(target.limit),
        judged.verdict,
    ]


def _others(results: GpuResults) -> str:
    """Figures that have no bar."""
    named = {target.name for target in TARGETS}
    rows = [
        [figure.name, figure.system, _value(figure)] for figure in results.figures if figure.name not in named
    ]
    return _table([["", "", "measured"], *rows]) if rows else ""


def _value(figure: Figure) -> str:
    if figure.unit != "share":
        return shown(figure)
    spread = figure.spread
    text = f"{spread.median:.1%}"
    return (
        text
        if len(figure.values) == 1
        else f"{text} ({spread.smallest:.1%} to {spread.largest:.1%}, n={len(figure.values)})"
    )


def _bits(results: GpuResults) -> str:
    if not results.facts:
        return ""
    broken = [f"- NOT so: {fact.name}" for fact in results.facts if not fact.holds]
    num_held = len(results.facts) - len(broken)
    return "\n".join([f"Same bits: {num_held} of {len(results.facts)} comparisons hold.", *broken])


def _troubles(results: GpuResults) -> str:
    failed = [f"- {run.section} failed: {run.error}" for run in results.runs if run.error]
    seconds = ", ".join(f"{run.section} {run.seconds:.0f} s" for run in results.runs)
    lines = [*failed, *(f"- {note}" for note in results.notes)]
    return "\n".join([*lines, *([f"- took {seconds}"] if seconds else [])])


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)
