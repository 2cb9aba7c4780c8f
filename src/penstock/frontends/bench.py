"""`penstock bench`: the benchmarks, which are a program of their own."""

import signal
import subprocess
import sys

import typer

from penstock.frontends.exits import reported

# Everything after `bench` is the program's, its --help too.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Measure: prefill, decode, start, hybrid, serve, sweep, targets, cache, peers, gpu. See `bench serve --help`."""
    with reported():
        raise SystemExit(run_program([sys.executable, "-m", "penstock.bench", *context.args]))


def run_program(command: list[str]) -> int:
    """The exit status of a child, as a shell reports it. A terminal's Ctrl-C reaches the child as well: it says what
    became of its work. So does a request to end, which is passed on."""
    child = subprocess.Popen(command)
    before = signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    try:
        status = child.wait()
    except KeyboardInterrupt:
        status = child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else 128 - status
