"""The live page, what it shows as JSON, and the metrics."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Response

from penstock.engine.service import Service
from penstock.engine.status import StepRecord
from penstock.frontends.server.explain import size_settings
from penstock.frontends.server.metrics import CONTENT_TYPE, SLOW, LatencyWindow, Telemetry
from penstock.frontends.server.responses import LIVE_HEADERS, SAFE_HEADERS, JsonResponse
from penstock.frontends.server.settings import ServerSettings
from penstock.plan.step import RequestId

# The requests that ended last.
_ENDED_SHOWN = 6
FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_router(service: Service, telemetry: Telemetry, settings: ServerSettings) -> APIRouter:
    """GET `/` and the files it names under `/page/`, which hold nothing secret and need no key; GET `/status` and
    `/metrics`, which tell what others do. `/status?steps_after=n` leaves out steps up to index n."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _TYPES}
    schedule, config = service.schedule, service.config
    about = {
        "model": {
            "name": settings.model_name,
            "context_tokens": service.llm.context_length,
            "max_request_tokens": service.max_request_tokens,
            "has_chat_template": service.llm.tokenizer.has_chat_template,
            "kernels": asdict(service.llm.kernels),
        },
        "settings": {
            "policy": schedule.policy.value,
            **size_settings(service),
            "step_tokens": schedule.step_tokens,
            "max_running": schedule.max_running,
            "max_waiting": schedule.max_waiting,
            "longest_decode_gap": schedule.longest_decode_gap,
            "cache_tokens": config.cache_tokens,
            "strict": config.strict,
            "strict_reason": service.strict_reason,
            "isolates": settings.isolates,
        },
    }
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def page() -> Response:
        return _file("index.html", files)

    @routes.get("/page/{name}")
    async def file(name: str) -> Response:
        return _file(name, files)

    # Not async: they ask the engine, which may have to finish a thought first.
    @routes.get("/status")
    def status(steps_after: int = -1) -> Response:
        return JsonResponse({**about, **_status(service, telemetry, steps_after)}, headers=LIVE_HEADERS)

    @routes.get("/metrics")
    def metrics() -> Response:
        text = telemetry.render(service.status())
        return Response(text, headers={**LIVE_HEADERS, "Content-Type": CONTENT_TYPE})

    return routes


def _file(name: str, files: Mapping[str, bytes]) -> Response:
    if name not in files:
        raise HTTPException(404, f"there is no file {name!r}: open / for the page")
    return Response(
        files[name],
        media_type=_TYPES[Path(name).suffix],
        headers={**SAFE_HEADERS, "Cache-Control": "no-cache"},
    )


def _status(service: Service, telemetry: Telemetry, steps_after: int) -> dict[str, Any]:
    status = service.status()
    number = telemetry.numbers.of
    ratio = telemetry.pace.ratio
    times_of = service.llm.stages.step_times if service.llm.stages is not None else lambda _: []
    return {
        "is_healthy": service.is_healthy,
        "uptime_s": status.uptime_s,
        "num_running": status.num_running,
        "num_waiting": status.num_waiting,
        "requests": [asdict(request) | {"number": number(request.id)} for request in status.requests],
        "ended": [
            asdict(summary) | {"number": number(summary.id)} for summary in telemetry.ended.last(_ENDED_SHOWN)
        ],
        "steps": [_step(record, number, times_of) for record in status.steps if record.index > steps_after],
        "in_flight": [_step(record, number, times_of) for record in status.in_flight],
        "pace": {"ratio": ratio, "is_slow": ratio is not None and ratio >= SLOW},
        "tokens": telemetry.num_tokens(),
        "errors": {"failed": telemetry.num_failed(), "refused": telemetry.refusals()},
        "cache": asdict(status.cache),
        "reuse": asdict(status.reuse),
        "missing": None if service.missing is None else str(service.missing),
        "stages": [asdict(stage) for stage in status.stages],
        "latency": {
            "first_token": _percentiles(telemetry.first_token),
            "inter_token": _percentiles(telemetry.inter_token),
        },
    }


def _step(
    record: StepRecord,
    number: Callable[[RequestId], int],
    times_of: Callable[[int | None], list[float | None]],
) -> dict[str, Any]:
    # By hand: `asdict` copies so deeply that many spans would hold the engine's thread up.
    return {
        "index": record.index,
        "start_s": record.start_s,
        "seconds": record.seconds,
        "spans": [
            {
                "request_id": span.request_id,
                "number": number(span.request_id),
                "kind": span.kind.value,
                "start": span.start,
                "end": span.end,
            }
            for span in record.spans
        ],
        "num_held_decodes": record.num_held_decodes,
        "preempted": record.preempted,
        "stages": times_of(record.issued),
        "stalls_decodes": record.stalls_decodes,
    }


def _percentiles(window: LatencyWindow) -> dict[str, float] | None:
    percentiles = window.percentiles()
    return None if percentiles is None else asdict(percentiles)
