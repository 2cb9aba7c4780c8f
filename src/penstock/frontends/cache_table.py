"""What a cache folder holds, model by model, as a person reads it."""

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

import typer

from penstock.cache import BLOCK_TOKENS
from penstock.cache.store.file import FileKind
from penstock.cache.store.folder import ABOUT, ModelFiles
from penstock.plan.units import format_bytes

_MOST_ABOUT_BYTES = 1 << 16
_ID_DIGITS = 12  # enough to tell any models apart
_LONGEST_NAME = 40


@dataclass(frozen=True)
class ModelSummary:
    id: str
    model: str
    dtype: str
    tokens: int  # of all blocks
    states: int
    files: int
    damaged: int
    num_bytes: int
    last_used: str | None  # in ISO format


def summarise(model: ModelFiles) -> ModelSummary:
    about = _about(model)
    states = sum(file.name is not None and file.name.kind is FileKind.STATE for file in model.files)
    used_ns = max((file.used_ns for file in model.files), default=None)
    return ModelSummary(
        id=model.folder.name,
        model=about.get("model", "unknown"),
        dtype=about.get("dtype", "unknown"),
        tokens=(len(model.files) - states) * BLOCK_TOKENS,
        states=states,
        files=len(model.files),
        damaged=len(model.damaged),
        num_bytes=model.num_bytes,
        last_used=None if used_ns is None else _time(used_ns),
    )


def table(models: list[ModelSummary]) -> list[list[str]]:
    """Titles, then a row for each model, the one that was used last before the others."""
    rows = [["id", "model", "dtype", "tokens", "states", "files", "size", "last used"]]
    for model in sorted(models, key=lambda model: model.last_used or "", reverse=True):
        name = model.model if len(model.model) <= _LONGEST_NAME else "..." + model.model[3 - _LONGEST_NAME :]
        rows.append(
            [
                model.id[:_ID_DIGITS],
                "".join(letter if letter.isprintable() else "?" for letter in name),
                model.dtype,
                f"{model.tokens:,}",
                f"{model.states:,}",
                f"{model.files:,}" + (f" ({model.damaged} damaged)" if model.damaged else ""),
                format_bytes(model.num_bytes),
                "-" if model.last_used is None else _local(model.last_used),
            ]
        )
    return rows


def show(models: list[ModelSummary]) -> None:
    if not models:
        typer.echo("nothing is kept")
        return
    rows = table(models)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        shown = Table(box=None, header_style="bold", padding=(0, 1))
        for index, title in enumerate(rows[0]):
            shown.add_column(title, justify="left" if index < 3 else "right")
        for row in rows[1:]:
            shown.add_row(*row)
        Console(markup=False).print(shown)
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if index < 3 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        typer.echo("  ".join(cells).rstrip())


def _about(model: ModelFiles) -> dict[str, str]:
    """What the store says of a model, for people; nothing where that cannot be read."""
    path = model.folder / ABOUT
    try:
        plain = json.loads(path.read_bytes()) if path.stat().st_size <= _MOST_ABOUT_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(plain, dict):
        return {}
    return {name: value for name, value in plain.items() if isinstance(value, str)}


def _time(used_ns: int) -> str:
    try:
        return datetime.fromtimestamp(used_ns // 10**9, UTC).isoformat()
    except (ValueError, OverflowError, OSError):  # of a clock that was wrong by ages
        return "unknown"


def _local(text: str) -> str:
    return text if text == "unknown" else datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M")
