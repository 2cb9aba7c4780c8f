"""What every request passes before its endpoint, and every answer after it: its id, the key, the origin, errors."""

import hmac
import re
import uuid
from hashlib import sha256
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.frontends.server.errors import (
    CLIENT_GONE,
    ApiError,
    as_api_error,
    as_http_error,
    internal,
    request_id,
)
from penstock.frontends.server.metrics import Telemetry
from penstock.frontends.server.responses import error_response
from penstock.frontends.server.settings import ServerSettings, is_loopback

_ID_HEADER = "x-request-id"
_KEY_HEADER = "x-api-key"
_IGNORED_HEADER = "x-penstock-ignored"
_SANE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# They tell nothing of anybody's requests: the live page's own files, and whether the server is up.
_OPEN_PATHS = ("/", "/health")
_OPEN_FOLDER = "/page/"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def install(app: FastAPI, settings: ServerSettings, telemetry: Telemetry) -> None:
    """Put all of it around the endpoints of an application."""
    app.add_middleware(AccessControl, settings=settings)
    if settings.allow_origins:  # around it: a browser asks before it sends a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", _KEY_HEADER],
            expose_headers=[_ID_HEADER, _IGNORED_HEADER],
        )
    app.add_middleware(RequestIds, telemetry=telemetry)  # around all

    for kind in (ApiError, PenstockError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)


async def _answer_error(request: Request, error: Exception) -> Response:
    path = request.url.path
    match error:
        case ApiError():
            return error_response(error, path)
        case PenstockError():
            return error_response(as_api_error(error), path)
        case HTTPException():
            return error_response(as_http_error(request.method, path, error), path)
        case RequestValidationError():  # of the query
            first = error.errors()[0]
            param = str(first["loc"][-1])
            message = f"{param} is not accepted: {first['msg']}"
            return error_response(ApiError(400, message, code="invalid_value", param=param), path)
    raise error


class RequestIds:
    """Gives each answer an `x-request-id`, the client's own where it sent one; counts answers that are errors; and
    answers errors that nobody expected."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # What is answered to GET is to HEAD, without its content, which uvicorn leaves away.
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        given = Headers(scope=scope).get(_ID_HEADER, "")
        request_id.set(given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex)
        has_started = False

        async def send_on(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                headers[_ID_HEADER] = request_id.get()
                ignored = asked.get("state", {}).get("ignored")
                if ignored is not None and ignored.names:
                    headers[_IGNORED_HEADER] = ignored.header
                # /health of a server that drains is no refusal, nor is an answer to a client that has gone.
                status = message["status"]
                if status >= 400 and status != CLIENT_GONE and scope["path"] != "/health":
                    self._telemetry.on_refusal(status)
            await send(message)

        try:
            await self._app(asked, receive, send_on)
        except Exception as error:
            if has_started:  # uvicorn logs it and hangs up
                raise
            await error_response(internal(error), scope["path"])(scope, receive, send_on)


class AccessControl:
    """Asks for a key before anything of a request is read, and passes on whose it is, as `tenant` in the request's
    state.

    Without keys, keeps web pages of other hosts out, which a visitor's browser would carry to a server on the
    visitor's own machine: by the Host header (a name that was made to point here) and, for requests that change
    something, by the Origin header."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._is_local = settings.is_local
        self._allowed = frozenset(settings.allow_origins)
        self._tenants = tuple(map(tenant_of, settings.api_keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                headers = Headers(scope=scope)
                tenant = None
                if self._tenants:
                    tenant = self._tenant(scope["path"], headers)
                else:
                    self._check_origin(scope["method"], headers)
                scope.setdefault("state", {})["tenant"] = tenant
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _tenant(self, path: str, headers: Headers) -> str | None:
        """The tenant whose key it is; None on a path that needs no key."""
        if path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        keys = [key.strip() if scheme.lower() == "bearer" else "", headers.get(_KEY_HEADER, "").strip()]
        is_given = any(keys)
        # Takes as long whichever it is, and if it is none.
        given = [tenant_of(key) for key in keys]
        found = [tenant for tenant in self._tenants for each in given if hmac.compare_digest(each, tenant)]
        if not found:
            raise ApiError(
                401,
                "the API key is wrong: give one that the server was started with"
                if is_given
                else "an API key is needed: send it as 'Authorization: Bearer KEY', or as 'X-Api-Key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found[-1]

    def _check_origin(self, method: str, headers: Headers) -> None:
        host = _host_name(f"//{headers.get('host', '')}")
        if self._is_local and not is_loopback(host):
            raise ApiError(
                400,
                f"the Host {host!r} is not accepted: a server without a key that listens on this machine only "
                "answers to localhost, 127.0.0.1 and [::1]; start it with a key to use other names",
                code="invalid_host",
            )
        origin = headers.get("origin")
        if origin is None or origin in self._allowed or method in _SAFE_METHODS:
            return
        name = _host_name(origin)
        if not name or (name != host and not (is_loopback(name) and is_loopback(host))):
            raise ApiError(
                403,
                f"a page of {origin[:100]!r} may not use this server: open it from its own host, name the "
                "page's with --allow-origin, or start it with a key",
                code="cross_origin",
            )


def tenant_of(key: str) -> str:
    """The name of all who have this API key: a hash of it, always as long, which does not tell the key."""
    return sha256(b"penstock tenant 1\0" + key.encode(errors="replace")).hexdigest()


def _host_name(url: str) -> str:
    """The host of `//name:port` or `http://[::1]:port`; empty where there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
