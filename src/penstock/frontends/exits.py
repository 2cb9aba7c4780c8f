"""How a command ends: its exit status, and the one line it says where something went wrong."""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import signature
from types import FrameType
from typing import TextIO

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


# What a write ends with where there is no room.
FULL = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EIO") if hasattr(errno, name)}


class OutputError(PenstockError):
    """Standard output does not take what is written to it."""


@contextlib.contextmanager
def reported(command: Callable[..., None] | None = None) -> Iterator[None]:
    """Turns errors that the user can act on into one line and an exit status, never a traceback. Settings that are
    parameters of the command are named as its options."""
    try:
        if sys.stdout is None:
            raise OutputError("standard output is closed: there is nowhere to write the answer")
        yield
    except PenstockError as error:
        name = partial(_as_typed, _options_of(command))
        complain(error.message(name) if isinstance(error, SettingError) else str(error))
        if isinstance(error, OutputError):
            _discard(sys.stdout, sys.stderr)
        is_mistake = isinstance(error, (SettingError, PromptError))
        status = MISTAKE if is_mistake else NO_MODEL if isinstance(error, ModelError) else FAILED
        raise SystemExit(status) from None
    except KeyboardInterrupt:
        complain("interrupted")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        _discard(sys.stdout, sys.stderr)
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


def run_main(command: Callable[[], object]) -> None:
    """A process's whole life. Where standard error is closed, the next file that is opened would get its number, and
    the warnings of libraries: nothing reads what goes there now. An interrupt is never a traceback: while modules are
    imported it may come out as any error, and while the process ends it is the system's, which says nothing."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open to the end)
    is_interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    try:
        with on_signals([signal.SIGINT], interrupt):
            command()
    except (Exception, KeyboardInterrupt) as error:
        if is_interrupted:
            complain("interrupted")
            raise SystemExit(INTERRUPTED) from None
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            complain(f"cannot write to standard output: {error.strerror}")
            _discard(sys.stdout, sys.stderr)
            raise SystemExit(FAILED) from None
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def say(line: str) -> None:
    """A line to standard error. Where that takes nothing, on a full disk, say, or without a reader, what is said from
    then on is lost, and nothing else."""
    if sys.stderr is None:  # print would take standard output for it
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def complain(message: str) -> None:
    say(f"penstock: {' '.join(message.splitlines())}")


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


def _discard(*streams: TextIO | None) -> None:
    """What is still buffered has nowhere to go; Python would try again at its end, and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                os.dup2(null, stream.fileno())
    os.close(null)
