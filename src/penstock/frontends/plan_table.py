"""A plan as JSON, and as a table that a person reads."""

import sys
from dataclasses import asdict, replace

import typer

from penstock.frontends.plan_rows import Plan
from penstock.plan import format_bytes

_TITLES = {
    "input": "inputs",
    "hidden": "hidden",
    "projection": "projections",
    "attention": "attention",
    "delta_net": "delta net",
    "mlp": "MLP",
    "logits": "logits",
}


def to_json(made: Plan) -> dict[str, object]:
    """Everything in bytes, parts by name."""
    rows = [
        {
            "chunk": row.chunk,
            "chunks": row.num_chunks,
            "activation_bytes": row.activations.peak_bytes,
            "activation_parts": row.activations.parts,
            "phase": row.activations.phase,
            "total_bytes": row.total_bytes,
            "saved": row.saved,
            "fits": row.fits,
            "is_chosen": row.chunk == made.chosen,
        }
        for row in made.rows
    ]
    return {**asdict(replace(made, rows=())), "rows": rows}


def summary_lines(made: Plan) -> list[str]:
    """What does not depend on the chunk."""
    beside = f", {made.num_decodes} answers of as many tokens beside it" if made.num_decodes else ""
    why = f" ({made.weights_reason})" if made.weights_reason else ""
    fixed = [
        f"weights {format_bytes(made.weights_bytes)}{why}",
        f"K/V cache {format_bytes(made.kv_cache_bytes)}",
    ]
    if made.recurrent_bytes:
        fixed.append(f"recurrent states {format_bytes(made.recurrent_bytes)}")
    return [
        f"{made.model}: a prompt of {made.prompt_tokens:,} tokens{beside}, {made.dtype}, {made.kernels} kernels",
        f"whatever the chunk: {', '.join(fixed)}",
    ]


def verdict(made: Plan) -> str:
    """Which row is chosen, and why."""
    if made.chosen is None:
        return "chosen: none"
    return f"chosen: chunk {made.chosen:,}, {made.reason}"


def table(made: Plan) -> list[list[str]]:
    """Titles, then a row for each chunk size. Parts that are empty in every row are left out."""
    shown = [name for name in _TITLES if any(row.activations.parts[name] for row in made.rows)]
    titles = ["", "chunk", "chunks", *(_TITLES[name] for name in shown), "activations", "peak", "saved"]
    rows = [titles + ([] if made.budget_bytes is None else ["fits"])]
    for row in made.rows:
        parts = row.activations.parts
        rows.append(
            [
                "->" if row.chunk == made.chosen else "",
                "whole" if row.chunk == made.prompt_tokens else f"{row.chunk:,}",
                f"{row.num_chunks:,}",
                *(format_bytes(parts[name]) if parts[name] else "-" for name in shown),
                format_bytes(row.activations.peak_bytes),
                format_bytes(row.total_bytes),
                f"{row.saved:.1%}",
                *([] if row.fits is None else ["yes" if row.fits else "no"]),
            ]
        )
    return rows


_NOTES = (
    "Parts are what lives at the moment a step holds the most. Peak has weights, K/V cache and states too.",
    "Saved is the share of one pass's memory, weights left aside.",
)


def show(made: Plan) -> None:
    for line in summary_lines(made):
        typer.echo(line)
    typer.echo()
    rows = table(made)
    if sys.stdout.isatty():
        _show_rich(rows, made.chosen is not None)
    else:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            typer.echo("  ".join(cells).rstrip())
    typer.echo()
    typer.echo(verdict(made))
    for line in _NOTES:
        typer.echo(line)


def _show_rich(rows: list[list[str]], has_choice: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, header_style="bold", padding=(0, 1))
    for title in rows[0]:
        shown.add_column(title, justify="right")
    for row in rows[1:]:
        shown.add_row(*row, style="bold green" if has_choice and row[0] else None)
    Console().print(shown)
