"""The server as a process: its socket, its signals, its end."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from penstock.engine.service import Service
from penstock.errors import SettingError
from penstock.frontends.exits import INTERRUPTED, complain

# After the grace, cancelled requests still have their last words to send.
_LAST_WORDS_S = 5
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket of this address that does not listen yet: what is wrong with it is known before anything slow."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingError(
            f"host={host!r} is not accepted: {reason}; give an address of this machine"
        ) from None
    try:
        if os.name == "posix":  # elsewhere it would let two servers have one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise SettingError(
            f"port={port} on {host} is not accepted: {error.strerror or error}; give another, or 0 for any"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: FastAPI,
    service: Service,
    listener: socket.socket,
    *,
    grace_s: float,
    on_started: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT. Then nothing more is accepted, what runs has `grace_s` to finish, and the
    rest is cancelled. A SIGINT after the first signal ends the process at once."""
    config = uvicorn.Config(
        app,
        lifespan="on",
        http="h11",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=int(grace_s) + 1 + _LAST_WORDS_S,
    )
    server = _Server(config, on_started)

    def stop() -> None:
        app.state.is_draining = True
        service.drain(grace_s)
        server.should_exit = True

    async def run() -> None:
        with _on_signal(stop):
            await server.serve(sockets=[listener])
            # On a thread, so that a second signal is still heard.
            await asyncio.to_thread(service.close)

    asyncio.run(run())


class _Server(uvicorn.Server):
    """Tells when it listens, and leaves signals to others."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """The first signal calls `stop`, on the event loop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
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

    # What is ignored stays so: a background job is not to be interrupted.
    numbers = [
        number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
