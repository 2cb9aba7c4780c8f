"""The command `penstock`. What a command needs is imported when it runs, so that help comes at once."""

from typing import Annotated

import typer

from penstock import __version__
from penstock.frontends.exits import MEANINGS, reported
from penstock.frontends.generate import generate

app = typer.Typer(
    help="Language models on long prompts, chunk by chunk.",
    epilog=MEANINGS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(epilog=MEANINGS)(generate)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog=MEANINGS)
def pull(name: Annotated[str, typer.Argument(help="The model: smollm2.", show_default=False)]) -> None:
    """Download a model into the cache folder, unless it is there, and print where it lies."""
    with reported():
        from penstock.errors import ModelError
        from penstock.frontends.answer import write
        from penstock.frontends.present import make_display
        from penstock.models.pull import pull_smollm2

        if name != "smollm2":
            raise ModelError(
                f"there is no model {name!r} to pull: give smollm2; other models are named by "
                "'penstock generate --model', which downloads them where it must"
            )
        with make_display().downloads() as report:
            path = pull_smollm2(report)
        write(f"{path}\n")


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


def main() -> None:
    app(prog_name="penstock")
