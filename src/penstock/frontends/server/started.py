"""What a server says of itself when it listens."""

from penstock import __version__
from penstock.engine.service import Service
from penstock.frontends.lines import device_line
from penstock.frontends.server.explain_settings import size_lines
from penstock.frontends.server.settings import ServerSettings
from penstock.plan import format_bytes


def started_lines(service: Service, settings: ServerSettings, url: str) -> list[str]:
    schedule = service.schedule
    cache = service.status().cache
    step = "" if schedule.step_tokens is None else f", step of up to {schedule.step_tokens} tokens"
    return [
        f"penstock {__version__} serves {settings.model_name} at {url}/v1",
        f"  {device_line(service.llm)}",
        *(f"  {line}" for line in size_lines(service)),
        f"  policy {schedule.policy}{', strict' if service.config.strict else ''}, "
        f"up to {schedule.max_running} requests at once and {schedule.max_waiting} waiting{step}",
        f"  cache {cache.blocks_total * cache.block_tokens} tokens, {format_bytes(_cache_bytes(service))}; "
        f"prompt and answer up to {service.max_request_tokens} tokens",
        f"  {_reuse_line(service, settings)}",
        *(f"  {line}" for line in _folder_lines(service)),
        f"  live page {url}/",
    ]


def open_warning(settings: ServerSettings) -> str | None:
    if settings.is_local or settings.api_keys:
        return None
    return (
        f"penstock: warning: anyone who reaches {settings.host} can use this server: "
        "set PENSTOCK_API_KEY, or leave --host away"
    )


def _reuse_line(service: Service, settings: ServerSettings) -> str:
    if not service.status().reuse.is_on:
        return "prefixes are not shared: every prompt is read"
    if settings.isolates:
        return "prefixes are isolated: shared only between requests with the same API key"
    return "prefixes are shared between all requests, but for those with a cache_salt of their own"


def _folder_lines(service: Service) -> list[str]:
    store = service.llm.store
    if store is None or not service.config.reuse:
        return []
    if not store.is_usable:
        return [f"folder {store.folder} cannot be used: nothing is kept there"]
    stats = store.stats()
    return [
        f"folder {store.folder}, up to {format_bytes(stats.max_bytes)}, now {format_bytes(stats.bytes_on_disk)}"
    ]


def _cache_bytes(service: Service) -> int:
    cache, spec = service.status().cache, service.llm.model.cache_spec
    states_bytes = cache.slots_total * spec.recurrent.bytes_per_slot if spec.recurrent else 0
    return cache.blocks_total * cache.block_tokens * spec.kv.bytes_per_token + states_bytes
