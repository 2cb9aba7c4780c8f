"""Files that are replaced whole, files that results go to, and files that may be something else by now."""

import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import SettingError

_FLAT_LIST = re.compile(r"\[[^\[\]{}\"]*\]")  # of numbers, truth values and nulls


def readable_json(content: Any) -> str:
    """Indented, but a list of numbers on one line: there may be thousands of them. What is infinite is null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda constant: None)
    return _FLAT_LIST.sub(lambda match: json.dumps(json.loads(match[0])), json.dumps(finite, indent=2)) + "\n"


def replace_text(path: Path, text: str) -> None:
    """Write a text to a new file, then rename it to `path`: readers see the old file or the new one, whole. An
    `OSError` leaves the old file as it was."""
    options: dict[str, Any] = {"dir": path.parent, "prefix": f".{path.stem}-", "delete": False}
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", **options) as file:
        try:
            file.write(text)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def replace_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """The same of JSON. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(content, indent=indent) + "\n")


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


def open_plain(path: Path) -> int:
    """Open a plain file for reading. Anything else is an `OSError`: a pipe would hang, and a device has no end."""
    flags = os.O_RDONLY
    for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):
        flags |= getattr(os, flag, 0)
    file = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.ENXIO, f"{path} is no plain file")
    return file


def read_plain(path: Path, max_bytes: int) -> bytes:
    """What a plain file holds. An `OSError` where it is none, or holds more."""
    with open(open_plain(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"{path} has more than {max_bytes} bytes")
    return content
