"""Where what was read is kept on disk, and how much of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SettingError
from penstock.plan.settings import SettingSource
from penstock.plan.units import parse_bytes

CACHE_DIR_VARIABLE = "PENSTOCK_CACHE_DIR"
CACHE_SIZE_VARIABLE = "PENSTOCK_CACHE_SIZE"
DEFAULT_CACHE_BYTES = 10 << 30


@dataclass(frozen=True)
class StoreSettings:
    """A folder for what was read, the most bytes that it may hold, and where each came from."""

    folder: Path
    max_bytes: int
    folder_source: SettingSource
    size_source: SettingSource


def resolve_store(
    cache_dir: str | Path | None,
    cache_size: int | str | None,
    *,
    environ: Mapping[str, str] | None = None,
) -> StoreSettings | None:
    """The folder from the argument, else from `PENSTOCK_CACHE_DIR`; None where neither names one.
    Its size from the argument, else from `PENSTOCK_CACHE_SIZE`, in bytes or with a unit, else 10 GiB.

    A variable that is empty is not set. A size as an argument without any folder is a contradiction.
    """
    environ = os.environ if environ is None else environ
    size = _resolve_size(cache_size, environ)
    if cache_dir is not None:
        return StoreSettings(_folder("cache_dir", cache_dir), size.max_bytes, "argument", size.source)
    if environ.get(CACHE_DIR_VARIABLE):
        folder = _folder(CACHE_DIR_VARIABLE, environ[CACHE_DIR_VARIABLE])
        return StoreSettings(folder, size.max_bytes, "environment", size.source)
    if cache_size is not None:
        raise SettingError(
            "cache_size",
            cache_size,
            needs=("cache_dir", CACHE_DIR_VARIABLE),
            because="it says how much to keep, but not where",
        )
    return None


@dataclass(frozen=True)
class _Size:
    max_bytes: int
    source: SettingSource


def _resolve_size(argument: int | str | None, environ: Mapping[str, str]) -> _Size:
    if argument is not None:
        return _Size(parse_bytes(argument, "cache_size"), "argument")
    if environ.get(CACHE_SIZE_VARIABLE):
        return _Size(parse_bytes(environ[CACHE_SIZE_VARIABLE], CACHE_SIZE_VARIABLE), "environment")
    return _Size(DEFAULT_CACHE_BYTES, "default")


def _folder(name: str, given: object) -> Path:
    if not isinstance(given, str | Path) or not str(given) or "\0" in str(given):
        raise SettingError(name, given, "the path of a folder, which need not exist")
    try:
        return Path(given).expanduser()
    except RuntimeError:  # pathlib's answer where there is no such home folder
        raise SettingError(
            name, str(given), "another path", because="no such user has a home folder"
        ) from None
