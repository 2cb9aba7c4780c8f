"""What may lie where a file of Penstock's own should: nothing of it may hang or take memory without bound."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # takes no space


ODD_FILES: list[Callable[[Path], object]] = [
    pytest.param(os.mkfifo, id="a pipe"),  # type: ignore[list-item]
    pytest.param(lambda path: path.symlink_to("/dev/zero"), id="a device"),  # type: ignore[list-item]
    pytest.param(_large, id="a terabyte"),  # type: ignore[list-item]
]
