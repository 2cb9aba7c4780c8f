"""The HTTP application: which path does what."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI, Request, Response

from penstock.engine.service import Service
from penstock.errors import PenstockError, SettingError
from penstock.frontends.server.answers import Answer, EventStreamResponse
from penstock.frontends.server.asks import Ask, Asker
from penstock.frontends.server.bodies import Body, ChatBody, CompletionBody, TokenizeBody
from penstock.frontends.server.drain import Drain
from penstock.frontends.server.explain import explain_router
from penstock.frontends.server.explain_names import AnswerNames
from penstock.frontends.server.front import Front
from penstock.frontends.server.gate import Gate
from penstock.frontends.server.gathering import Gathering
from penstock.frontends.server.gone import disconnected, unless
from penstock.frontends.server.intake import Intake
from penstock.frontends.server.json_answer import JsonAnswer
from penstock.frontends.server.logprobs import ChatLogprobs, CompletionLogprobs, LogprobWriter
from penstock.frontends.server.pages import router
from penstock.frontends.server.parsing import parse
from penstock.frontends.server.problems import as_api_error, install_handlers, request_id
from penstock.frontends.server.settings import ServerSettings
from penstock.frontends.server.shapes import ChatShape, CompletionShape, Envelope, Shape
from penstock.frontends.server.telemetry import Telemetry
from penstock.frontends.server.writing import Writer
from penstock.models.text.pieces import TokenPieces

_Body = TypeVar("_Body", bound=Body)


def create_app(service: Service, settings: ServerSettings, telemetry: Telemetry) -> FastAPI:
    """The server's application. `app.state.drain` is the Drain by which it is told that it is about to end."""
    schedule = service.schedule
    drain, writer = Drain(), Writer()
    intake = Intake(schedule.max_running + schedule.max_waiting, settings.max_body_bytes, drain)
    asker = Asker(service, settings)
    names = AnswerNames(service)
    answering = _Answering(service, settings, intake, writer, drain, names)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        intake.close()
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
    app.add_middleware(Gate, settings=settings)
    app.add_middleware(Front, telemetry=telemetry)  # around the gate
    install_handlers(app)
    app.include_router(router(service, telemetry, settings))
    app.include_router(explain_router(service, telemetry, names))
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
            return JsonAnswer({"status": status}, status_code=503)
        return JsonAnswer({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonAnswer({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        asker.check_model(name)
        return JsonAnswer(model)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answering.answer(
            request, CompletionBody, asker.completion, CompletionShape(), CompletionLogprobs
        )

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answering.answer(request, ChatBody, asker.chat, ChatShape(), ChatLogprobs)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        tokens = await intake.take(request, lambda raw: asker.tokenize(parse(raw, TokenizeBody)))
        return await writer.write(lambda: {"tokens": tokens, "count": len(tokens)})

    return app


class _Answering:
    """What the two endpoints that generate have in common."""

    def __init__(
        self,
        service: Service,
        settings: ServerSettings,
        intake: Intake,
        writer: Writer,
        drain: Drain,
        names: AnswerNames,
    ) -> None:
        self._service = service
        self._model_name = settings.model_name
        self._intake = intake
        self._writer = writer
        self._drain = drain
        self._names = names
        self._pieces = service.llm.tokenizer.pieces
        self._eos_ids = service.llm.eos_ids

    async def answer(
        self,
        request: Request,
        kind: type[_Body],
        make_ask: Callable[[_Body, str | None], Ask],
        shape: Shape,
        writer: Callable[[TokenPieces], LogprobWriter],
    ) -> Response:
        gathering = Gathering(self._service)
        self._drain.add(gathering)
        tenant: str | None = request.state.tenant  # by the gate

        def submit(raw: bytes) -> Ask:
            body = parse(raw, kind)
            ask = make_ask(body, tenant)
            try:
                gathering.submit(ask.requests)
            except PenstockError as error:
                problem = as_api_error(error, kind.prompt_param)
                if isinstance(error, SettingError) and problem.param is None and ask.wants_json:
                    problem.param = "response_format"  # a schema is compiled when it is submitted
                raise problem from error
            return ask

        try:
            ask = await self._intake.take(request, submit)
            # Its id ends as its first request's does, by which the live page knows it.
            envelope = Envelope(shape, self._model_name, gathering.ids[0].rpartition("-")[2])
            self._names.add(gathering.ids, answer=envelope.id, header=request_id.get())
            answer = Answer(ask, gathering, envelope, lambda: writer(self._pieces), self._eos_ids)
            if ask.streams:
                return EventStreamResponse(answer.stream(), at_end=gathering.cancel)
            return await unless(answer.whole(self._writer), disconnected(request.receive))
        except BaseException:
            gathering.cancel()
            raise
