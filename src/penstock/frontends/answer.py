"""From a prompt and a model's name to an answer on standard output: what the command line and the demo share."""

import contextlib
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from penstock.errors import PromptError, SettingError
from penstock.frontends.display import Display, cached_line, closing_line, device_line
from penstock.frontends.exits import OutputError, on_signals
from penstock.models.reading import shortened

if TYPE_CHECKING:
    from penstock.engine.events import Generation
    from penstock.engine.llm import LLM, Prompt
    from penstock.plan import EngineSettings
    from penstock.plan.progress import Progress


MAX_TEXT_BYTES = 256 << 20  # of a prompt, or a conversation: no model reads as much


def read_prompt(prompt: str | None, file: str | None) -> str:
    """A file's text, a blank line, then `prompt`; either alone; standard input where there is neither.

    The file `-` is standard input. A line end at the end of a file is the file's and not the prompt's.
    """
    if prompt is not None:
        check_text("--prompt", prompt)
    if file is not None:
        document = read_text(file).removesuffix("\n").removesuffix("\r")
        text = document if prompt is None else f"{document}\n\n{prompt}"
    elif prompt is not None:
        text = prompt
    elif sys.stdin is None or sys.stdin.isatty():
        raise PromptError("there is no prompt: give --prompt, --prompt-file or text on standard input")
    else:
        text = read_text("-").removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise PromptError("the prompt is empty: give --prompt, --prompt-file or text on standard input")
    return text


def check_text(option: str, text: str) -> None:
    """Refuse what the shell passed on but no text can hold."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PromptError(f"{option} is not accepted: it is not UTF-8 text") from None


def read_bytes(path: Path | None) -> bytes:
    """What a file holds, or standard input; an `OSError` for what has no end."""
    with contextlib.nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as opened:
        content = opened.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_TEXT_BYTES} bytes")
    return content


def read_text(file: str, option: str = "--prompt-file") -> str:
    """A file's text, as it is; of `-`, standard input's."""
    name = "standard input" if file == "-" else f"{option} {shortened(file)}"
    if file == "-" and sys.stdin is None:
        raise PromptError("standard input is closed: give --prompt or --prompt-file")
    try:
        content = read_bytes(None if file == "-" else Path(file).expanduser())
    except FileNotFoundError:
        raise PromptError(f"{name}: there is no such file") from None
    except IsADirectoryError:
        raise PromptError(f"{name} is a folder: give a text file") from None
    except (OSError, ValueError, RuntimeError) as error:  # the last of expanduser
        raise PromptError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}): convert it first"
        ) from None


def read_bias(texts: Sequence[str]) -> dict[int, float]:
    """Biases by token id, each from a text such as `42=-1.5`."""
    bias = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise SettingError("logit_bias", text, "a token id and a number, such as 42=-1.5") from None
    return bias


def read_sequences(texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids, each sequence from a text such as `12,7`."""
    try:
        return tuple(tuple(map(int, text.split(","))) for text in texts)
    except ValueError:
        raise SettingError("bad_sequences", [*texts], "token ids, such as 12,7") from None


def read_schema(text: str) -> dict[str, Any]:
    """A JSON schema, or the file that holds one."""
    try:
        schema = json.loads(text if text.lstrip().startswith("{") else read_bytes(Path(text).expanduser()))
        if isinstance(schema, dict):
            return schema
        because = "it is no object"
    except OSError as error:
        because = error.strerror or str(error)
    except (ValueError, RuntimeError) as error:
        because = str(error)
    raise SettingError("json_schema", shortened(text), "a JSON schema, or a file with one", because=because)


def read_grammar(text: str) -> str:
    """A grammar, or that of the file that holds one."""
    if "\n" in text or ":" in text:
        return text
    try:
        return read_bytes(Path(text).expanduser()).decode()
    except (OSError, ValueError, RuntimeError) as error:
        because = getattr(error, "strerror", None) or str(error)
        raise SettingError(
            "grammar", shortened(text), "a grammar, or a file with one", because=because
        ) from None


def fetch(model: str, display: Display) -> Path:
    """Where the model lies, downloaded where it must be."""
    if not display.shows_bars:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with display.busy(f"looking for {shortened(model, 60)}"):
        from penstock.models.hub import resolve_model
    with display.downloads() as report:
        return resolve_model(model, report, display.note)


@contextlib.contextmanager
def loaded(model: str, display: Display, settings: "EngineSettings | None" = None) -> Iterator["LLM"]:
    """The model for a while, downloaded where it must be. At the end, what was read is in the cache folder, where one
    is in use; what is wrong with that folder, and kernels that cannot be had, are told as warnings."""
    with display.warnings("penstock.cache"), display.warnings("penstock.kernels"):
        path = fetch(model, display)
        with display.busy(f"loading {shortened(model, 60)}"):
            from penstock.engine.llm import LLM

            llm = LLM(path, settings=settings)
        if llm.skipped:
            display.note(llm.skipped)
        if not llm.device_kind.is_host:
            display.note(device_line(llm))
        try:
            yield llm
        finally:
            has_folder = llm.store is not None
            with display.busy("writing to the cache folder") if has_folder else contextlib.nullcontext():
                llm.close()


def answer(
    llm: "LLM", prompt: "Prompt", display: Display, *, shows_text: bool = True, **request: Any
) -> "Generation":
    """Read the prompt and answer it, both in view. Ctrl-C ends it between two steps."""
    is_told = False

    def tell(progress: "Progress") -> None:
        nonlocal is_told
        if progress.num_cached and not is_told and not display.is_brief:
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
    display.close(closing_line(stream.result, stream.progress, is_brief=display.is_brief))
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


@contextlib.contextmanager
def on_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `cancel`, which must only take note; the second raises KeyboardInterrupt; after
    that the system's own handling applies. What was in force before is restored at the end."""
    is_cancelled = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_cancelled
        if is_cancelled:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        is_cancelled = True
        cancel()

    with on_signals([signal.SIGINT], handle):
        yield
