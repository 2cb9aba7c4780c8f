"""Who may come in: looked at before anything of a request is read."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.frontends.server.problems import ApiError
from penstock.frontends.server.settings import ServerSettings, is_loopback
from penstock.frontends.server.tenants import find_tenant, tenant_of

# They tell nothing of anybody's requests: the live page's own files, and whether the server is up.
_OPEN_PATHS = ("/", "/health")
_OPEN_FOLDER = "/page/"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Gate:
    """Asks for a key, and hands on whose it is, as `tenant` in the request's state. Where there is none, keeps web
    pages of other hosts out, which a visitor's browser would carry to a server on the visitor's own machine: by the
    Host header (a name that was made to point here) and, for requests that change something, by the Origin header."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._tenants = tuple(map(tenant_of, settings.api_keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                tenant = self._check(scope["path"], scope["method"], Headers(scope=scope))
                scope.setdefault("state", {})["tenant"] = tenant
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, path: str, method: str, headers: Headers) -> str | None:
        """The tenant; None where no key is needed."""
        if self._tenants:
            is_open = path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)
            return None if is_open else _tenant(headers, self._tenants)
        host = _host_name(headers.get("host", ""))
        if self._settings.is_local and not is_loopback(host):
            raise ApiError(
                400,
                f"the Host {host!r} is not accepted: a server without a key that listens on this machine only "
                "answers to localhost, 127.0.0.1 and [::1]; start it with a key to use other names",
                code="invalid_host",
            )
        origin = headers.get("origin")
        if origin is not None and method not in _SAFE_METHODS and not _is_same_host(origin, host):
            raise ApiError(
                403,
                f"a page of {origin[:100]!r} may not use this server: open it from its own host, or start it "
                "with a key",
                code="cross_origin",
            )
        return None


def _tenant(headers: Headers, tenants: Sequence[str]) -> str:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    is_given = scheme.lower() == "bearer" and bool(given.strip())
    tenant = find_tenant(given.strip(), tenants) if is_given else None
    if tenant is None:
        raise ApiError(
            401,
            "the API key is wrong: give one that the server was started with"
            if is_given
            else "an API key is needed: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return tenant


def _host_name(address: str) -> str:
    """The name in `name`, `name:port` or `[::1]:port`; empty where it is none of them."""
    try:
        return urlsplit(f"//{address}").hostname or ""
    except ValueError:
        return ""


def _is_same_host(origin: str, host: str) -> bool:
    try:
        name = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return name != "" and (name == host or (is_loopback(name) and is_loopback(host)))
