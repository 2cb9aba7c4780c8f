"""Files that are replaced whole, and files that results go to."""

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import SettingError


def replace_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Write JSON to a new file, then rename it to `path`: readers see the old file or the new one, whole. Creates the
    folder. An `OSError` leaves the old file as it was."""
    text = json.dumps(content, indent=indent) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def require_outputs(paths: Mapping[str, Path | None]) -> None:
    """Refuse, by setting, what cannot be written: better before the measurements than after them."""
    if paths.get("plot") is not None and find_spec("matplotlib") is None:
        raise SettingError(
            "plot", ..., because="it needs matplotlib, which is not installed: pip install matplotlib"
        )
    for name, path in paths.items():
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            with path.open("ab"):
                pass
            if is_new:
                path.unlink()
        except OSError as error:
            because = str(error.strerror or error)
            raise SettingError(name, str(path), "a file in a folder of yours", because=because) from error
