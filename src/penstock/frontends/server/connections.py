"""Connections: how many there may be, how long a client may take to ask, and to take its answer."""

import asyncio
import json
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.errors import SettingError
from penstock.frontends.server.errors import ApiError
from penstock.frontends.server.settings import is_loopback

MAX_CONNECTIONS = 1024
# From the beginning of a connection, or from the answer before, to the end of a request's headers.
BEGIN_S = 10.0
# Where all places are taken, a client that has sent nothing for so long while it was waited for gives way.
_GIVES_WAY_S = 0.5
# How long a connection that is refused is read on: one that is closed on unread data loses the answer.
_REFUSAL_S = 2.0
_MAX_BACKLOG = 128
# Descriptors that are not for connections: the cache's files, a model's, those of libraries.
_OWN_FILES = 32
_TICK_S = 1.0
_LOG_EVERY_S = 60.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
# A client that takes less than that takes nothing: what is told of it was true at slightly different times.
_MOVED_BYTES = 1024
# Where Linux has the bytes that the peer acknowledged, in `struct tcp_info`.
_TCP_ACKED = struct.Struct("=120xQ")
_INT = struct.Struct("i")
_log = logging.getLogger("penstock.server")


@dataclass(frozen=True, slots=True)
class Room:
    """Connections that the process has descriptors for: those that are served, those that are refused at once, and
    those that the system holds until they are accepted."""

    max_served: int
    max_refused: int
    backlog: int

    @classmethod
    def of_process(cls, asked: int | None = None) -> "Room":
        num_spare = _num_descriptors() - _num_open() - _OWN_FILES
        backlog = min(max(num_spare // 4, 1), _MAX_BACKLOG)
        possible = num_spare - 2 * backlog
        if possible < (asked or 1):
            raise SettingError(
                "max_connections",
                ... if asked is None else asked,
                f"up to {possible}" if possible > 0 else "with a higher limit of open files (ulimit -n)",
                because=f"of {_num_descriptors()} files that may be open, {num_spare} are left for connections",
            )
        return cls(asked or min(possible, MAX_CONNECTIONS), backlog, backlog)


def _num_descriptors() -> int:
    try:
        import resource
    except ImportError:  # Windows, where sockets are no files
        return 1 << 16
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def _num_open() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 64


class Connections:
    """All that are open, for the event loop's thread. A client that takes nothing of its answer for `stalled_s` is
    hung up on."""

    def __init__(self, room: Room, stalled_s: float, on_refusal: Callable[[int], None]) -> None:
        self.room = room
        self.stalled_s = stalled_s
        self.on_refusal = on_refusal
        self._served: set[Connection] = set()
        self._refused: dict[Connection, None] = {}  # in order
        self._timer: asyncio.TimerHandle | None = None
        self._logged_at = -_LOG_EVERY_S

    def open(self) -> None:
        """Begin to look at them, time and again."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        self._look(loop)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def admit(self, connection: "Connection") -> bool:
        """Whether there is a place: a free one, or that of the client that is waited for longest."""
        if len(self._served) >= self.room.max_served:
            able = [other for other in self._served if other.can_give_way]
            slowest = min(able, key=lambda other: other.heard_at, default=None)
            if slowest is None or time.monotonic() - slowest.heard_at < _GIVES_WAY_S:
                self._refused[connection] = None
                if len(self._refused) > self.room.max_refused:
                    first = next(iter(self._refused))
                    first.reset()
                    del self._refused[first]
                return False
            slowest.dismiss("others need its place")
            self._served.discard(slowest)
        self._served.add(connection)
        return True

    def forget(self, connection: "Connection") -> None:
        self._served.discard(connection)
        self._refused.pop(connection, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(min(_TICK_S, self.stalled_s / 4), self._look, loop)
        now = time.monotonic()
        taken = {connection: connection.acknowledged() for connection in self._served}
        # After them: what comes in between then counts as not read, and not as read.
        asks_system = any(connection.addresses and not connection.is_between for connection in self._served)
        unread = _unread_here() if asks_system else {}
        for connection, (num_acked, num_left) in taken.items():
            num_unread = unread.get(connection.addresses, 0)
            connection.look(now, num_acked - num_unread, num_left + num_unread)
        for connection in tuple(self._refused):
            connection.look(now, 0, 0)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Connections that could not be accepted are told of in a line, now and then."""
        if "socket.accept()" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            _log.error("connections cannot be accepted: %s", context.get("exception"))


def _unread_here() -> dict[tuple[str, str] | None, int]:
    """The bytes that programs of this machine have not read, by their own address and the other's. Only Linux tells:
    a client's system may take megabytes for it, and acknowledge them."""
    found: dict[tuple[str, str] | None, int] = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/self/net/{name}") as lines:
            next(lines)
            for line in lines:
                _, own, other, _, queues, _ = line.split(maxsplit=5)
                if num_unread := int(queues.partition(":")[2], 16):
                    found[own, other] = num_unread
    return found


def _written(address: tuple[str, int]) -> str:
    """An address as Linux writes it there: words in the machine's order."""
    host, port = address[0].removeprefix("::ffff:"), address[1]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    packed = socket.inet_pton(family, host.partition("%")[0])
    words = (int.from_bytes(packed[start : start + 4], sys.byteorder) for start in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


class Connection(H11Protocol):
    """Hangs up on a client that does not send its request, or does not take its answer; the request then sees a
    disconnect."""

    def __init__(self, config: uvicorn.Config, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._all: Connections = config.app.state.connections  # type: ignore[union-attr]
        self._is_served = True  # not refused at once
        self._is_over = False  # what comes is read and thrown away, until the client has seen why
        self.heard_at = self._begun_at = time.monotonic()
        self._num_pauses = 0  # of writing, and their ends
        # Of a client on this machine, and its server's, as the system writes them.
        self.addresses: tuple[str, str] | None = None
        # How much the client had taken of its answers when that last moved, and when.
        self._num_taken, self._taken_at = 0, self.heard_at

    @property
    def can_give_way(self) -> bool:
        """Whether it waits for its client: for a request, or the rest of one, after all answers were taken."""
        waits = self.is_between or self.cycle.more_body
        return waits and not self.transport.is_closing() and not self.transport.get_write_buffer_size()

    @property
    def is_between(self) -> bool:
        """Whether it has no request in progress, as far as its headers tell."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._is_served = self._all.admit(self)
        if not self._is_served:
            self.transport = transport
            self._refuse(
                ApiError(
                    503,
                    f"{self._all.room.max_served} clients are connected, as many as may be: try again later",
                    code="too_many_connections",
                    headers={"Retry-After": "1"},
                )
            )
            return
        super().connection_made(transport)
        if self.client and self.server and self.server[1] is not None:
            own, other = self.server[0], self.client[0]
            if own == other or (is_loopback(own) and is_loopback(other)):
                self.addresses = _written(self.client), _written((own, self.server[1]))
        # Writing pauses as soon as the system takes no more, so that a pause is always a client that does not read.
        transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        if self._is_served and not self._is_over:
            super().data_received(data)

    def eof_received(self) -> None:
        if self._is_served:
            super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.forget(self)
        if self._is_served:
            super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.heard_at = self._begun_at = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._num_pauses += 1
        super().pause_writing()

    def resume_writing(self) -> None:
        self._num_pauses += 1
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        message = "the request is not HTTP/1.1, or its headers are more than 64 KiB"
        self._refuse(ApiError(400, message, code="invalid_http"))

    def look(self, now: float, num_taken: int, num_left: int) -> None:
        """Hang up where the client has had its time. It took so many bytes, and so many are there for it."""
        if self._is_over:
            if now - self._begun_at > _REFUSAL_S:
                self.reset()
        elif self._is_stalled(now, num_taken, num_left):
            self.reset()
        elif self.is_between and self.can_give_way and now - self._begun_at > BEGIN_S:
            self.dismiss(f"it has {BEGIN_S:g} s")

    def dismiss(self, reason: str) -> None:
        """Close it; a client that has sent a part of a request is told why."""
        if not self.is_between or self.conn.trailing_data[0]:
            self._write_error(
                ApiError(408, f"the rest of the request did not come: {reason}", code="request_timeout")
            )
        self.transport.close()

    def reset(self) -> None:
        """Close at once; the system drops what it still has to send, too."""
        raw = self.transport.get_extra_info("socket")
        with suppress(OSError):  # it may be gone
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()

    def _is_stalled(self, now: float, num_taken: int, num_left: int) -> bool:
        """Whether the client has taken hardly anything for too long of what there is for it."""
        if not num_left or num_taken - self._num_taken >= _MOVED_BYTES:
            self._num_taken, self._taken_at = num_taken, now
        return now - self._taken_at >= self._all.stalled_s

    def acknowledged(self) -> tuple[int, int]:
        """A number that grows as the peer acknowledges, and the bytes that it has not acknowledged. Where the system
        does not tell, what it takes from this process counts."""
        num_unsent = self.transport.get_write_buffer_size()
        try:
            import fcntl
            import termios

            raw = self.transport.get_extra_info("socket")
            info = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_ACKED.size)
            (num_acked,) = _TCP_ACKED.unpack(info)
            (num_queued,) = _INT.unpack(fcntl.ioctl(raw, termios.TIOCOUTQ, bytes(_INT.size)))
            return num_acked, num_unsent + num_queued
        except (ImportError, AttributeError, OSError, struct.error):
            return (self._num_pauses << 40) - num_unsent, num_unsent

    def _refuse(self, error: ApiError) -> None:
        """Answer, and let the client read it before the connection is closed."""
        self._is_over = True
        self._begun_at = time.monotonic()
        self._write_error(error)
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # the application still writes what it was asked before
            return
        with suppress(OSError):  # it may be gone
            self.transport.write_eof()

    def _write_error(self, error: ApiError) -> None:
        """An answer without the application's help."""
        self._all.on_refusal(error.status)
        body = json.dumps(error.content).encode()
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **(error.headers or {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(f"HTTP/1.1 {error.status} \r\n{head}\r\n".encode() + body)
