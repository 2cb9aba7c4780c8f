"""The HTTP application: which path does what.

How to add an endpoint: its body in `bodies`, what it asks of the engine in `requests`, its answer's format in
`responses`, and its path here; one that only shows something goes to `pages`."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI, Request, Response

from penstock.engine.service import Service
from penstock.engine.streams import EventStream
from penstock.frontends.server import middleware
from penstock.frontends.server.bodies import ChatBody, CompletionBody, GenerationBody, TokenizeBody, parse
from penstock.frontends.server.connections import Connections, Room
from penstock.frontends.server.errors import errors_about, request_id
from penstock.frontends.server.explain import AnswerIds, explain_router
from penstock.frontends.server.lifecycle import Drain, disconnected, run_unless
from penstock.frontends.server.metrics import Telemetry
from penstock.frontends.server.pages import page_router
from penstock.frontends.server.requests import BodyReader, PreparedRequest, RequestBuilder
from penstock.frontends.server.responses import (
    Answer,
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    EventStreamResponse,
    JsonResponse,
    ResponseWriter,
)
from penstock.frontends.server.settings import ServerSettings

_Body = TypeVar("_Body", bound=GenerationBody)


def create_app(service: Service, settings: ServerSettings, telemetry: Telemetry) -> FastAPI:
    """The server's application. `app.state.drain` is the Drain by which it ends, `app.state.connections`
    are those that are open."""
    schedule = service.schedule
    drain, writer, ids = Drain(), ResponseWriter(), AnswerIds(service)
    reader = BodyReader(schedule.max_running + schedule.max_waiting, settings.max_body_bytes, drain)
    builder = RequestBuilder(service, settings)
    room = Room.of_process(settings.max_connections)
    connections = Connections(room, settings.stalled_s, telemetry.on_refusal)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connections.open()
        yield
        connections.close()
        reader.close()
        writer.close()

    app = FastAPI(
        title="Penstock",
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.drain = drain
    app.state.connections = connections
    middleware.install(app, settings, telemetry)
    app.include_router(page_router(service, telemetry, settings))
    app.include_router(explain_router(service, telemetry, ids))
    model = {
        "id": settings.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "penstock",
        "context_length": service.max_request_tokens,
    }

    @app.get("/health")
    async def health() -> Response:
        if drain.has_begun or not service.is_healthy:
            status = "draining" if service.is_healthy else "failed"
            return JsonResponse({"status": status}, status_code=503)
        return JsonResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        builder.check_model(name)
        return JsonResponse(model)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, CompletionBody, builder.completion, CompletionFormat())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await generate(request, ChatBody, builder.chat, ChatFormat())

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        def work(raw: bytes) -> list[int]:
            with errors_about(TokenizeBody.prompt_param):
                return builder.tokenize(parse(raw, TokenizeBody))

        tokens = await reader.apply(request, work)
        return await writer.write(lambda: {"tokens": tokens, "count": len(tokens)})

    async def generate(
        request: Request,
        kind: type[_Body],
        prepare: Callable[[_Body, str | None], PreparedRequest],
        form: AnswerFormat,
    ) -> Response:
        events = EventStream(service)
        drain.add(events)
        tenant: str | None = request.state.tenant  # by the middleware

        def work(raw: bytes) -> PreparedRequest:
            with errors_about(kind.prompt_param):
                prepared = prepare(parse(raw, kind), tenant)
                events.submit(prepared.requests)
                return prepared

        try:
            prepared = await reader.apply(request, work)
            answer = Answer(prepared, events, form, settings.model_name, service)
            ids.add(events.ids, answer=answer.id, header=request_id.get())
            if prepared.streams:
                return EventStreamResponse(answer.stream(), at_end=events.cancel)
            return await run_unless(answer.whole(writer), disconnected(request.receive))
        except BaseException:
            events.cancel()
            raise

    return app
