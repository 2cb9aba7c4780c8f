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
FIRST, LOADING = "first line of progress, nothing measured before", "loading again, over the file"
LIMITS = {FIRST: 8.0, PROGRESS: 3.0, RESIDENT: 1.5, LOADING: 2.0}
_REPEATS, _WARM_UPS = 5, 1
_PROMPT = "The sluice was opened a hand's breadth, and the water came through it without haste. " * 40


class LoadEngine:
    """In a fresh process: what loading takes, of resident memory beyond torch's, and of seconds."""

    def measure(self, model: str) -> dict[str, float]:
        import torch

        from penstock.engine.llm import LLM
        from penstock.process_memory import resident_bytes

        torch.zeros(1)
        before = resident_bytes() or 0
        started = time.perf_counter()
        self._llm = LLM(model)
        seconds = time.perf_counter() - started
        return {"grown_bytes": (resident_bytes() or 0) - before, "seconds": seconds}


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    """In fresh processes, after one that warms the file cache and leaves the probe's results. The first starts have a
    cache folder without any."""
    path = resolve_model(options.model)
    files = [file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    file_bytes = sum(file.stat().st_size for file in files)
    bench.describe(path.name, options, file_bytes=file_bytes)
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        prompt.write_text(_PROMPT)
        for index in range(1 - _WARM_UPS, (options.repeats or _REPEATS) + 1):
            seconds = _seconds_to_progress(path, prompt)
            with tempfile.TemporaryDirectory() as home:
                first_s = _seconds_to_progress(path, prompt, Path(home))
            with Child("benchmarks.suites.start:LoadEngine", "the process that loads the model") as child:
                load = child.ask("measure", model=str(path))
            grown, load_s = load["grown_bytes"], load["seconds"]
            bench.say(
                f"{seconds:.2f} s to progress, {first_s:.2f} s at a first start; loading {load_s:.2f} s, "
                f"{grown / 2**20:.0f} MiB{' (warm-up)' * (not index)}"
            )
            if index:
                bench.results.add("start", PROGRESS, "s", seconds)
                bench.results.add("start", FIRST, "s", first_s)
                bench.results.add("start", RESIDENT, "x", grown / file_bytes)
                bench.results.add("start", LOADING, "s/GB", load_s / (file_bytes / 1e9))


def _seconds_to_progress(path: Path, prompt: Path, home: Path | None = None) -> float:
    environ = os.environ if home is None else {**os.environ, "PENSTOCK_HOME": str(home)}
    command = [sys.executable, "-m", "penstock", "generate", "--model", str(path)]
    command += ["--prompt-file", str(prompt), "--max-tokens", "1"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ) as child:
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
    return [bar_of(name, results.figure(name), limit, is_lower_limit=False) for name, limit in LIMITS.items()]


START = Suite(
    "The time from `penstock generate` to its first line of progress, and what a loaded model occupies beyond an "
    "interpreter with torch, each in fresh processes.",
    _measure,
    _bars,
    repeats="processes of each (5)",
    takes=("--model",),
)
