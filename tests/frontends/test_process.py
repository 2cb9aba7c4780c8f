"""`penstock` as a process: signals, closed pipes, terminals, and how fast it starts."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from typing import IO

import pytest

from tests.frontends.conftest import INTERRUPTED_AT, INTERRUPTIBLE

Start = Callable[..., "subprocess.Popen[bytes]"]

LONG = "Every sluice has its hour. " * 180  # nearly 5,000 tokens of one byte each
TIMEOUT_S = 120
PIPE_BYTES = 4096


@contextlib.contextmanager
def narrow_pipe() -> Iterator[tuple[IO[bytes], int]]:
    """A pipe with room for a page: who writes more waits for the reader, and cannot have ended before it."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with os.fdopen(ours, "rb", buffering=0) as read_end:
        yield read_end, theirs


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["version"], ["--version"]])
def test_help_and_version_do_not_wait_for_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from penstock.frontends.cli import main\n"
        f"sys.argv = ['penstock', *{arguments!r}]\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    if "--help" in arguments:
        assert "Exit status: 0 done; 2 " in done.stdout
    else:
        assert re.fullmatch(r"penstock \d+\.\d+\.\d+\n", done.stdout)


def test_an_interrupt_while_the_prompt_is_read_ends_between_chunks(start: Start) -> None:
    interrupted = INTERRUPTIBLE + INTERRUPTED_AT.format(num_tokens=100)
    process = start("--prompt", LONG, "--chunk", "1", "--json", before=interrupted)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    result = json.loads(stdout)
    assert result["finish_reason"] == "cancelled"
    assert result["token_ids"] == []
    assert 100 <= result["prefill"]["chunks"] < result["usage"]["prompt_tokens"]
    *progress, closing = stderr.decode().splitlines()
    assert all(line.startswith("prefill ") for line in progress)
    done, total = result["prefill"]["chunks"], result["usage"]["prompt_tokens"]
    assert closing.startswith(f"cancelled after {done} of {total} prompt tokens, ")


def test_an_interrupt_while_text_comes_keeps_the_text(start: Start) -> None:
    with narrow_pipe() as (text, stdout):
        process = start(*("--prompt", "hello", "--max-tokens", "5000"), before=INTERRUPTIBLE, stdout=stdout)
        os.close(stdout)
        first = text.read(1)
        process.send_signal(signal.SIGINT)
        rest = b"".join(iter(lambda: text.read(1 << 16), b""))
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    (first + rest).decode()
    assert re.search(r"cancelled after \d+ answer tokens?", stderr.decode().splitlines()[-1])
    assert "Traceback" not in stderr.decode()


def test_a_reader_that_goes_away_ends_it_quietly(start: Start) -> None:
    with narrow_pipe() as (text, stdout):
        process = start("--prompt", "hello", "--max-tokens", "5000", "--quiet", stdout=stdout)
        os.close(stdout)
        text.read(1)
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(TIMEOUT_S) == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["cache", "ls", "--cache-dir", "/nowhere"]])
def test_a_full_disk_is_a_line_whatever_is_written(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    (line,) = done.stderr.decode().splitlines()
    assert (done.returncode, "No space left" in line) == (1, True), line


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_one_line(start: Start) -> None:
    with open("/dev/full", "wb") as full:
        process = start("--prompt", "hello", "--max-tokens", "9", "--quiet", stdout=full)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert stderr == b"penstock: cannot write to standard output: No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_standard_error_on_a_full_disk_loses_no_answer(start: Start) -> None:
    with open("/dev/full", "wb") as full:
        process = start("--prompt", "hello", "--max-tokens", "9", "--json", stderr=full)
        stdout, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert json.loads(stdout)["usage"]["completion_tokens"] == 9


def test_an_interrupt_while_the_process_ends_is_no_traceback(start: Start) -> None:
    at_end = "import atexit, os; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    interrupted = f"{INTERRUPTIBLE}; {at_end}{INTERRUPTED_AT.format(num_tokens=100)}"
    process = start("--prompt", LONG, "--chunk", "1", before=interrupted)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGINT
    assert b"Traceback" not in stderr


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_closed_standard_output_is_one_line(start: Start, arguments: list[str]) -> None:
    process = start("--prompt", "hello", *arguments, preexec_fn=lambda: os.close(1))
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert stderr.startswith(b"penstock: standard output is closed")
    assert stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--max-tokens", "2"], 0), (["--chunk", "x"], 2), (["--bogus"], 2)]
)
def test_closed_standard_error_leaves_standard_output_alone(
    start: Start, arguments: list[str], status: int
) -> None:
    process = start("--prompt", "hello", "--json", *arguments, preexec_fn=lambda: os.close(2))
    stdout, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == status
    if status == 0:
        json.loads(stdout)
    else:
        assert stdout == b""


def test_a_terminal_shows_a_bar_then_the_text_then_the_closing_line(start: Start) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = start(
        *("--prompt", LONG, "--max-tokens", "3", "--chunk", "500"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    pieces = []
    with contextlib.suppress(OSError):  # Linux says EIO where the other side has gone
        while piece := os.read(ours, 65536):
            pieces.append(piece)
    os.close(ours)
    assert process.wait(TIMEOUT_S) == 0
    screen = b"".join(pieces).decode(errors="replace")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    assert "\x1b[" in screen
    assert "loading " in plain
    assert "━" in plain
    assert "chunk 10/10" in plain
    assert screen.count("\x1b[?25l") == screen.count("\x1b[?25h") > 0  # the cursor is back
    assert "Traceback" not in plain
    closing = plain.rstrip().rsplit("prompt tokens", 1)[1].replace("\r\n", "")
    assert "peak memory" in closing
