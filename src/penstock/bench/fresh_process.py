"""A command in a process of its own, whose failure is told in one line."""

import subprocess
from collections.abc import Mapping, Sequence

from penstock.errors import PenstockError


def run_fresh(command: Sequence[str], longest_s: float, env: Mapping[str, str] | None = None) -> str:
    """What it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=longest_s, env=env)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["it said nothing"]
        raise PenstockError(
            f"a process that loads the model ended with {error.returncode}: {lines[-1]}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise PenstockError(f"a process that loads the model took longer than {longest_s} s") from error
    return done.stdout
