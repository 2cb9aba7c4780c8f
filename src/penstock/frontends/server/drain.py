"""The server's end: first nobody new comes in, then whoever is still there is told that it is over."""

import asyncio
from typing import Never
from weakref import WeakSet

from penstock.frontends.server.gathering import Gathering
from penstock.frontends.server.problems import ApiError, cancelled


class Drain:
    """For the event loop's thread."""

    def __init__(self) -> None:
        self.has_begun = False
        self._is_over = asyncio.Event()
        self._gatherings: WeakSet[Gathering] = WeakSet()

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

    def add(self, gathering: Gathering) -> None:
        """Let an answer know of the end."""
        self._gatherings.add(gathering)

    def finish(self) -> None:
        """Answers that have not ended do so now, with an error, whatever the engine is doing."""
        self._is_over.set()
        for gathering in tuple(self._gatherings):
            gathering.give_up()

    async def over(self) -> Never:
        """Raises when it is over."""
        await self._is_over.wait()
        raise cancelled()
