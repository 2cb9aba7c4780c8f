"""The server's life: its socket, its signals, and its end. First nobody new comes in, then answers
that have not ended do so with an error."""

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Never, TypeVar
from weakref import WeakSet

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive

from penstock.engine.service import Service
from penstock.engine.streams import EventStream
from penstock.errors import ServiceClosedError, SettingError
from penstock.frontends.exits import INTERRUPTED, complain, on_signals
from penstock.frontends.server.connections import Connection
from penstock.frontends.server.errors import SHUTTING_DOWN, ApiError, cancelled, client_gone

# After the grace, answers that were cut short still have their last events to send, and the engine its step to end.
_LAST_WORDS_S = 5
_LAST_STEP_S = 5.0
_POLL_S = 0.02

_Result = TypeVar("_Result")


async def run_unless(work: Coroutine[Any, Any, _Result], *ends: Coroutine[Any, Any, Never]) -> _Result:
    """The result of `work`. If one of `ends` raises first, the work is cancelled, and that is raised."""
    task = asyncio.create_task(work)
    watches = [asyncio.create_task(end) for end in ends]
    try:
        await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            for watch in watches:
                if watch.done():
                    watch.result()
        return task.result()
    finally:
        for each in (task, *watches):
            each.cancel()
        await asyncio.gather(task, *watches, return_exceptions=True)


async def disconnected(receive: Receive) -> Never:
    """Raises once the client has disconnected. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise client_gone()


class Drain:
    """The server's end, for the event loop's thread."""

    def __init__(self) -> None:
        self.has_begun = False
        self._is_over = asyncio.Event()
        self._streams: WeakSet[EventStream] = WeakSet()

    def begin(self) -> None:
        self.has_begun = True

    def check_open(self) -> None:
        """Refuse a new request once the end has begun."""
        if self.has_begun:
            raise ApiError(
                503,
                "the server is shutting down and takes no more requests: send it again elsewhere, or later",
                code="service_unavailable",
            )

    def add(self, stream: EventStream) -> None:
        """End these events with an error when it is over."""
        self._streams.add(stream)

    def finish(self) -> None:
        """Answers that have not ended do so now, with an error, whatever the engine is doing."""
        self._is_over.set()
        for stream in tuple(self._streams):
            stream.fail(ServiceClosedError(SHUTTING_DOWN))

    async def over(self) -> Never:
        """Raises when it is over."""
        await self._is_over.wait()
        raise cancelled()


def bind(host: str, port: int) -> socket.socket:
    """A socket of this address that does not listen yet: what is wrong with it is known before anything slow."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingError("host", host, "an address of this machine", because=str(reason)) from None
    try:
        if os.name == "posix":  # elsewhere it would let two servers have one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise SettingError(
            "port", port, "another, or 0 for any", where=f"on {host}", because=error.strerror or str(error)
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="on",
        http=Connection,
        ws="none",
        log_config=None,
        log_level="error",  # what clients do wrong is no news
        access_log=False,
        server_header=False,
        backlog=app.state.connections.room.backlog,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )


def serve(
    app: FastAPI, service: Service, listener: socket.socket, *, grace_s: float, on_started: Callable[[], None]
) -> None:
    """Serve until SIGTERM or SIGINT. Then no request is taken, what runs has `grace_s` to finish, and the rest is
    told that it is over. A SIGINT after the first signal ends the process at once; and so does a step of the engine
    that goes on when all has been said."""
    # Tracebacks, and what libraries complain of, whatever some library has set up.
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s", force=True)
    # What was loaded stays: to look for garbage in it takes a tenth of a second each time, for nothing.
    gc.collect()
    gc.freeze()
    server = _Server(make_config(app), on_started)
    if not asyncio.run(_serve(server, app.state.drain, service, listener, grace_s)):
        complain("the model was in the middle of a step, which was given up")
        sys.stderr.flush()
        os._exit(0)


async def _serve(
    server: "_Server", drain: Drain, service: Service, listener: socket.socket, grace_s: float
) -> bool:
    """Whether the engine has ended too."""
    # A thread, so that a second signal is still heard; a step of the engine may be long.
    closing = threading.Thread(target=service.close, args=(grace_s,), name="penstock-closing", daemon=True)
    has_stopped = asyncio.Event()

    async def end() -> None:
        await has_stopped.wait()
        ends_at = time.monotonic() + grace_s
        drain.begin()
        closing.start()
        # Until then the socket is open, so that /health can tell, and those who come late are told.
        await _ended(closing, grace_s)
        # After the engine's last events, which are on their way.
        asyncio.get_running_loop().call_soon(drain.finish)
        last_words_s = max(ends_at - time.monotonic(), 0) + _LAST_WORDS_S
        asyncio.get_running_loop().call_later(last_words_s, server.hang_up)
        server.config.timeout_graceful_shutdown = math.ceil(last_words_s) + 1
        server.should_exit = True

    ending = asyncio.create_task(end())
    with _on_signal(has_stopped.set):
        await server.serve(sockets=[listener])
        ending.cancel()
        if not has_stopped.is_set():
            closing.start()
        return await _ended(closing, _LAST_STEP_S)


async def _ended(thread: threading.Thread, seconds: float) -> bool:
    """Whether a thread ends within so many seconds."""
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    return not thread.is_alive()


class _Server(uvicorn.Server):
    """Tells when it listens, and leaves signals to others."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()

    def hang_up(self) -> None:
        """On everybody who does not take what there is for them."""
        for connection in tuple(self.server_state.connections):
            if (transport := connection.transport) is not None:
                transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """The first signal calls `stop`, on the event loop."""
    loop = asyncio.get_running_loop()
    is_stopping = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        if not is_stopping:
            is_stopping = True
            loop.call_soon_threadsafe(stop)
        elif number == signal.SIGINT:
            complain("interrupted")
            os._exit(INTERRUPTED)

    with on_signals([signal.SIGINT, signal.SIGTERM], handle):
        yield
