"""The events of one request, for a coroutine."""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self

from penstock.engine.events import Event, Failed, Finished, GenerationRequest

if TYPE_CHECKING:
    from penstock.engine.service import Service


class EventStream:
    """An asynchronous iterator over events, the last of them Finished or Failed. Leaving it early cancels."""

    def __init__(self, service: "Service", request: GenerationRequest) -> None:
        self._service = service
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self.request_id = service.submit(request, self._deliver)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._has_ended:
            raise StopAsyncIteration
        event = await self._events.get()
        self._has_ended = isinstance(event, Finished | Failed)
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End the request between steps. Its last event still comes."""
        if not self._has_ended:
            self._service.cancel(self.request_id)

    def _deliver(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)
