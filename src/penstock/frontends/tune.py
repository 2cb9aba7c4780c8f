"""`penstock tune`: measure a model on this machine, which is a program of its own."""

import sys

import typer

from penstock.frontends.bench import run_program
from penstock.frontends.exits import reported


def tune(context: typer.Context) -> None:
    """Measure this model on this machine, so that `--chunk auto` starts from it (options: `penstock tune --help`)."""
    with reported():
        raise SystemExit(run_program([sys.executable, "-m", "penstock.bench.tune", *context.args]))
