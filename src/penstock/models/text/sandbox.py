"""The process that chat templates run in: transformers' environment of Jinja, with a limit on memory and time and no
files. `chat.py` starts it, and nothing of torch is imported here.

A message is its length in 8 bytes, then its bytes. Requests are JSON; an answer is a letter and a text: T for the
prompt's text, R where the template refuses the messages, F where it fails.
"""

import contextlib
import html  # noqa: F401  # of `striptags`, which imports it when it is used, and by then no file can be opened
import json
import signal
import struct
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2
import jinja2.debug  # Jinja imports it where a template fails, and by then no file can be opened
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

LENGTH = struct.Struct("<Q")
_MEMORY_BYTES = 512 << 20
_MEMORY_PER_BYTE = 16  # of a request


def serve() -> None:
    """Answer requests until there are no more."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    # What is loaded late.
    _environment().from_string("{{ strftime_now('%Z') }}{{ 1 / 0 if messages }}").render()
    _limit("NOFILE", 3)
    _limit("NPROC", 0)
    _limit("FSIZE", 0)
    _limit("CORE", 0)
    while message := _receive(requests):
        _limit("AS", _MEMORY_BYTES + _MEMORY_PER_BYTE * len(message))
        request = json.loads(message)
        if clock := getattr(signal, "setitimer", None):  # should nobody be left to end this process
            clock(signal.ITIMER_REAL, request["limit_s"])
        answer = _answer(request)
        if clock:
            clock(signal.ITIMER_REAL, 0)
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _answer(request: dict[str, Any]) -> bytes:
    try:
        text = _compiled(request["template"]).render(request["values"])
        if len(text) > request["max_characters"]:
            return b"F" + f"it makes a text of {len(text)} characters".encode()
        return b"T" + text.encode(errors="surrogatepass")
    except _RefusalError as error:
        return b"R" + _said(error)
    except MemoryError:
        return b"F" + f"it takes more than {_MEMORY_BYTES >> 20} MiB of memory".encode()
    except Exception as error:  # the template is the file's code, and may fail in any way
        return b"F" + _said(error)


def _said(error: Exception) -> bytes:
    return (str(error)[:1000] or type(error).__name__).encode(errors="replace")


def _receive(stream: BinaryIO) -> bytes:
    size = stream.read(LENGTH.size)
    return stream.read(*LENGTH.unpack(size)) if len(size) == LENGTH.size else b""


def _limit(what: str, most: int) -> None:
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):  # where the system has none
        import resource

        kind = getattr(resource, f"RLIMIT_{what}")
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most, hard if what == "AS" else most))


class _RefusalError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only passes them through."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass_through"), [], [], body).set_lineno(line)

    def _pass_through(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Without names that Python has a use for."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may have a variable called self
        values = dict(*args[1:], **kwargs)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: str) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not have {name!r}")


@lru_cache(maxsize=4)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "namespace": _Namespace,
    }
    return environment


def _refuse(message: str) -> None:
    raise _RefusalError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
