"""Why the server does as it does: the lengths of a request's chunks, and the settings that they follow from, as JSON
and in words."""

import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from fastapi import APIRouter, Response

from penstock import __version__
from penstock.engine.batcher import ENDED_EXPLAINED
from penstock.engine.events import ChunkRecord
from penstock.engine.service import Service
from penstock.engine.status import RequestStatus
from penstock.frontends.display import device_line
from penstock.frontends.server.errors import ApiError
from penstock.frontends.server.metrics import Telemetry
from penstock.frontends.server.responses import LIVE_HEADERS, JsonResponse
from penstock.frontends.server.settings import ServerSettings
from penstock.plan import format_bytes
from penstock.plan.sizing import SizeRule
from penstock.plan.step import RequestId

# What set a chunk's length: in fact its step's, of which prompts that share it have parts.
RULES: dict[SizeRule, str] = {
    "fixed": "the fixed size",
    "memory": "the longest that memory allows",
    "latency": "set by a latency target",
    "tuned": "the fastest on this machine, by its profile",
    "default": "the default: nothing asks for less or more",
    "end": "what was left of the prompt",
    "balanced": "shorter, so that the prompt does not end in a sliver",
    "halved": "half as long, since memory ran out",
    "smallest": "the smallest there is",
    "largest": "the largest there is",
}


class AnswerIds:
    """The requests of answers, by the answer's `id` and by its `x-request-id`, for as long as the engine can explain
    them. Any thread may ask."""

    def __init__(self, service: Service) -> None:
        self._service = service
        # More answers than the engine can know of are not kept, but for some that are looked through when there are
        # twice as many.
        schedule = service.schedule
        self._most: Final = schedule.max_running + schedule.max_waiting + ENDED_EXPLAINED
        self._lock = threading.Lock()
        self._answers: dict[str, tuple[RequestId, ...]] = {}
        # Apart: a client picks these itself, and is not to take an answer's name away.
        self._headers: dict[str, tuple[RequestId, ...]] = {}

    def add(self, ids: Sequence[RequestId], *, answer: str, header: str) -> None:
        with self._lock:
            for names, name in ((self._answers, answer), (self._headers, header)):
                names.pop(name, None)  # the last of a name counts
                names[name] = tuple(ids)
                if len(names) >= 2 * self._most:
                    self._forget(names)

    def find(self, name: str) -> tuple[RequestId, ...]:
        """The requests of an answer, in the order of its choices, or one by the engine's own name; nothing where the
        name is not known."""
        is_own = self._service.explain(name) is not None
        with self._lock:
            return self._answers.get(name) or ((name,) if is_own else self._headers.get(name, ()))

    def _forget(self, names: dict[str, tuple[RequestId, ...]]) -> None:
        for name, ids in tuple(names.items()):
            if all(self._service.explain(request_id) is None for request_id in ids):
                del names[name]


def explain_router(service: Service, telemetry: Telemetry, ids: AnswerIds) -> APIRouter:
    """GET `/explain/{id}`: the chunks of an answer that is on its way or ended not long ago."""
    settings = size_settings(service)
    fixed = 0 if service.schedule.auto_chunk else service.schedule.chunk_size
    routes = APIRouter(include_in_schema=False)

    # Not async: it asks the engine.
    @routes.get("/explain/{name}")
    def explain(name: str) -> Response:
        # Before the chunks: of a request that is said to have ended, all of them are there.
        live = {status.id: status for status in service.status().requests}
        requests = [
            {
                "index": index,
                **_request(request_id, live.get(request_id), telemetry),
                "chunks": [_chunk(record, fixed) for record in chunks],
            }
            for index, request_id in enumerate(ids.find(name))
            if (chunks := service.explain(request_id)) is not None
        ]
        if not requests:
            raise ApiError(
                404,
                f"no request {name[:100]!r} is known: give the id of an answer, or its x-request-id, that is on its "
                f"way or was among the last {ENDED_EXPLAINED} to end",
                code="request_not_found",
                param="id",
            )
        met = dict.fromkeys(chunk["rule"] for request in requests for chunk in request["chunks"])
        rules = {rule: RULES[rule] for rule in met}
        content = {"id": name, "settings": settings, "rules": rules, "requests": requests}
        return JsonResponse(content, headers=LIVE_HEADERS)

    return routes


def _request(request_id: RequestId, live: RequestStatus | None, telemetry: Telemetry) -> dict[str, Any]:
    """How far a request is. How it ended may be known a moment later than that it has."""
    ended = telemetry.ended.get(request_id) if live is None else None
    known = live or ended
    return {
        "id": request_id,
        "phase": "ended" if live is None else live.phase,
        "outcome": None if ended is None else ended.outcome,
        "num_prompt_tokens": None if known is None else known.num_prompt_tokens,
    }


def _chunk(record: ChunkRecord, fixed: int) -> dict[str, Any]:
    shown = asdict(record)
    because = shown.pop("because")
    reason = RULES[record.rule]
    if record.rule == "fixed" and len(record) < fixed:
        reason += ", of which the step gives others a part"
    return {**shown, "size": len(record), "reason": f"{reason}: {because}" if because else reason}


def size_settings(service: Service) -> dict[str, Any]:
    """`effective` is what a chunk has where nothing speaks for less or more, `most` what it has at most; 0 is the
    whole prompt. `budget_bytes` is what a step may need: `max_activation_bytes`, or half of the memory that was free
    at the start, or None where that is not known. `decode_gap` is what a step takes at most while others decode."""
    size, chunk, schedule = service.llm.size, service.llm.chunk, service.schedule
    gap = size.decode_gap
    is_own = schedule.auto_chunk or schedule.chunk_size == chunk.effective
    return {
        "chunk": {
            "requested": chunk.requested,
            "effective": chunk.effective if schedule.auto_chunk else schedule.chunk_size,
            "most": schedule.chunk_size,
            "is_auto": schedule.auto_chunk,
            "reason": chunk.reason if is_own else "set by the service's schedule",
        },
        "target_itl_s": size.target_itl_s,
        "target_ttft_s": size.target_ttft_s,
        "decode_gap": {
            "effective_s": service.rules.decode_gap_s,
            "source": gap.source,
            "reason": gap.reason
            if service.rules.decode_gap_s == gap.effective
            else "set aside by the service's schedule",
        },
        "max_activation_bytes": size.max_activation_bytes,
        "budget_bytes": service.rules.budget_bytes,
    }


def size_lines(service: Service) -> list[str]:
    """The same in words."""
    settings = size_settings(service)
    chunk, budget = settings["chunk"], settings["max_activation_bytes"]
    memory = None if budget is None else f"a step may need {format_bytes(budget)} beside weights and cache"
    if not chunk["is_auto"]:
        size = "whole prompts" if chunk["effective"] == 0 else f"chunk {chunk['effective']}"
        line = f"{size} (requested {chunk['requested']}: {chunk['reason']})"
        return [line] if memory is None else [line, memory]
    targets = [
        f"{what} within {settings[name] * 1000:g} ms"
        for what, name in (("next token", "target_itl_s"), ("first token", "target_ttft_s"))
        if settings[name] is not None
    ]
    aim = f"targets: {', '.join(targets)}" if targets else "no latency target"
    if (gap_s := settings["decode_gap"]["effective_s"]) is not None:
        aim += f", so while others decode a step takes up to {gap_s * 1000:g} ms"
    return [
        f"chunk auto: {chunk['effective']} tokens ({chunk['reason'].removeprefix('auto: ')}) unless a target or "
        f"memory says otherwise, at most {chunk['most']}",
        f"{aim}; {memory or 'a step may need half of the free memory'}",
    ]


def started_lines(service: Service, settings: ServerSettings, url: str) -> list[str]:
    """What a server says when it listens; last, a warning where anyone may use it."""
    schedule, status = service.schedule, service.status()
    cache, store = status.cache, service.llm.store
    step = "" if schedule.step_tokens is None else f", step of up to {schedule.step_tokens} tokens"
    num_bytes = service.llm.model.cache_spec.num_bytes(cache.blocks_total, cache.slots_total)
    reuse = "shared between all requests, but for those with a cache_salt of their own"
    if not status.reuse.is_on:
        reuse = "not shared: every prompt is read"
    elif settings.isolates:
        reuse = "isolated: shared only between requests with the same API key"
    lines = [
        f"penstock {__version__} serves {settings.model_name} at {url}/v1",
        f"  {device_line(service.llm)}",
        *(f"  {line}" for line in size_lines(service)),
        f"  policy {schedule.policy}{', strict' if service.config.strict else ''}, "
        f"up to {schedule.max_running} requests at once and {schedule.max_waiting} waiting{step}",
        *(() if service.config.strict else (f"  not strict: {service.strict_reason}",)),
        f"  cache {cache.blocks_total * cache.block_tokens} tokens, {format_bytes(num_bytes)}; "
        f"prompt and answer up to {service.max_request_tokens} tokens",
        f"  prefixes are {reuse}",
    ]
    if store is not None and service.config.reuse:
        stats = store.stats()
        limits = f", up to {format_bytes(stats.max_bytes)}, now {format_bytes(stats.bytes_on_disk)}"
        unusable = " cannot be used: nothing is kept there"
        lines.append(f"  folder {store.folder}{limits if store.is_usable else unusable}")
    return [*lines, f"  live page {url}/", *open_lines(settings)]


def open_lines(settings: ServerSettings) -> list[str]:
    """A warning where anyone may use the server."""
    if settings.is_local or settings.api_keys:
        return []
    return [
        f"penstock: warning: anyone who reaches {settings.host} can use this server: "
        "set PENSTOCK_API_KEY, or leave --host away"
    ]
