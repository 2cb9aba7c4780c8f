"""Files that are replaced whole."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


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
