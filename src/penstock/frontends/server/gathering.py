"""Several requests that answer one HTTP request, and their events in the order they come."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial

from penstock.engine.events import Event, Failed, Finished, GenerationRequest
from penstock.engine.service import Service
from penstock.errors import ServiceClosedError
from penstock.frontends.server.problems import SHUTTING_DOWN
from penstock.plan.step import RequestId


class Gathering:
    """Made on the event loop. `submit` may be called on any thread, since constraints may take long to compile; all
    requests are taken, or none. Whoever has one must `cancel` it at the end."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._lock = threading.Lock()
        self._ids: list[RequestId] = []
        self._is_cancelled = False

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        try:
            for index, request in enumerate(requests):
                self._add(self._service.submit(request, partial(self._deliver, index)))
        except BaseException:
            self.cancel()
            raise

    @property
    def ids(self) -> tuple[RequestId, ...]:
        """The requests that were submitted, in their order."""
        with self._lock:
            return tuple(self._ids)

    def cancel(self) -> None:
        """End what has not ended. Requests that are being submitted end as soon as they are."""
        with self._lock:
            self._is_cancelled = True
            ids = tuple(self._ids)
        for request_id in ids:
            self._service.cancel(request_id)

    def give_up(self) -> None:
        """On the event loop: after the events that have come, there is only that the server ends."""
        self._events.put_nowait((0, Failed(ServiceClosedError(SHUTTING_DOWN))))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Each event with its request's place among those submitted, until all have ended."""
        num_left = len(self._ids)
        while num_left:
            index, event = await self._events.get()
            if isinstance(event, (Finished, Failed)):
                num_left -= 1
            yield index, event

    def _add(self, request_id: RequestId) -> None:
        with self._lock:
            self._ids.append(request_id)
            is_late = self._is_cancelled
        if is_late:
            self._service.cancel(request_id)

    def _deliver(self, index: int, event: Event) -> None:
        # On the engine's thread, which may outlive the loop by a step.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))
