"""Clients that hang up: work for them ends at once."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from penstock.frontends.server.problems import client_gone

_Result = TypeVar("_Result")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The work's result. As soon as the client has gone, the work is cancelled instead. The request's body must have
    been read: what `receive` gives then is that the client hung up."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise client_gone()
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
