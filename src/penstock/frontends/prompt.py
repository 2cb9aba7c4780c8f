"""The prompt from where the user put it: an option, a file, standard input."""

import sys
from pathlib import Path

from penstock.errors import PromptError
from penstock.models.reading import shortened


def read_prompt(prompt: str | None, file: str | None) -> str:
    """A file's text, a blank line, then `prompt`; either alone; standard input where there is neither.

    The file `-` is standard input. A line end at the end of a file is the file's and not the prompt's.
    """
    if prompt is not None:
        check_text("--prompt", prompt)
    if file is not None:
        document = _read(file)
        text = document if prompt is None else f"{document}\n\n{prompt}"
    elif prompt is not None:
        text = prompt
    elif sys.stdin is None or sys.stdin.isatty():
        raise PromptError("there is no prompt: give --prompt, --prompt-file or text on standard input")
    else:
        text = _read("-")
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


def _read(file: str) -> str:
    name = "standard input" if file == "-" else f"--prompt-file {shortened(file)}"
    if file == "-" and sys.stdin is None:
        raise PromptError("standard input is closed: give --prompt or --prompt-file")
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
    except FileNotFoundError:
        raise PromptError(f"{name}: there is no such file") from None
    except IsADirectoryError:
        raise PromptError(f"{name} is a folder: give a text file") from None
    except (OSError, ValueError, RuntimeError) as error:  # the last of expanduser
        raise PromptError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}): convert it first"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")
