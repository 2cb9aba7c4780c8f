"""The way in: bodies are read and prepared in bounded time, space and threads."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from fastapi import Request

from penstock.errors import QueueFullError
from penstock.frontends.server.drain import Drain
from penstock.frontends.server.gone import disconnected, unless
from penstock.frontends.server.problems import ApiError, client_gone

# Parsing and tokenizing; the cores are the model's.
NUM_THREADS = 2
BODY_TIMEOUT_S = 60.0
# What is read of a body that is too large, and thrown away: a client that is still sending when the connection
# closes would not see the answer.
_DISCARD_BYTES = 64 << 20
_DISCARD_S = 5.0

_Result = TypeVar("_Result")


class Intake:
    """At most `max_pending` requests are read and prepared at once, in a few threads."""

    def __init__(self, max_pending: int, max_body_bytes: int, drain: Drain) -> None:
        self._max_pending = max_pending
        self._max_body_bytes = max_body_bytes
        self._drain = drain
        self._num_pending = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="penstock-intake")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def take(self, request: Request, work: Callable[[bytes], _Result]) -> _Result:
        """What the work makes of a request's body, on a thread. A client that goes meanwhile is waited for no more:
        work that has not begun is never done. Nothing of the body is kept."""
        with self._place():
            body = [await unless(self._read(request), self._drain.over())]
            self._drain.check_open()
            try:
                return await unless(
                    self._run(lambda: work(body.pop())), disconnected(request.receive), self._drain.over()
                )
            finally:
                body.clear()  # work that was given up stays in the queue until a thread is free

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._num_pending >= self._max_pending:
            raise QueueFullError(
                f"{self._num_pending} requests are being read, as many as may be: try again later"
            )
        self._num_pending += 1
        try:
            yield
        finally:
            self._num_pending -= 1

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _read(self, request: Request) -> bytes:
        """The body, however it is sent."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                parts = await self._parts(request)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {BODY_TIMEOUT_S:.0f} s",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        if parts is None:
            raise ApiError(
                413,
                f"the body is too large: this server takes up to {self._max_body_bytes} bytes (--max-body-bytes)",
                code="body_too_large",
                headers={"Connection": "close"},
            )
        return b"".join(parts)

    async def _parts(self, request: Request) -> list[bytes] | None:
        """None where they are too much. The rest is then read and thrown away, as far as that is reasonable."""
        parts: list[bytes] | None = []
        num_bytes = 0
        gives_up_at = math.inf
        has_more = True
        while (
            has_more and num_bytes < self._max_body_bytes + _DISCARD_BYTES and time.monotonic() < gives_up_at
        ):
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise client_gone()
            part = message.get("body", b"")
            num_bytes += len(part)
            has_more = message.get("more_body", False)
            if parts is not None and num_bytes <= self._max_body_bytes:
                parts.append(part)
            elif parts is not None:
                parts = None
                gives_up_at = time.monotonic() + _DISCARD_S
        return parts
