"""`penstock bench`: the benchmarks, which are a program of their own and come with the source."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import typer

import penstock
from penstock.errors import PenstockError
from penstock.frontends.exits import on_signals, reported

# Everything after `bench` is the program's, its --help too.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Measure: prefill, decode, start, hybrid, serve, sweep, targets, cache, peers, gpu. See `bench serve --help`."""
    with reported():
        checkout = Path(penstock.__file__).resolve().parents[2]
        if not (checkout / "benchmarks" / "__main__.py").is_file():
            raise PenstockError(
                "the benchmarks come with the source, not with the installed package: run this in a checkout"
            )
        path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "benchmarks", *context.args]
        raise SystemExit(run_program(command, {**os.environ, "PYTHONPATH": path}))


def run_program(command: list[str], environment: dict[str, str]) -> int:
    """The exit status of a child, as a shell reports it. A terminal's Ctrl-C reaches the child as well: it says what
    became of its work. So does a request to end, which is passed on."""
    child = subprocess.Popen(command, env=environment)
    with on_signals([signal.SIGTERM], lambda number, frame: child.terminate()):
        try:
            status = child.wait()
        except KeyboardInterrupt:
            status = child.wait()
    return status if status >= 0 else 128 - status
