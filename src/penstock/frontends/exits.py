"""How a command ends: its exit status, and the one line it says where something went wrong."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import signature
from types import FrameType

from penstock.errors import ModelError, PenstockError, PromptError, SettingError, assigned

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

# Settings that the engine calls otherwise than the commands' parameters.
_SETTINGS = {"chunk_size": "chunk", "json_format": "json_schema"}


class OutputError(PenstockError):
    """Standard output does not take what is written to it."""


@contextlib.contextmanager
def reported(command: Callable[..., None] | None = None, *, failed: int = FAILED) -> Iterator[None]:
    """Turns errors that the user can act on into one line and an exit status, never a traceback. Settings that are
    parameters of the command are named as its options. `failed` is the status of failures that are not the user's."""
    try:
        if sys.stdout is None:
            raise OutputError("standard output is closed: there is nowhere to write the answer")
        yield
    except PenstockError as error:
        name = partial(_as_typed, _options_of(command))
        complain(error.message(name) if isinstance(error, SettingError) else str(error))
        if isinstance(error, OutputError):
            _discard_output()
        if isinstance(error, (SettingError, PromptError)):
            failed = MISTAKE
        raise SystemExit(NO_MODEL if isinstance(error, ModelError) else failed) from None
    except KeyboardInterrupt:
        complain("interrupted")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(NO_READER) from None


@contextlib.contextmanager
def on_signals(numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Calls `handle` for these signals meanwhile, on the main thread; on others nothing changes. A signal that is
    ignored stays so: a background job is not to be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    ours = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handle) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def _options_of(command: Callable[..., None] | None) -> dict[str, str]:
    """A command's options, by the names of its parameters."""
    found = {}
    for name, parameter in signature(command).parameters.items() if command else ():
        declared = parameter.default.param_decls or (f"--{name.replace('_', '-')}",)
        found[name] = declared[0].partition("/")[0]
    return found


def _as_typed(options: Mapping[str, str], setting: str, value: object) -> str:
    """`--top-p 2` for `top_p=2` and `--no-reuse` for `reuse=False`, where the command has such an option."""
    option = options.get(_SETTINGS.get(setting, setting))
    if option is None:
        return assigned(setting, value)
    if value is False:
        return option.replace("--", "--no-", 1)
    return option if value is ... or value is True else f"{option} {value!r}"


def _discard_output() -> None:
    """What is still buffered has nowhere to go; Python would try again at its end, and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                os.dup2(null, stream.fileno())
    os.close(null)
