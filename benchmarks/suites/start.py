"""How soon `penstock generate` shows progress, and what a loaded model occupies."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Bar, Bench, Results, bar_of
from benchmarks.suite import Suite
from benchmarks.systems import Child
from penstock.errors import PenstockError
from penstock.models.hub import resolve_model

PROGRESS, RESIDENT = "first line of progress", "resident beyond torch, over the file"
MOST_SECONDS = 5.0
MOST_RESIDENT = 1.5
_REPEATS, _WARM_UPS = 5, 1
_PROMPT = "The sluice was opened a hand's breadth, and the water came through it without haste. " * 40


class LoadEngine:
    """In a fresh process: resident memory with torch imported, and with the model loaded."""

    def measure(self, model: str) -> dict[str, int]:
        import torch

        from penstock.engine.llm import LLM
        from penstock.process_memory import resident_bytes

        torch.zeros(1)
        before = resident_bytes() or 0
        self._llm = LLM(model)
        return {"grown_bytes": (resident_bytes() or 0) - before}


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    """In fresh processes, after one that warms the file cache and leaves the probe's results."""
    path = resolve_model(options.model)
    files = [file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    file_bytes = sum(file.stat().st_size for file in files)
    bench.describe(path.name, options, file_bytes=file_bytes)
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        prompt.write_text(_PROMPT)
        for index in range(1 - _WARM_UPS, (options.repeats or _REPEATS) + 1):
            seconds = _seconds_to_progress(path, prompt)
            with Child("benchmarks.suites.start:LoadEngine", "the process that loads the model") as child:
                grown = child.ask("measure", model=str(path))["grown_bytes"]
            bench.say(f"{seconds:.2f} s to progress, {grown / 2**20:.0f} MiB{' (warm-up)' * (not index)}")
            if index:
                bench.results.add("start", PROGRESS, "s", seconds)
                bench.results.add("start", RESIDENT, "x", grown / file_bytes)


def _seconds_to_progress(path: Path, prompt: Path) -> float:
    command = [sys.executable, "-m", "penstock", "generate", "--model", str(path)]
    command += ["--prompt-file", str(prompt), "--max-tokens", "1"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
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


def _bars(results: Results) -> list[Bar]:
    limits = {PROGRESS: MOST_SECONDS, RESIDENT: MOST_RESIDENT}
    return [bar_of(name, results.figure(name), limit, is_lower_limit=False) for name, limit in limits.items()]


START = Suite(
    "The time from `penstock generate` to its first line of progress, and what a loaded model occupies beyond an "
    "interpreter with torch, each in fresh processes.",
    _measure,
    _bars,
    repeats="processes of each (5)",
    takes=("--model",),
)
