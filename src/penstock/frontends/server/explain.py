"""Why a request's chunks are as long as they are, as JSON."""

from typing import Any

from fastapi import APIRouter, Response

from penstock.engine.batcher import ENDED_EXPLAINED
from penstock.engine.explain import ChunkRecord
from penstock.engine.service import Service
from penstock.engine.status import RequestStatus
from penstock.frontends.server.explain_names import AnswerNames
from penstock.frontends.server.explain_settings import size_settings
from penstock.frontends.server.json_answer import JsonAnswer
from penstock.frontends.server.pages import LIVE_HEADERS
from penstock.frontends.server.problems import ApiError
from penstock.frontends.server.telemetry import Telemetry
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


def explain_router(service: Service, telemetry: Telemetry, names: AnswerNames) -> APIRouter:
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
            for index, request_id in enumerate(names.find(name))
            if (chunks := service.explain(request_id)) is not None
        ]
        if not requests:
            raise _unknown(name)
        met = dict.fromkeys(chunk["rule"] for request in requests for chunk in request["chunks"])
        rules = {rule: RULES[rule] for rule in met}
        content = {"id": name, "settings": settings, "rules": rules, "requests": requests}
        return JsonAnswer(content, headers=LIVE_HEADERS)

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
    words = RULES[record.rule]
    if record.rule == "fixed" and len(record) < fixed:
        words += ", of which the step gives others a part"
    return {
        "start": record.start,
        "end": record.end,
        "size": len(record),
        "past": record.past,
        "rule": record.rule,
        "reason": f"{words}: {record.because}" if record.because else words,
        "predicted_s": record.predicted_s,
        "measured_s": record.measured_s,
        "predicted_bytes": record.predicted_bytes,
        "measured_bytes": record.measured_bytes,
        "num_decodes": record.num_decodes,
    }


def _unknown(name: str) -> ApiError:
    return ApiError(
        404,
        f"no request {name[:100]!r} is known: give the id of an answer, or its x-request-id, that is on its way or "
        f"was among the last {ENDED_EXPLAINED} to end",
        code="request_not_found",
        param="id",
    )
