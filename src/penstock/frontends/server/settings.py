"""What the server is told at its start, besides the model and its schedule."""

import ipaddress
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import SettingError
from penstock.plan.checks import check_int

DEFAULT_HOST = "127.0.0.1"
DEFAULT_MAX_BODY_BYTES = 8 << 20
DEFAULT_STALLED_S = 10.0
KEYS_VARIABLE = "PENSTOCK_API_KEY"
# What an HTTP header carries unharmed, but for the comma, which parts one key from the next.
_KEY = re.compile(r"[!-+\--~]+")
# A scheme, a host in small letters, and a port that is not the scheme's own; no path.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


@dataclass(frozen=True)
class ServerSettings:
    """`model_name` is what requests call the model. Without `api_keys` nobody needs one; with `isolates`, requests
    share what was read only with those of the same key. Without `max_prompt_tokens` a prompt may have what the
    context or the cache holds. Without `max_connections` there may be as many as the process has descriptors for, up
    to a thousand. A client that takes nothing of its answer for `stalled_s` is hung up on.
    Pages of `allow_origins` may use the server. With `strict_parameters`, what is not known in a body is an error and
    not ignored, and an answer that asks for more tokens than there is room for is refused and not cut. With
    `strict_model`, `model` must be `model_name`."""

    model_name: str
    host: str = DEFAULT_HOST
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    isolates: bool = False
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_prompt_tokens: int | None = None
    max_connections: int | None = None
    stalled_s: float = DEFAULT_STALLED_S
    allow_origins: tuple[str, ...] = ()
    strict_parameters: bool = False
    strict_model: bool = False

    def __post_init__(self) -> None:
        if not self.model_name.strip():
            raise SettingError("served_name", self.model_name, "the model a name")
        if not self.host.strip():
            raise SettingError("host", self.host, f"an address or a name, such as {DEFAULT_HOST}")
        if not all(map(_KEY.fullmatch, self.api_keys)):
            raise SettingError(
                "api_key",
                ...,  # not the value: it may be most of a secret
                "letters, digits and signs of ASCII without spaces and commas, or none at all, not even in "
                f"{KEYS_VARIABLE}, for a server without a key",
            )
        if self.isolates and not self.api_keys:
            raise SettingError(
                "isolate",
                True,
                needs=("api_key", KEYS_VARIABLE),
                because="requests are told apart by their keys",
            )
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin):
                raise SettingError(
                    "allow_origin", origin, "an origin as browsers send it, such as https://chat.example:8443"
                )
        check_int("max_body_bytes", self.max_body_bytes, 1024)
        for name in ("max_prompt_tokens", "max_connections"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if not 0 < self.stalled_s < math.inf:
            raise SettingError("stalled", self.stalled_s, "a number of seconds above 0")

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return is_loopback(self.host)


def resolve_keys(
    argument: Sequence[str] | None, *, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The API keys from the argument, else from `PENSTOCK_API_KEY`, which may hold several with commas in between."""
    environ = os.environ if environ is None else environ
    if argument:
        return tuple(argument)
    return tuple(environ[KEYS_VARIABLE].split(",")) if KEYS_VARIABLE in environ else ()


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own. Names other than localhost are not looked up."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
