"""The command `penstock`. What a command needs is imported when it runs, so that help comes at once."""

import typer

from penstock import __version__
from penstock.frontends import options
from penstock.frontends.bench import PASS_ON, bench
from penstock.frontends.cache import app as cache
from penstock.frontends.chat import chat
from penstock.frontends.exits import MEANINGS, reported, run_main
from penstock.frontends.generate import generate
from penstock.frontends.plan import plan
from penstock.frontends.serve import serve
from penstock.frontends.tune import tune
from penstock.frontends.verify import MEANINGS as VERIFY_MEANINGS
from penstock.frontends.verify import verify
from penstock.frontends.worker import worker

app = typer.Typer(
    help="Language models on long prompts, chunk by chunk.",
    epilog=MEANINGS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(epilog=MEANINGS)(generate)
app.command(epilog=MEANINGS)(chat)
app.command("run", epilog=MEANINGS, help="The same as chat.")(chat)
app.command(epilog=MEANINGS)(serve)
app.command(epilog=MEANINGS)(worker)
app.command(epilog=MEANINGS)(plan)
app.command(epilog=MEANINGS)(tune)
app.command(epilog=VERIFY_MEANINGS)(verify)
app.command(context_settings=PASS_ON)(bench)
app.add_typer(cache, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = options.option(
        False, "Print the version.", "--version", callback=_print_version, is_eager=True
    ),
) -> None:
    pass


@app.command(epilog=MEANINGS)
def pull(
    name: str = typer.Argument(help="The model: smollm2 or a Hugging Face name.", show_default=False),
) -> None:
    """Download a model, unless it is there, and print where it lies."""
    with reported():
        from penstock.frontends.answer import fetch, write
        from penstock.frontends.display import make_display

        write(f"{fetch(name, make_display())}\n")


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


def main() -> None:
    run_main(lambda: app(prog_name="penstock"))
