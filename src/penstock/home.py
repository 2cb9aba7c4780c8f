"""The cache folder: models that were pulled, and what was measured on this machine."""

import os
import sys
from pathlib import Path


def cache_home() -> Path:
    """`$PENSTOCK_HOME`, or `penstock` in the platform's cache folder. Not created here."""
    override = os.environ.get("PENSTOCK_HOME")
    return Path(override).expanduser() if override else _platform_cache() / "penstock"


def _platform_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    name, default = ("LOCALAPPDATA", "AppData/Local") if os.name == "nt" else ("XDG_CACHE_HOME", ".cache")
    given = Path(os.environ.get(name, ""))
    # A relative path in the environment is to be ignored, by the XDG rules.
    return given if given.is_absolute() else Path.home() / default
