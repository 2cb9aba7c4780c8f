"""The commands `penstock cache`: what lies in a cache folder, whether it is whole, and how to be rid of it.

They work on files alone, without torch and without any model."""

import json
import re
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer

from penstock.cache import BLOCK_TOKENS
from penstock.cache.store.file import FileKind, find_damage
from penstock.cache.store.folder import ABOUT, ModelFiles, clear_model, scan, set_aside
from penstock.errors import PenstockError, SettingError
from penstock.files import read_plain
from penstock.frontends import options
from penstock.frontends.exits import MEANINGS, reported
from penstock.plan.settings import CACHE_DIR_VARIABLE, StoreSettings, resolve_store
from penstock.plan.units import format_bytes

app = typer.Typer(
    help="The folder in which prompts that were read are kept.", no_args_is_help=True, epilog=MEANINGS
)

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_AGE = re.compile(r"([0-9]{1,9})([smhdw])", re.ASCII)
_ID = re.compile(r"[0-9a-f]{1,32}", re.ASCII)

_MOST_ABOUT_BYTES = 1 << 16
_ID_DIGITS = 12  # enough to tell any models apart
_LONGEST_NAME = 40

_CACHE_DIR = options.option(
    None, f"The cache folder; without it that of {CACHE_DIR_VARIABLE}.", metavar="FOLDER"
)


class DamagedCacheError(PenstockError):
    """Files of a cache folder that do not hold what they say."""


@app.command("ls", epilog=MEANINGS)
def list_models(
    cache_dir: Path | None = _CACHE_DIR,
    cache_size: str | None = options.option(
        None, "The limit to compare with, such as 10GiB.", metavar="BYTES"
    ),
    as_json: bool = options.option(False, "Print JSON in place of a table.", "--json"),
) -> None:
    """List the models of which something is kept."""
    with reported(list_models):
        settings = _settings(cache_dir, cache_size)
        models = [summarise(model) for model in scan(settings.folder)]
        total = sum(model.num_bytes for model in models)
        if as_json:
            rows = [asdict(model) for model in models]
            facts = {"folder": str(settings.folder), "num_bytes": total, "max_bytes": settings.max_bytes}
            typer.echo(json.dumps({**facts, "models": rows}, indent=2))
        else:
            show(models)
            share = f"{format_bytes(total)} of {format_bytes(settings.max_bytes)}"
            typer.echo(f"{settings.folder}: {share} ({total / settings.max_bytes:.1%})")


@app.command(epilog=MEANINGS)
def verify(cache_dir: Path | None = _CACHE_DIR) -> None:
    """Check every file against its checksum, and set aside those that are damaged. Exit status 1 if there are any."""
    with reported(verify):
        folder = _settings(cache_dir).folder
        num_whole = num_damaged = 0
        for model in scan(folder):
            for file in model.files:
                assert file.name is not None
                try:
                    damage = find_damage(file.path, file.name)
                except FileNotFoundError:  # evicted since, by whoever uses the folder
                    continue
                except OSError as error:
                    damage = f"it cannot be read: {error.strerror or error}"
                num_whole += damage is None
                if damage is not None:
                    num_damaged += 1
                    typer.echo(f"{file.path}: {damage}")
                    set_aside(file.path)
        if num_damaged:
            raise DamagedCacheError(
                f"{_count(num_damaged, 'file')} in {folder} {'is' if num_damaged == 1 else 'are'} damaged, "
                f"and set aside; {num_whole} are whole"
            )
        typer.echo(f"{folder}: {_count(num_whole, 'file')}, all whole")


@app.command("rm", epilog=MEANINGS)
def remove_models(
    cache_dir: Path | None = _CACHE_DIR,
    model: str | None = options.option(
        None, "What is kept of this model: its id, or how it begins.", metavar="ID"
    ),
    everything: bool = options.option(False, "What is kept of all models.", "--all"),
    older_than: str | None = options.option(
        None, "What was not used for so long, such as 12h or 7d.", metavar="AGE"
    ),
) -> None:
    """Remove what is kept: of a model, of all, or what was not used for long. Asks nothing."""
    with reported(remove_models):
        if everything and (model is not None or older_than is not None):
            other = "older_than" if model is None else "model"
            raise SettingError("everything", True, contradicts={other: ...})
        if not everything and model is None and older_than is None:
            raise SettingError("there is nothing to remove: give --model ID, --older-than AGE or --all")
        if model is not None and not _ID.fullmatch(model):
            accepted = "a model's id, or how it begins, as `penstock cache ls` shows it"
            raise SettingError("model", model, accepted)
        age_s = None if older_than is None else _seconds(older_than)
        folder = _settings(cache_dir).folder
        chosen = [each for each in scan(folder) if model is None or each.folder.name.startswith(model)]
        if model is not None and not chosen:
            raise SettingError(
                "model", model, because=f"it is the id of no model in {folder}: see `penstock cache ls`"
            )
        if model is not None and len(chosen) > 1:
            names = ", ".join(each.folder.name for each in chosen)
            raise SettingError("model", model, "more of it", because=f"several ids begin so: {names}")
        before_ns = None if age_s is None else time.time_ns() - age_s * 10**9
        num_files = num_bytes = 0
        for each in chosen:
            for file in clear_model(each, before_ns):
                num_files += 1
                num_bytes += file.num_bytes
        typer.echo(f"{folder}: removed {_count(num_files, 'file')}, {format_bytes(num_bytes)}")


def _settings(cache_dir: Path | None, cache_size: str | None = None) -> StoreSettings:
    settings = resolve_store(cache_dir, cache_size)
    if settings is None:
        raise SettingError(f"there is no cache folder: give --cache-dir, or set {CACHE_DIR_VARIABLE}")
    if settings.folder.exists() and not settings.folder.is_dir():
        raise SettingError("cache_dir", str(settings.folder), "another one", because="it is no folder")
    return settings


def _seconds(text: str) -> int:
    match = _AGE.fullmatch(text)
    if match is None:
        raise SettingError("older_than", text, "a number and s, m, h, d or w, such as 12h or 7d")
    return int(match[1]) * _UNITS_S[match[2]]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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


def show(models: list[ModelSummary]) -> None:
    """A row for each model, the one that was used last before the others."""
    from penstock.tables import make_table, show_table

    if not models:
        typer.echo("nothing is kept")
        return
    rows = []
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
    titles = ("id", "model", "dtype", "tokens", "states", "files", "size", "last used")
    show_table(make_table(titles, rows, left=range(3)))


def _about(model: ModelFiles) -> dict[str, str]:
    """What the store says of a model, for people; nothing where that cannot be read."""
    path = model.folder / ABOUT
    try:
        plain = json.loads(read_plain(path, _MOST_ABOUT_BYTES))
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
