"""Bodies of HTTP requests are read in bounded time and space, then worked on in a few threads."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from typing import TypeVar

from fastapi import Request

from penstock.errors import QueueFullError
from penstock.frontends.server.errors import RETRY_AFTER_S, ApiError, client_gone
from penstock.frontends.server.lifecycle import Drain, disconnected, run_unless

# Parsing and tokenizing short bodies; long ones have a thread of their own, one at a time. The cores are the model's.
NUM_THREADS = 2
SHORT_BYTES = 64 << 10
# Who has waited for a second goes before one that is so many bytes shorter.
_BYTES_FOR_A_SECOND = 1 << 20
# A body has a while, and then has to have come at this rate, up to a limit.
BODY_GRACE_S = 10.0
LEAST_RATE = 1024  # bytes a second
BODY_TIMEOUT_S = 60.0
# All bodies that are read or wait take no more than so many of the largest.
_MOST_LARGEST = 32
# What is read of a body that is too large, and thrown away: a client that is still sending when the connection
# closes would not see the answer.
_DISCARD_BYTES = 1 << 30
_DISCARD_S = 30.0

_Result = TypeVar("_Result")


class _Turns:
    """One at a time, the shortest first, but for those that have waited."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._num_come = 0

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        if self._is_taken:
            its_turn = asyncio.get_running_loop().create_future()
            self._num_come += 1
            rank = time.monotonic() + num_bytes / _BYTES_FOR_A_SECOND
            heappush(self._waiting, (rank, self._num_come, its_turn))
            try:
                await its_turn
            except asyncio.CancelledError:
                if its_turn.done() and not its_turn.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, its_turn = heappop(self._waiting)
            if not its_turn.done():
                its_turn.set_result(None)
                return
        self._is_taken = False


class _Incoming:
    """A body that is being read, or waits for a thread."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self.num_bytes = 0
        self.gave_way = False
        self.limit: asyncio.Timeout | None = None

    @property
    def rate(self) -> float:
        return self.num_bytes / max(time.monotonic() - self.began_at, 1e-3)

    def allow(self, until: float) -> None:
        """It may go on until then, by the monotonic clock."""
        if self.limit is not None and not self.limit.expired():
            loop_s = asyncio.get_running_loop().time()
            self.limit.reschedule(loop_s + until - time.monotonic())


class BodyReader:
    """Reads bodies and works on them in a few threads. At most `max_pending` wait for a thread; those that are still
    coming are bounded by their bytes: where all take too many, the slowest gives way."""

    def __init__(self, max_pending: int, max_body_bytes: int, drain: Drain) -> None:
        self._max_pending = max_pending
        self._max_body_bytes = max_body_bytes
        self._drain = drain
        self._num_pending = 0
        self._num_bytes = 0
        self._coming: set[_Incoming] = set()
        self._short = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="penstock-bodies")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="penstock-long-bodies")
        self._long_turns = _Turns()

    def close(self) -> None:
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    async def apply(self, request: Request, work: Callable[[bytes], _Result]) -> _Result:
        """The result of `work` on a request's body, on a thread. Work that has not begun when the client disconnects
        is never done. Nothing of the body is kept."""
        self._check_pending()
        _check_encoding(request)
        incoming = _Incoming()
        body: list[bytes] = []
        self._coming.add(incoming)
        try:
            body.append(await run_unless(self._read(request, incoming), self._drain.over()))
            self._coming.discard(incoming)
            self._drain.check_open()
            self._check_pending()
            self._num_pending += 1
            try:
                running = self._run(len(body[0]), lambda: work(body.pop()))
                return await run_unless(running, disconnected(request.receive), self._drain.over())
            finally:
                self._num_pending -= 1
        finally:
            body.clear()  # cancelled work stays in the queue until a thread is free
            self._coming.discard(incoming)
            self._release(incoming)

    async def _run(self, num_bytes: int, work: Callable[[], _Result]) -> _Result:
        loop = asyncio.get_running_loop()
        if num_bytes <= SHORT_BYTES:
            return await loop.run_in_executor(self._short, work)
        async with self._long_turns.turn(num_bytes):
            return await loop.run_in_executor(self._long, work)

    def _check_pending(self) -> None:
        if self._num_pending >= self._max_pending:
            raise QueueFullError(
                f"{self._num_pending} requests are being read, as many as may be: try again later"
            )

    def _take(self, incoming: _Incoming, num_bytes: int) -> None:
        incoming.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._coming and self._num_bytes > _MOST_LARGEST * self._max_body_bytes:
            slowest = min(self._coming, key=lambda other: other.rate)
            self._coming.discard(slowest)
            self._release(slowest)
            slowest.gave_way = True
            slowest.allow(until=0.0)

    def _release(self, incoming: _Incoming) -> None:
        self._num_bytes -= incoming.num_bytes
        incoming.num_bytes = 0

    async def _read(self, request: Request, incoming: _Incoming) -> bytes:
        """The body, whether its length is known or it comes in pieces."""
        closes = {"Connection": "close"}
        is_too_large, parts = self._is_too_large(request), None
        try:
            # A client that asks before it sends is told at once.
            if not (is_too_large and "expect" in request.headers):
                async with asyncio.timeout(None) as incoming.limit:
                    parts = await self._parts(request, incoming)
        except TimeoutError:
            if incoming.gave_way:
                raise ApiError(
                    429,
                    "the bodies of all requests take more than they may, and this one came slowest: try again later",
                    code="queue_full",
                    headers={**closes, "Retry-After": str(RETRY_AFTER_S)},
                ) from None
            if incoming.num_bytes <= self._max_body_bytes:
                raise ApiError(
                    408,
                    f"the body did not come: it has {BODY_GRACE_S:g} s, and more at {LEAST_RATE} bytes a second, up "
                    f"to {BODY_TIMEOUT_S:g} s",
                    code="request_timeout",
                    headers=closes,
                ) from None
        finally:
            incoming.limit = None  # it holds the task, and that its result
        if parts is None:
            raise ApiError(
                413,
                f"the body is too large: this server takes up to {self._max_body_bytes} bytes (--max-body-bytes)",
                code="body_too_large",
                headers=closes,
            )
        return b"".join(parts)

    def _is_too_large(self, request: Request) -> bool:
        """By what the client says."""
        length = request.headers.get("content-length", "")
        return length.isdigit() and len(length) < 20 and int(length) > self._max_body_bytes

    async def _parts(self, request: Request, incoming: _Incoming) -> list[bytes] | None:
        """None if they are too large. The rest is then read and thrown away, up to a limit."""
        parts: list[bytes] | None = []
        num_bytes, has_more = 0, True
        while has_more and num_bytes < self._max_body_bytes + _DISCARD_BYTES:
            if parts is not None:
                allowed_s = min(BODY_GRACE_S + num_bytes / LEAST_RATE, BODY_TIMEOUT_S)
                incoming.allow(until=incoming.began_at + allowed_s)
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise client_gone()
            part = message.get("body", b"")
            num_bytes += len(part)
            has_more = message.get("more_body", False)
            if parts is not None and num_bytes <= self._max_body_bytes:
                self._take(incoming, len(part))
                parts.append(part)
            elif parts is not None:
                parts = None
                self._coming.discard(incoming)
                self._release(incoming)
                incoming.allow(until=time.monotonic() + _DISCARD_S)
        return parts


def _check_encoding(request: Request) -> None:
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"a body with Content-Encoding {encoding[:40]!r} is not accepted: send it as it is",
            code="unsupported_encoding",
        )
