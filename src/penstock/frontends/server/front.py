"""What every request goes through first, and every answer last: its name, the count of refusals, the last resort."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.frontends.server.problems import CLIENT_GONE, internal, request_id
from penstock.frontends.server.telemetry import Telemetry

_ID_HEADER = "x-request-id"
_SANE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Front:
    """Gives each answer an `x-request-id`, the client's own where it sent one; counts answers that are errors; and
    answers where nobody else did."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_ID_HEADER, "")
        request_id.set(given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex)
        has_started = False

        async def send_on(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)[_ID_HEADER] = request_id.get()
                self._count(scope["path"], message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as error:
            if has_started:  # whoever called tells of it, and hangs up
                raise
            await internal(error).response()(scope, receive, send_on)

    def _count(self, path: str, status: int) -> None:
        # That a server ends is no refusal, where it is what was asked for; and one who has gone was not refused.
        if status >= 400 and status != CLIENT_GONE and path != "/health":
            self._telemetry.on_refusal(status)
