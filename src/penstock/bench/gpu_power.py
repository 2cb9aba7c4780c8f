"""What a GPU draws while something runs, and how fast its clock is by then: one that draws all it may slows down."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

_COMMAND = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw,power.limit", "--format=csv,noheader,nounits")
_INTERVAL_MS = 100
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class PowerSample:
    clock_mhz: float
    watts: float
    most_watts: float


def watch_power(work: Callable[[], object], command: tuple[str, ...] = _COMMAND) -> list[PowerSample]:
    """Run something, and say what the first GPU drew meanwhile, time after time; nothing where that is not known."""
    with tempfile.TemporaryFile("w+") as file:
        try:
            watching = subprocess.Popen(
                [*command, "--id=0", f"--loop-ms={_INTERVAL_MS}"], stdout=file, stderr=subprocess.DEVNULL
            )
        except OSError:
            work()
            return []
        try:
            gives_up_s = time.monotonic() + _PATIENCE_S
            while not _size(file.fileno()) and watching.poll() is None and time.monotonic() < gives_up_s:
                time.sleep(0.01)
            begun_at = _size(file.fileno())
            work()
        finally:
            watching.terminate()
            watching.wait()
        file.seek(begun_at)
        return [sample for line in file if (sample := _parse(line)) is not None]


def _size(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


def _parse(line: str) -> PowerSample | None:
    """None of a line that was not written to its end, or says that something is not supported."""
    try:
        clock, watts, most = (float(part) for part in line.split(","))
    except ValueError:
        return None
    return PowerSample(clock, watts, most) if line.endswith("\n") else None
