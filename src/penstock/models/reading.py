"""What goes wrong while a file that may hold anything is read: an error of ours that names the file."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import ModelFileError, PenstockError


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough for a message of ours."""
    return shortened((str(error).strip().splitlines() or [type(error).__name__])[0])


def shortened(text: str, limit: int = 300) -> str:
    """For names and values that somebody else chose the length of."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """The system does not let a file be read."""
    try:
        yield
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def trusting(what: str) -> Iterator[None]:
    """Another library is given a file's contents, and may fail in any way: the tokenizers library raises bare
    exceptions, and its panics are not even those."""
    try:
        yield
    except (PenstockError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ModelFileError(f"{what}: {first_line(error)}") from error
