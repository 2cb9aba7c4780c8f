"""Work that is not to go on when nobody wants it any more."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Never, TypeVar

from starlette.types import Receive

from penstock.frontends.server.problems import client_gone

_Result = TypeVar("_Result")


async def unless(work: Coroutine[Any, Any, _Result], *ends: Coroutine[Any, Any, Never]) -> _Result:
    """The work's result. If one of `ends` comes to its error first, the work is cancelled, and that is raised."""
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
    """Raises once the client has gone. The request's body must have been read: what `receive` gives then is that the
    client hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise client_gone()
