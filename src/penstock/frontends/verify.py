"""`penstock verify`: the laws, proved on a model, by a program of its own."""

import sys

import typer

from penstock.frontends.bench import run_program
from penstock.frontends.exits import reported


def verify(context: typer.Context) -> None:
    """Prove on a model that chunks, other requests and the machine change no result (options: `verify --help`)."""
    with reported():
        raise SystemExit(run_program([sys.executable, "-m", "penstock.bench.verify", *context.args]))
