"""What the server is told at its start, besides the model and its schedule."""

import ipaddress
import re
from dataclasses import dataclass, field

from penstock.errors import SettingError
from penstock.plan.checks import check_int

DEFAULT_HOST = "127.0.0.1"
DEFAULT_MAX_BODY_BYTES = 8 << 20
# What an HTTP header carries unharmed.
_KEY = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class ServerSettings:
    """`model_name` is what requests call the model. Without `api_key` nobody needs one; without
    `max_prompt_tokens` a prompt may have what the context or the cache holds."""

    model_name: str
    host: str = DEFAULT_HOST
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.model_name.strip():
            raise SettingError(f"served_name={self.model_name!r} is not accepted: give the model a name")
        if not self.host.strip():
            raise SettingError(
                f"host={self.host!r} is not accepted: give an address or a name, such as {DEFAULT_HOST}"
            )
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            raise SettingError(  # without the value: it may be most of a secret
                "the API key is not accepted: give letters, digits and signs of ASCII without spaces, "
                "or leave --api-key and PENSTOCK_API_KEY away for a server without a key"
            )
        check_int("max_body_bytes", self.max_body_bytes, 1024)
        if self.max_prompt_tokens is not None:
            check_int("max_prompt_tokens", self.max_prompt_tokens, 1)

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own. Names other than localhost are not looked up."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
