"""The chunks of a prompt as a table: how long each was, why, what was expected of it and what came."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.plan import format_bytes

if TYPE_CHECKING:  # torch comes with it
    from penstock.engine.explain import ChunkRecord

_HEADS = ("chunk", "tokens", "past", "decodes", "set by", "predicted", "measured", "memory", "measured")


def explain_lines(records: Sequence["ChunkRecord"]) -> list[str]:
    """A line of heads, then one for each chunk. A dash is for what was not known; memory that was measured has a
    column where any was."""
    rows = [_HEADS, *(_row(index, record) for index, record in enumerate(records, 1))]
    if all(record.measured_bytes is None for record in records):
        rows = [row[:-1] for row in rows]
    heads = rows[0]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    notes = ["", *(record.because for record in records)]
    lines = []
    for row, note in zip(rows, notes, strict=True):
        cells = [
            cell.ljust(width) if head == "set by" else cell.rjust(width)
            for cell, width, head in zip(row, widths, heads, strict=True)
        ]
        lines.append("  ".join([*cells, note]).rstrip())
    return lines


def _row(index: int, record: "ChunkRecord") -> tuple[str, ...]:
    return (
        str(index),
        str(len(record)),
        str(record.past),
        str(record.num_decodes),
        record.rule,
        _time(record.predicted_s),
        _time(record.measured_s),
        _bytes(record.predicted_bytes),
        _bytes(record.measured_bytes),
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.1f} ms" if seconds < 0.0995 else f"{1000 * seconds:.0f} ms"


def _bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)
