"""The cache folder: models that were pulled, and what was measured on this machine."""

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_home() -> Path:
    """`$PENSTOCK_HOME`, or the platform's cache folder. Not created here."""
    override = os.environ.get("PENSTOCK_HOME")
    return Path(override).expanduser() if override else user_cache_path("penstock")
