"""The cache folder: models that were pulled, and what was measured on this machine."""

import os
import sys
from pathlib import Path

from penstock.errors import SettingError


def cache_home() -> Path:
    """`$PENSTOCK_HOME`, or `penstock` in the platform's cache folder. Not created here."""
    override = os.environ.get("PENSTOCK_HOME")
    try:
        return Path(override).expanduser() if override else _platform_cache() / "penstock"
    except RuntimeError:  # pathlib's answer where there is no home folder
        folder = "the folder to keep models in"
        if not override:
            raise SettingError(f"this user has no home folder: set PENSTOCK_HOME to {folder}") from None
        raise SettingError(
            "PENSTOCK_HOME", override, folder, because="it names no user's home folder"
        ) from None


def _platform_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    name, default = ("LOCALAPPDATA", "AppData/Local") if os.name == "nt" else ("XDG_CACHE_HOME", ".cache")
    given = Path(os.environ.get(name, ""))
    # A relative path in the environment is to be ignored, by the XDG rules.
    return given if given.is_absolute() else Path.home() / default
