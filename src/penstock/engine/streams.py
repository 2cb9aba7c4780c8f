"""The events of requests that belong together, for a coroutine."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

from penstock.engine.events import Event, Failed, Finished, GenerationRequest
from penstock.engine.service import Service
from penstock.errors import PenstockError
from penstock.plan.step import RequestId


class _Mailbox:
    """What other threads have for the queues of one event loop, which is woken once for all that came meanwhile."""

    def __init__(self) -> None:
        self._items: deque[tuple[asyncio.Queue[tuple[int, Event]], tuple[int, Event]]] = deque()
        self._is_waking = False

    def put(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: asyncio.Queue[tuple[int, Event]],
        item: tuple[int, Event],
    ) -> None:
        self._items.append((queue, item))
        if not self._is_waking:
            self._is_waking = True
            try:
                loop.call_soon_threadsafe(self._empty)
            except RuntimeError:  # the loop is closed: nobody waits
                self._items.clear()
                self._is_waking = False
                raise

    def _empty(self) -> None:
        self._is_waking = False  # what comes from now on may come too late for this time
        while self._items:
            queue, item = self._items.popleft()
            queue.put_nowait(item)


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = WeakKeyDictionary()


class EventStream:
    """An asynchronous iterator over `(index, event)`, the index that of the event's request, until all have ended.

    Made on the event loop. `submit` may be called on any thread, since constraints may take long to compile. Leaving
    `async with`, or `cancel`, ends what has not ended."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._mailbox = _mailboxes.setdefault(self._loop, _Mailbox())
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._lock = threading.Lock()
        self._ids: list[RequestId] = []
        self._is_cancelled = False

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Once, all or none of them: if one is refused, none is begun, or those that were are cancelled."""
        for request in requests:
            self._service.check(request)
        try:
            for index, request in enumerate(requests):
                self._add(self._service.submit(request, partial(self._deliver, index)))
        except BaseException:
            self.cancel()
            raise

    @property
    def ids(self) -> tuple[RequestId, ...]:
        """The ids of the requests, in the order submitted."""
        with self._lock:
            return tuple(self._ids)

    def cancel(self) -> None:
        """End between steps what has not ended. Requests that are being submitted end as soon as they are."""
        with self._lock:
            self._is_cancelled = True
            ids = tuple(self._ids)
        for request_id in ids:
            self._service.cancel(request_id)

    def fail(self, error: PenstockError) -> None:
        """On the event loop: after the events that have come, the next one is this error."""
        self._events.put_nowait((0, Failed(error)))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        num_left = len(self._ids)
        while num_left:
            index, event = await self._events.get()
            if isinstance(event, Finished | Failed):
                num_left -= 1
            yield index, event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _add(self, request_id: RequestId) -> None:
        with self._lock:
            self._ids.append(request_id)
            is_late = self._is_cancelled
        if is_late:
            self._service.cancel(request_id)

    def _deliver(self, index: int, event: Event) -> None:
        # On the engine's thread, which may outlive the loop by a step.
        with contextlib.suppress(RuntimeError):
            self._mailbox.put(self._loop, self._events, (index, event))
