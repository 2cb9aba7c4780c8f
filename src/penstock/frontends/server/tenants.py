"""Who shares what was read with whom."""

import hmac
from collections.abc import Sequence
from hashlib import sha256


def tenant_of(key: str) -> str:
    """The name of all who have this API key: a hash of it, always as long, which does not tell the key."""
    return sha256(b"penstock tenant 1\0" + key.encode(errors="replace")).hexdigest()


def find_tenant(key: str, tenants: Sequence[str]) -> str | None:
    """The one of these whose key this is. Takes as long whichever it is, and where it is none."""
    given, found = tenant_of(key), None
    for tenant in tenants:
        if hmac.compare_digest(given, tenant):
            found = tenant
    return found


def salt_of(tenant: str | None, cache_salt: str) -> str:
    """What goes into the names of blocks: requests share only where it is the same. Without a tenant that is the
    request's own salt. With one, two pairs never have the same, since a tenant's name has a fixed length."""
    return cache_salt if tenant is None else f"{tenant}:{cache_salt}"
