"""From a model's name to an answer on standard output: what the command line and the demo share."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.frontends.exits import OutputError
from penstock.frontends.lines import cached_line, closing_line, device_line
from penstock.frontends.present import Display
from penstock.frontends.signals import on_interrupt
from penstock.models.reading import shortened

if TYPE_CHECKING:
    from penstock.engine.llm import LLM
    from penstock.engine.results import Generation
    from penstock.plan import EngineSettings
    from penstock.plan.progress import Progress


def fetch(model: str, display: Display) -> Path:
    """Where the model lies, downloaded where it must be."""
    if not display.shows_bars:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with display.busy(f"looking for {shortened(model, 60)}"):
        from penstock.models.hub import resolve_model
    with display.downloads() as report:
        return resolve_model(model, report, display.note)


def load(model: str, display: Display, settings: "EngineSettings | None" = None) -> "LLM":
    """The model, downloaded where it must be."""
    path = fetch(model, display)
    with display.busy(f"loading {shortened(model, 60)}"):
        from penstock.engine.llm import LLM

        llm = LLM(path, settings=settings)
    if llm.skipped:
        display.note(llm.skipped)
    if not llm.device_kind.is_host:
        display.note(device_line(llm))
    return llm


@contextlib.contextmanager
def loaded(model: str, display: Display, settings: "EngineSettings | None" = None) -> Iterator["LLM"]:
    """The model for a while. At the end, what was read is in the cache folder, where there is one; what is wrong with
    that folder is told as a warning."""
    with display.warnings("penstock.cache"):
        llm = load(model, display, settings)
        try:
            yield llm
        finally:
            with (
                contextlib.nullcontext() if llm.store is None else display.busy("writing to the cache folder")
            ):
                llm.close()


def answer(
    llm: "LLM", prompt: str, display: Display, *, shows_text: bool = True, **request: Any
) -> "Generation":
    """Read the prompt and answer it, both in view. Ctrl-C ends it between two steps."""
    is_told = False

    def tell(progress: "Progress") -> None:
        nonlocal is_told
        if progress.num_cached and not is_told:
            is_told = True
            display.note(cached_line(progress))

    def show(progress: "Progress") -> None:
        tell(progress)
        display.progress(progress)

    stream = llm.stream(prompt, on_progress=show, **request)

    def cancel() -> None:
        stream.cancel()
        display.cancelling()

    tell(stream.progress)
    with stream, on_interrupt(cancel), display.reading(stream.progress):
        text = ""
        for text in stream:
            if shows_text:
                write(text)
    if shows_text and text and not text.endswith("\n"):
        write("\n")
    display.close(closing_line(stream.result, stream.progress))
    return stream.result


def write(text: str) -> None:
    """To standard output, at once and as it is."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal that cannot show every character
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error
