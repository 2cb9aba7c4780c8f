"""Processes that share a folder, and processes that are killed in the middle of writing."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("program", ["together", "killed"])
def test_files_are_whole_and_right_whatever_others_do(tmp_path: Path, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cache.sharing", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
