"""How a command ends: its exit status, and the one line it says where something went wrong."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator

from penstock.errors import ContextLengthError, ModelError, PenstockError, PromptError, SettingError

FAILED = 1
MISTAKE = 2
NO_MODEL = 3
INTERRUPTED = 128 + 2  # as a shell reports a process that SIGINT ended
NO_READER = 128 + 13  # and one that SIGPIPE ended

MEANINGS = (
    f"Exit status: 0 done; {MISTAKE} an option or a prompt that is not accepted; {NO_MODEL} a model that "
    f"cannot be found, downloaded or read; {FAILED} any other failure; {INTERRUPTED} interrupted; "
    f"{NO_READER} whoever read standard output has gone."
)

_OPTIONS = {"chunk_size": "chunk", "target_itl_ms": "target_itl", "target_ttft_ms": "target_ttft"}
# Names with an underscore are settings wherever they stand; plain words only where they are given a value.
_SETTING = re.compile(
    r"\b(chunk_size|max_tokens|top_k|top_p|min_p|repetition_penalty|step_tokens|cache_(?:tokens|dir|size)|served_name"
    r"|target_itl_ms|target_ttft_ms"
    r"|max_(?:activation|running|waiting|chunk_steps|decode_steps|body_bytes|prompt_tokens))\b(=?)"
    r"|\b(overlap|temperature|stop|seed|dtype|weights|device|threads|policy|host|port|grace)(=)|^(system)\b()"
)


class OutputError(PenstockError):
    """Standard output does not take what is written to it."""


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turns errors that the user can act on into one line and an exit status, never a traceback."""
    try:
        if sys.stdout is None:
            raise OutputError("standard output is closed: there is nowhere to write the answer")
        yield
    except PenstockError as error:
        complain(_with_option_names(error))
        if isinstance(error, OutputError):
            _discard_output()
        raise SystemExit(_status(error)) from None
    except KeyboardInterrupt:
        complain("interrupted")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(NO_READER) from None


def fill_closed_error() -> None:
    """Where standard error is closed, the next file that is opened would get its number, and the warnings of
    libraries. Nothing reads what goes there now."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open to the end)


def complain(message: str) -> None:
    if sys.stderr is None:  # print would take standard output for it
        return
    line = " ".join(message.splitlines())
    with contextlib.suppress(OSError):
        print(f"penstock: {line}", file=sys.stderr, flush=True)


def _status(error: PenstockError) -> int:
    if isinstance(error, (SettingError, PromptError)):
        return MISTAKE
    return NO_MODEL if isinstance(error, ModelError) else FAILED


def _with_option_names(error: PenstockError) -> str:
    """The message with settings named as the user typed them: `--top-p 2` for `top_p=2`."""
    if not isinstance(error, (SettingError, ContextLengthError)):
        return str(error)
    return _SETTING.sub(_option_name, str(error))


def _option_name(match: re.Match[str]) -> str:
    name, equals = match[1] or match[3] or match[5], match[2] or match[4]
    return "--" + _OPTIONS.get(name, name).replace("_", "-") + (" " if equals else "")


def _discard_output() -> None:
    """What is still buffered has nowhere to go; Python would try again at its end, and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                os.dup2(null, stream.fileno())
    os.close(null)
