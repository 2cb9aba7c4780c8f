"""What other servers tell of themselves, by the paths that their clients ask: version, load, properties, slots, and
the description of all endpoints."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from penstock import __version__
from penstock.engine.service import Service
from penstock.frontends.server.parts import Body
from penstock.frontends.server.responses import LIVE_HEADERS, JsonResponse
from penstock.frontends.server.settings import ServerSettings

_REFERENCE = "#/components/schemas/{model}"


def fact_router(service: Service, settings: ServerSettings) -> APIRouter:
    """`/version`, `/ping` and `/load` as vLLM has them, `/props` and `/slots` as llama.cpp."""
    routes = APIRouter(include_in_schema=False)
    llm, num_slots = service.llm, service.schedule.max_running

    @routes.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": __version__})

    @routes.get("/ping")
    @routes.post("/ping")
    async def ping() -> Response:
        return JsonResponse({}, status_code=200 if service.is_healthy else 503)

    # Not async: they ask the engine, which may have to finish a thought first.
    @routes.get("/load")
    def load() -> Response:
        status = service.status()
        return JsonResponse({"server_load": status.num_running + status.num_waiting}, headers=LIVE_HEADERS)

    @routes.get("/props")
    async def props() -> Response:
        return JsonResponse(
            {
                "model_alias": settings.model_name,
                "model_path": settings.model_name,
                "total_slots": num_slots,
                "default_generation_settings": {"n_ctx": service.max_request_tokens},
                "chat_template": llm.tokenizer.chat_template or "",
                "modalities": {"vision": False, "audio": False},
                "build_info": f"penstock-{__version__}",
            }
        )

    @routes.get("/slots")
    def slots() -> Response:
        running = [request for request in service.status().requests if request.phase != "waiting"]
        busy = [
            {
                "id_task": request.id,
                "n_prompt_tokens": request.num_prompt_tokens,
                "n_decoded": request.num_generated,
            }
            for request in running
        ]
        busy += [{}] * (num_slots - len(busy))
        content = [
            {"id": index, "n_ctx": service.max_request_tokens, "is_processing": bool(task), **task}
            for index, task in enumerate(busy)
        ]
        return JsonResponse(content, headers=LIVE_HEADERS)

    return routes


def openapi_of(app: FastAPI, bodies: Mapping[str, type[Body]]) -> dict[str, Any]:
    """The endpoints by the OpenAPI specification, with the bodies that each takes, by path."""
    described = get_openapi(title=app.title, version=__version__, routes=app.routes)
    schemas, shared = models_json_schema(
        [(kind, "validation") for kind in set(bodies.values())], ref_template=_REFERENCE
    )
    for path, kind in bodies.items():
        content = {"application/json": {"schema": schemas[kind, "validation"]}}
        described["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    described.setdefault("components", {}).setdefault("schemas", {}).update(shared.get("$defs", {}))
    return described
