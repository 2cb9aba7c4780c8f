"""Chat templates, which are a file's code: rendered as transformers renders them, in a process that may be lost."""

import atexit
import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from penstock.errors import ModelError, ModelFileError, PromptError
from penstock.models.reading import first_line
from penstock.models.text.calls import CallFormat, ThoughtMarks, read_format, read_thoughts

MAX_TEMPLATE_BYTES = 1 << 20
LIMIT_S = 5.0
# What a template may make: so much, and more where it is given more.
_MAX_TEXT = 1 << 20
_MAX_TEXT_PER_BYTE = 16
_LENGTH = struct.Struct("<Q")
_START = "import sys; sys.path[:] = sys.argv[1:]; from penstock.models.text.sandbox import serve; serve()"


class ChatTemplate:
    """A template and the special tokens that it may name, such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_BYTES:
            raise ModelFileError(f"the model's chat template is absurdly large: {len(source)} characters")
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._is_slow = False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """`variables` are more of those that a template may look at, such as `enable_thinking`."""
        values = {
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        try:
            given = json.dumps(values)
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"a chat's messages are text, or lists and objects of it: {error}") from error
        return _process.render(self.source, given)

    def prepare(self) -> None:
        """Find out now what is asked of it later."""
        _ = self.calls, self.thoughts

    @cached_property
    def calls(self) -> CallFormat:
        """How it writes calls of tools."""
        return read_format(self.source, self._probe, [*self._special_tokens.values()])

    @cached_property
    def thoughts(self) -> ThoughtMarks | None:
        return read_thoughts(self.source, self._probe)

    def _probe(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        if self._is_slow:  # one that took too long is not waited for again
            raise _failure("it took too long")
        try:
            return self.render(messages, tools=tools, add_generation_prompt=False)
        except _SlowTemplateError:
            self._is_slow = True
            raise


class _SlowTemplateError(ModelFileError):
    pass


class _TemplateProcess:
    """Started when the first template is rendered; replaced when it dies or takes too long. It ends with this
    process: its requests end, or its own clock runs out."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a process that was forked off, where the pipes are another's."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, values: str) -> str:
        max_characters = _MAX_TEXT + _MAX_TEXT_PER_BYTE * len(values)
        limits = f'"limit_s": {LIMIT_S + 1}, "max_characters": {max_characters}'
        request = f'{{"template": {json.dumps(template)}, "values": {values}, {limits}}}'.encode()
        with self._lock:
            answer = self._ask(request, max_bytes=1 + 4 * max_characters)
        kind, text = answer[:1], answer[1:].decode(errors="surrogatepass")
        if kind == b"T":
            return text
        what = first_line(Exception(text))
        if kind == b"R":
            raise PromptError(f"the model's chat template refuses these messages: {what}")
        raise _failure(what)

    def _ask(self, request: bytes, max_bytes: int) -> bytes:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        clock = threading.Timer(LIMIT_S, end)
        clock.daemon = True
        answer = b""
        try:
            clock.start()
            with contextlib.suppress(OSError):  # it died
                process.stdin.write(_LENGTH.pack(len(request)) + request)
                process.stdin.flush()
                size = process.stdout.read(_LENGTH.size)
                num_bytes = _LENGTH.unpack(size)[0] if len(size) == _LENGTH.size else 0
                answer = process.stdout.read(num_bytes) if num_bytes <= max_bytes else b""
                if len(answer) != num_bytes:
                    answer = b""
            clock.cancel()
            clock.join()
        except BaseException:
            clock.cancel()
            self.stop()
            raise
        if not answer or is_late.is_set():
            self.stop()
            if is_late.is_set():
                raise _failure(f"it takes more than {LIMIT_S:g} s", _SlowTemplateError)
            raise _failure("its process died")
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            path = [os.path.abspath(folder) for folder in sys.path]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-ISc", _START, *path],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt is for this process alone
                )
            except (OSError, ValueError) as error:
                raise ModelError(f"cannot start a process for the model's chat template: {error}") from error
        return self._process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):  # what was not written yet
                process.communicate()


def _failure(what: str, kind: type[ModelFileError] = ModelFileError) -> ModelFileError:
    return kind(f"the model's chat template fails: {what}")


_process = _TemplateProcess()
atexit.register(_process.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.forget)
