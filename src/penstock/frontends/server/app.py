"""The HTTP application: which path does what.

How to add an endpoint: its body in `bodies`, what it asks of the engine in `requests`, its answer's format in
`responses`, and its path here; one that only shows something goes to `pages`."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response

from penstock.engine.service import Service
from penstock.engine.streams import EventStream
from penstock.errors import SettingError
from penstock.frontends.server import middleware
from penstock.frontends.server.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from penstock.frontends.server.body_reader import BodyReader
from penstock.frontends.server.connections import Connections, Room
from penstock.frontends.server.embeddings import EmbeddingAnswer, EmbeddingBody
from penstock.frontends.server.errors import errors_about, request_id
from penstock.frontends.server.explain import AnswerIds, explain_router
from penstock.frontends.server.facts import fact_router, openapi_of
from penstock.frontends.server.lifecycle import Drain, disconnected, run_unless
from penstock.frontends.server.llama_api import InfillBody, NativeAnswer, NativeBody
from penstock.frontends.server.messages_api import MessagesAnswer, MessagesBody
from penstock.frontends.server.metrics import Telemetry
from penstock.frontends.server.pages import page_router
from penstock.frontends.server.parts import Body, Ignored, parse
from penstock.frontends.server.requests import PreparedRequest, RequestBuilder, no_model
from penstock.frontends.server.responses import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    EventStreamResponse,
    JsonResponse,
    ResponseWriter,
    token_piece,
)
from penstock.frontends.server.responses_api import ResponsesAnswer, ResponsesBody
from penstock.frontends.server.settings import ServerSettings

_Body = TypeVar("_Body", bound=Body)
_Asked = TypeVar("_Asked", bound=Body)
_Result = TypeVar("_Result")
_Endpoint = Callable[[Request], Awaitable[Response]]
# Names that were ignored are logged once, and no more than so many.
_MAX_LOGGED = 1000
_log = logging.getLogger("penstock.server")


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
        openapi_url="/openapi.json",
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.drain = drain
    app.state.connections = connections
    middleware.install(app, settings, telemetry)
    app.include_router(page_router(service, telemetry, settings))
    app.include_router(explain_router(service, telemetry, ids))
    app.include_router(fact_router(service, settings))
    taken: dict[str, type[Body]] = {}  # by path
    app.openapi = lambda: openapi_of(app, taken)  # type: ignore[method-assign]
    logged: set[str] = set()
    model = {
        "id": settings.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "penstock",
        "root": settings.model_name,
        "context_length": service.max_request_tokens,
        "max_model_len": service.max_request_tokens,
    }

    def post(path: str, kind: type[Body], name: str | None = None) -> Callable[[_Endpoint], _Endpoint]:
        """An endpoint that takes a body, with /v1 before its path and without."""
        taken[f"/v1{path}"] = kind

        def add(endpoint: _Endpoint) -> _Endpoint:
            app.post(path, include_in_schema=False)(endpoint)
            return app.post(f"/v1{path}", name=name)(endpoint)

        return add

    async def read(request: Request, kind: type[_Body], work: Callable[[_Body], _Result]) -> _Result:
        """The result of work on a request's body, on a thread; what was ignored of it is told."""
        ignored = Ignored(settings.strict_parameters)
        request.state.ignored = ignored

        def work_on(raw: bytes) -> _Result:
            with errors_about(kind.prompt_param):
                return work(parse(raw, kind, ignored))

        result = await reader.apply(request, work_on)
        if ignored.names:
            telemetry.on_ignored(len(ignored.names))
            if (new := ignored.names.keys() - logged) and len(logged) < _MAX_LOGGED:
                logged.update(new)
                _log.warning("parameters that are not known are ignored: %s", ignored.header)
        return result

    @app.get("/health")
    async def health() -> Response:
        if drain.has_begun or not service.is_healthy:
            status = "draining" if service.is_healthy else "failed"
            return JsonResponse({"status": status}, status_code=503)
        if (missing := service.missing) is not None:
            about = {"stage": missing.stage, "address": missing.address, "reason": missing.reason}
            return JsonResponse({"status": "waiting", "missing": about}, status_code=503)
        return JsonResponse({"status": "ok", "kernels": asdict(service.llm.kernels)})

    @app.get("/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [model]})

    @app.get("/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != settings.model_name:
            raise no_model(name, settings.model_name)
        return JsonResponse(model)

    def answers(path: str, kind: type[_Asked], name: str, answer: Callable[[_Asked], dict[str, Any]]) -> None:
        """An endpoint that asks nothing of the engine."""

        @post(path, kind, name)
        async def endpoint(request: Request) -> Response:
            told = await read(request, kind, answer)
            return await writer.write(lambda: told)

    def tokenized(body: TokenizeBody) -> dict[str, Any]:
        ids, pieces = builder.tokenize(body), service.llm.tokenizer.pieces
        told: dict[str, Any] = {"tokens": ids, "count": len(ids)}
        texts = [token_piece(pieces.of(token, skip_special=False)) for token in ids if body.has_texts]
        if body.with_pieces:
            told["tokens"] = [{"id": token, "piece": text} for token, text in zip(ids, texts, strict=True)]
        if body.return_token_strs:
            told["token_strs"] = texts
        return told

    def detokenized(body: DetokenizeBody) -> dict[str, Any]:
        text = builder.detokenize(body)
        return {"content": text, "prompt": text}

    def counted(body: MessagesBody) -> dict[str, Any]:
        return {"input_tokens": builder.count(body)}

    def rendered(body: ChatBody) -> dict[str, Any]:
        return {"prompt": builder.render(body.conversation())}

    answers("/messages/count_tokens", MessagesBody, "count_tokens", counted)
    answers("/tokenize", TokenizeBody, "tokenize", tokenized)
    answers("/detokenize", DetokenizeBody, "detokenize", detokenized)
    answers("/apply-template", ChatBody, "apply_template", rendered)

    async def generate(
        request: Request,
        kind: type[_Asked],
        prepare: Callable[[_Asked, str | None], PreparedRequest],
        answer_kind: type[Answer],
    ) -> Response:
        events = EventStream(service)
        drain.add(events)
        tenant: str | None = request.state.tenant  # by the middleware

        def work(body: _Asked) -> PreparedRequest:
            prepared = prepare(body, tenant)
            events.submit(prepared.requests)
            return prepared

        try:
            prepared = await read(request, kind, work)
            answer = answer_kind(prepared, events, settings.model_name, service)
            if prepared.held_later is not None:  # by now the engine reads the prompt
                try:
                    await asyncio.wrap_future(prepared.held_later)
                except SettingError:
                    request.state.ignored.names["tools.parameters"] = None
            ids.add(events.ids, answer=answer.id, header=request_id.get())
            if prepared.streams:
                return EventStreamResponse(answer.stream(), at_end=events.cancel)
            return await run_unless(answer.whole(writer), disconnected(request.receive))
        except BaseException:
            events.cancel()
            raise

    def generates(
        path: str,
        kind: type[_Asked],
        prepare: Callable[[_Asked, str | None], PreparedRequest],
        answer_kind: type[Answer],
    ) -> None:
        @post(path, kind)
        async def endpoint(request: Request) -> Response:
            return await generate(request, kind, prepare, answer_kind)

    generates("/completions", CompletionBody, builder.completion, CompletionAnswer)
    generates("/chat/completions", ChatBody, builder.chat, ChatAnswer)
    generates("/responses", ResponsesBody, builder.chat, ResponsesAnswer)
    generates("/messages", MessagesBody, builder.chat, MessagesAnswer)
    generates("/embeddings", EmbeddingBody, builder.embeddings, EmbeddingAnswer)
    generates("/completion", NativeBody, builder.native, NativeAnswer)
    generates("/infill", InfillBody, builder.infill, NativeAnswer)
    return app
