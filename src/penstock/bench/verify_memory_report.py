"""Predicted and measured memory held against the bars, and as a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.measure.growth import GPU_METHOD, STEADY_METHOD
from penstock.plan import format_bytes

# The model may say more than is measured by a share, and less by a smaller one: a budget rests on it.
MOST_OVER, MOST_UNDER = 0.15, 0.05


@dataclass(frozen=True)
class MemoryCase:
    """Predicted and measured growth of one prefill."""

    model: str
    dtype: str
    kernels: str
    chunk: int
    prompt_tokens: int
    measured_bytes: int
    predicted_bytes: int
    kv_cache_bytes: int
    recurrent_bytes: int
    activation_bytes: int
    phase: str
    seconds: float
    device: str = "cpu"

    @property
    def error(self) -> float:
        """By what share of the measured growth the prediction is over it."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def is_met(self) -> bool:
        return -MOST_UNDER <= self.error <= MOST_OVER


def render(cases: Sequence[MemoryCase]) -> str:
    """A table that a person reads, and the method."""
    columns: tuple[tuple[str, Callable[[MemoryCase], str]], ...] = (
        ("model", lambda case: case.model),
        ("dtype", lambda case: case.dtype),
        ("kernels", lambda case: f"{case.device}, {case.kernels}"),
        ("prompt", lambda case: f"{case.prompt_tokens:,}"),
        ("chunk", lambda case: f"{case.chunk:,}"),
        ("measured", lambda case: format_bytes(case.measured_bytes)),
        ("predicted", lambda case: format_bytes(case.predicted_bytes)),
        ("error", lambda case: f"{case.error:+.1%}"),
        ("K/V", lambda case: format_bytes(case.kv_cache_bytes)),
        ("state", lambda case: format_bytes(case.recurrent_bytes)),
        ("activations", lambda case: f"{format_bytes(case.activation_bytes)} ({case.phase})"),
        ("", lambda case: "" if case.is_met else "missed"),
    )
    rows = [[title for title, _ in columns], *([show(case) for _, show in columns] for case in cases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index < 3 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    missed = sum(not case.is_met for case in cases)
    bars = f"bars: at most {MOST_OVER:.0%} over what is measured, {MOST_UNDER:.0%} under"
    verdict = "all met" if not missed else f"{missed} of {len(cases)} missed"
    return "\n".join([*lines, "", f"{bars}: {verdict}", f"method: {method_of(cases)}"])


def method_of(cases: Sequence[MemoryCase]) -> str:
    """How they were measured: all of them on one device."""
    return GPU_METHOD if any(case.device.startswith("cuda") for case in cases) else STEADY_METHOD
