"""An engine in a process of its own, that is asked and answers in lines of JSON."""

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from penstock.errors import PenstockError

# vLLM compiles the model when it is loaded, which on two cores takes minutes.
LOAD_TIMEOUT_S = 1200.0
ANSWER_TIMEOUT_S = 1200.0
_END_TIMEOUT_S = 20.0
_PIECE_BYTES = 1 << 16


class PeerError(PenstockError):
    """An engine that ended, failed, or answered what cannot be understood."""


@dataclass(frozen=True)
class Loaded:
    about: str  # which engine, of which version
    load_s: float
    weights: str | None = None  # how they lie in memory, where it tells


@dataclass(frozen=True)
class Answered:
    """The tokens, and when each came, counted from the call, by the engine's own clock."""

    token_ids: tuple[int, ...]
    stamps_s: tuple[float, ...]

    @property
    def first_token_s(self) -> float:
        return self.stamps_s[0]

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of the tokens after the first; None where there are none."""
        seconds = self.stamps_s[-1] - self.stamps_s[0]
        return (len(self.stamps_s) - 1) / seconds if seconds > 0 else None


class PeerProcess:
    """A process that serves as `peer_workers/serve.py` tells. It ends with its `with` block, or with this process."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `close`)
        self._unread = b""
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{name} cannot be started: {command[0]}: {error.strerror or error}") from error

    def prepare(self, settings: Mapping[str, Any]) -> None:
        self._ask({"do": "prepare", "settings": dict(settings)}, LOAD_TIMEOUT_S)

    def load(self, settings: Mapping[str, Any]) -> Loaded:
        reply = self._ask({"do": "load", "settings": dict(settings)}, LOAD_TIMEOUT_S)
        try:
            weights = reply.get("weights")
            return Loaded(
                str(reply["about"]), float(reply["load_s"]), None if weights is None else str(weights)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._nonsense(reply) from error

    def generate(
        self, prompt: Sequence[int], num_tokens: int, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> Answered:
        request = {"do": "generate", "prompt": list(prompt), "num_tokens": num_tokens}
        reply = self._ask(request, timeout_s)
        try:
            answered = Answered(tuple(map(int, reply["token_ids"])), tuple(map(float, reply["stamps_s"])))
        except (KeyError, TypeError, ValueError) as error:
            raise self._nonsense(reply) from error
        stamps = answered.stamps_s
        if not len(answered.token_ids) == len(stamps) == num_tokens:
            raise PeerError(
                f"{self.name} gave {len(answered.token_ids)} tokens where {num_tokens} were asked for"
            )
        if stamps[0] <= 0 or list(stamps) != sorted(stamps):
            raise PeerError(f"{self.name} gave times that do not follow each other: {stamps[:4]}")
        return answered

    def close(self) -> None:
        """Ask it to end; where it does not, end it."""
        if self._errors.closed:
            return
        with suppress(OSError):
            self._send({"do": "close"})
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            self._send(request)
        except OSError as error:
            raise self._ended() from error
        line = self._read_line(timeout_s)
        try:
            reply = json.loads(line)
        except ValueError as error:
            raise self._nonsense(line.decode(errors="replace").strip()) from error
        if isinstance(reply, dict) and isinstance(reply.get("error"), str):
            raise PeerError(f"{self.name} failed: {_one_line(reply['error'])}")
        if not isinstance(reply, dict) or not isinstance(reply.get("ok"), dict):
            raise self._nonsense(reply)
        answer: dict[str, Any] = reply["ok"]
        return answer

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerError(f"{self.name} gave no answer in {timeout_s:g} s")
            piece = os.read(pipe, _PIECE_BYTES)
            if not piece:
                raise self._ended()
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> PeerError:
        try:
            status: int | None = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        how = "stopped answering" if status is None else f"ended (exit {status})"
        return PeerError(f"{self.name} {how}: {_one_line(said[-1])}")

    def _nonsense(self, reply: object) -> PeerError:
        return PeerError(f"{self.name} answered what is not understood: {_one_line(str(reply))!r}")


def _one_line(text: str, most: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."
