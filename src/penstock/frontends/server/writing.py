"""Answers that take long to write are written beside the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.responses import Response

from penstock.frontends.server.json_answer import to_json_in_parts


class Writer:
    """One thread, which no body that is being read keeps busy."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-writer")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def write(self, make: Callable[[], Any]) -> Response:
        """The answer of what `make` gives, which is called on the thread too."""

        def work() -> bytes:
            return to_json_in_parts(make())

        data = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return Response(data, media_type="application/json")
