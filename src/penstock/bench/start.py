"""`python -m penstock.bench start`: how soon `penstock generate` shows progress, and what a loaded model occupies."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from penstock.bench.fresh_process import run_fresh
from penstock.bench.options import count
from penstock.errors import PenstockError
from penstock.measure.machine import Machine, this_machine
from penstock.models.hub import DEFAULT_MODEL

START = "start"
MOST_SECONDS = 5.0
MOST_RESIDENT = 1.5  # of the file
_OUTPUT = Path("bench-results") / f"{START}.json"
_LONGEST_S = 300
_PROMPT = "The sluice was opened a hand's breadth, and the water came through it without haste. " * 40
# Resident memory with torch imported, and with the model loaded.
_LOAD = """
import sys, torch
from penstock.process_memory import resident_bytes
torch.zeros(1)
before = resident_bytes()
from penstock.engine.llm import LLM
llm = LLM(sys.argv[1])
print(resident_bytes() - before)
"""


@dataclass(frozen=True)
class StartResults:
    model: str
    machine: Machine
    progress_s: tuple[float, ...]  # from the start of the process to its first line of progress
    resident_bytes: tuple[int, ...]  # beyond an interpreter with torch
    file_bytes: int

    @property
    def resident_over_file(self) -> float:
        return median(self.resident_bytes) / self.file_bytes

    @property
    def is_met(self) -> bool:
        return median(self.progress_s) <= MOST_SECONDS and self.resident_over_file <= MOST_RESIDENT

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "resident_over_file": self.resident_over_file, "is_met": self.is_met}


def measure_start(path: Path, repeats: int, say: Callable[[str], None]) -> StartResults:
    """In fresh processes, after one that warms the file cache and leaves the probe's results."""
    machine = this_machine()
    seconds, resident = [], []
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        prompt.write_text(_PROMPT)
        for turn in range(repeats + 1):
            seconds.append(_seconds_to_progress(path, prompt))
            resident.append(int(run_fresh([sys.executable, "-c", _LOAD, str(path)], _LONGEST_S)))
            say(
                f"{seconds[-1]:.2f} s to progress, {resident[-1] / 2**20:.0f} MiB"
                + (" (warm-up)" * (not turn))
            )
    size = sum(
        file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()
    )
    return StartResults(str(path.name), machine, tuple(seconds[1:]), tuple(resident[1:]), size)


def render_start(results: StartResults) -> str:
    times, resident = results.progress_s, [size / results.file_bytes for size in results.resident_bytes]
    return (
        f"first line of progress after {median(times):.2f} s ({min(times):.2f} to {max(times):.2f})\n"
        f"resident beyond torch, over the file's {results.file_bytes / 2**20:.0f} MiB: "
        f"{median(resident):.2f} ({min(resident):.2f} to {max(resident):.2f})"
    )


def parse_start_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m penstock.bench {START}",
        description="The time from `penstock generate` to its first line of progress, and what a loaded model "
        "occupies beyond an interpreter with torch, each in fresh processes.",
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="smollm2, a folder or a GGUF file (%(default)s)")
    add("--repeats", type=count, default=5, metavar="N", help="processes of each (%(default)s)")
    add(
        "--check",
        action="store_true",
        help=f"exit with 1 where they are above {MOST_SECONDS:g} s and {MOST_RESIDENT:g} of the file",
    )
    add("--json", dest="output", type=Path, default=_OUTPUT, metavar="FILE", help="results (%(default)s)")
    return parser.parse_args(arguments)


def _seconds_to_progress(path: Path, prompt: Path) -> float:
    command = [
        sys.executable,
        "-m",
        "penstock",
        "generate",
        "--model",
        str(path),
        "--prompt-file",
        str(prompt),
    ]
    started = time.perf_counter()
    with subprocess.Popen(
        [*command, "--max-tokens", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as child:
        assert child.stderr is not None
        said = b""
        while b"prefill " not in said:
            part = os.read(child.stderr.fileno(), 4096)
            if not part:
                raise PenstockError(
                    f"`penstock generate` showed no progress: {said.decode(errors='replace')}"
                )
            said += part
        seconds = time.perf_counter() - started
        while os.read(child.stderr.fileno(), 4096):
            pass
    return seconds
