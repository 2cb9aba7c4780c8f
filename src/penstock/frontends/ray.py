"""`penstock serve --ray`: replicas of a server behind Ray Serve, stages as actors. The only file that imports Ray.

    Serve's proxy > Front: reads a body, learns its keys > PrefixRouter > Replica: the service and its application
                                                                            > StageWorker: layers before its own

Ray Serve starts and restarts them, and passes streams and disconnects on. Its config files name
`penstock.frontends.ray:application`.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import __version__
from penstock.cache.keys import BlockKey, KeyChain, root_key
from penstock.engine.stages.control import Address, Listener, new_token
from penstock.engine.stages.workers import run_worker
from penstock.errors import PenstockError, SettingError, StageLostError
from penstock.frontends.affinity import PrefixAffinity, Route
from penstock.frontends.answer import fetch
from penstock.frontends.display import make_display
from penstock.frontends.exits import INTERRUPTED, complain, on_signals
from penstock.frontends.serve import ServerPlan, started
from penstock.frontends.serve import serve as serve_command
from penstock.frontends.server import middleware
from penstock.frontends.server.app import create_app
from penstock.frontends.server.bodies import ChatBody, CompletionBody
from penstock.frontends.server.body_reader import BodyReader
from penstock.frontends.server.errors import ApiError, request_id
from penstock.frontends.server.explain import open_lines
from penstock.frontends.server.lifecycle import Drain, bind, url_of
from penstock.frontends.server.messages_api import MessagesBody
from penstock.frontends.server.metrics import CONTENT_TYPE, Telemetry, merged
from penstock.frontends.server.parts import Ignored, parse
from penstock.frontends.server.requests import RequestBuilder
from penstock.frontends.server.responses import LIVE_HEADERS, JsonResponse, error_response, to_json
from penstock.frontends.server.responses_api import ResponsesBody
from penstock.kernels.interface import KernelsUnavailableError
from penstock.kernels.native.build import native_library
from penstock.machine import usable_cores
from penstock.models.reading import first_line, shortened
from penstock.plan import EngineSettings
from penstock.plan.stage_settings import StagesSetting

# Of Ray, which is told before it is imported. Nothing is sent home; and a cluster of this process is nobody else's:
# so Ray listens on the loopback only, which it is otherwise said to do on a desktop's systems alone.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
_ADDRESS = "RAY_ADDRESS"
if _ADDRESS not in os.environ:
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
try:
    import ray
    import ray.util.scheduling_strategies
    from ray import serve
    from ray.exceptions import RayActorError, RayError
    from ray.serve.config import RequestRouterConfig
    from ray.serve.request_router import RequestRouter
except ModuleNotFoundError:  # the command has said so before
    RequestRouter = object

NAME = "penstock"
# How often a request is sent to another replica before anything of its answer was passed on.
_ATTEMPTS = 3
# What each replica is asked for what it alone knows has so long to answer.
_ASK_S = 5.0
_ASKED_OF_ALL = ("/health", "/metrics", "/status", "/explain/")
# Keys only say who has read what: a few bytes of each are enough.
_KEY_BYTES = 8
# Requests that a replica may have beside those that run and wait: those that are refused, pages, keys.
_SPARE_REQUESTS = 64
_CHECK_S = 2.0
_POLL_S = 0.2
_LAST_WORDS_S = 10.0
# A worker that is started again has to import torch.
_START_S = 60.0
_LOGGING: dict[str, Any] = {"log_level": "ERROR", "enable_access_log": False}


def listen_on_one_interface() -> None:
    """Serve's actors listen on all interfaces for each other, where the node's own address is enough. There is no
    setting for it: without this name in Serve nothing changes, and `tests/ray` notices."""
    from ray.serve._private import replica

    own, add_port = ray.util.get_node_ip_address(), getattr(replica, "add_port_to_grpc_server", None)
    if add_port is not None:
        replica.add_port_to_grpc_server = lambda server, address: add_port(
            server, address.replace("[::]", own)
        )


@dataclass(frozen=True)
class Whole:
    """A replica's answer to a small request."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def response(self) -> Response:
        response = Response(self.body, self.status)
        response.raw_headers = self.headers
        return response


class StageWorker:
    """What `penstock worker` runs, in an actor of Ray's, which starts it again where it dies."""

    def __init__(self, token: bytes, device: str | None, threads: int | None) -> None:
        self._listener = Listener(Address(ray.util.get_node_ip_address(), 0), token)
        options: dict[str, Any] = {"device": device, "threads": threads}
        threading.Thread(target=run_worker, args=(self._listener,), kwargs=options, daemon=True).start()

    def address(self) -> str:
        return str(self._listener.address)


def with_workers(engine: EngineSettings, stages: StagesSetting, closing: ExitStack) -> EngineSettings:
    """The settings of a driver whose workers are actors: in the replica's placement group, whose first bundle has the
    replica itself. They end with it."""
    token, group = new_token(), ray.util.get_current_placement_group()
    folder = closing.enter_context(TemporaryDirectory(prefix="penstock-"))
    token_file = Path(folder) / "token"
    token_file.touch(mode=0o600)
    token_file.write_bytes(token)
    actor = ray.remote(StageWorker)

    def address_of(stage: int) -> Callable[[], str]:
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, stage + 1)
        worker = actor.options(
            **_resources(engine), max_restarts=-1, max_task_retries=-1, scheduling_strategy=place
        ).remote(token, engine.device.requested, engine.threads.count)
        closing.callback(ray.kill, worker)

        def address() -> str:  # of the one that lives, or is started
            try:
                return str(ray.get(worker.address.remote(), timeout=max(stages.timeout_s, _START_S)))
            except RayError as error:
                raise StageLostError(stage, "an actor of Ray's", first_line(error)) from None

        return address

    addresses = tuple(address_of(stage) for stage in range(stages.num_stages - 1))
    return replace(engine, stages=replace(stages, addresses=addresses, token_file=token_file))


def _resources(engine: EngineSettings) -> dict[str, float]:
    """What a stage asks Ray for."""
    uses_gpu = str(engine.device.requested).startswith("cuda")
    return {"num_cpus": engine.threads.count or 1, "num_gpus": int(uses_gpu)}


class Replica:
    """A service and its application, in an actor of Ray's."""

    def __init__(self, plan: ServerPlan) -> None:
        listen_on_one_interface()
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._closing = ExitStack()
        if plan.engine.stages is not None:
            engine = with_workers(plan.engine, plan.engine.stages, self._closing)
            plan = replace(plan, engine=engine)
        telemetry = Telemetry()
        self._service = self._closing.enter_context(started(plan, make_display(), telemetry))
        self._app = create_app(self._service, plan.settings, telemetry)
        self._builder = RequestBuilder(self._service, plan.settings)

    def __del__(self) -> None:
        self._closing.close()

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if not self._service.is_healthy:
            raise RuntimeError("the engine has stopped")

    async def keys(self, path: str, tenant: str | None, body: bytes) -> list[BlockKey]:
        """The keys of a prompt's blocks; none where there is no prompt, or one that will be refused."""
        return await asyncio.to_thread(self._keys, path.removeprefix("/v1"), tenant, body)

    def _keys(self, path: str, tenant: str | None, body: bytes) -> list[BlockKey]:
        builder = self._builder
        try:
            match path:
                case "/completions":
                    prepared = builder.completion(parse(body, CompletionBody, Ignored()), tenant)
                case "/chat/completions":
                    prepared = builder.chat(parse(body, ChatBody, Ignored()), tenant)
                case "/responses":
                    prepared = builder.chat(parse(body, ResponsesBody, Ignored()), tenant)
                case "/messages":
                    prepared = builder.chat(parse(body, MessagesBody, Ignored()), tenant)
                case _:
                    return []
        except (ApiError, PenstockError):
            return []
        first = prepared.requests[0]
        chain = KeyChain(root_key(b"", first.cache_salt))
        chain.extend(first.token_ids)
        return [key[:_KEY_BYTES] for key in chain.keys]

    async def answer(self, scope: Scope, body: bytes, route: Route) -> AsyncIterator[list[Message]]:
        """The messages of the application's answer, as they come. `route` is the router's."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        task = asyncio.create_task(self._run(scope, body, messages))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            last: Message | None = {}
            while last is not None:
                several = [last := await messages.get()]
                while not messages.empty():
                    several.append(last := messages.get_nowait())
                if ready := [message for message in several if message is not None]:
                    yield ready
            await task  # raises what it raised
        finally:  # also where the client has gone
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def get(self, scope: Scope) -> Whole:
        """The whole answer to a request without a body."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        await self._run(scope, b"", messages)
        parts = [messages.get_nowait() or {} for _ in range(messages.qsize())]
        body = b"".join(part.get("body", b"") for part in parts)
        return Whole(self._name, parts[0]["status"], list(parts[0]["headers"]), body)

    async def _run(self, scope: Scope, body: bytes, messages: "asyncio.Queue[Message | None]") -> None:
        coming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return coming.pop() if coming else await asyncio.Future()  # a client that goes cancels all of it

        await self._app(scope, receive, messages.put)


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a prompt to the replica that has its beginning. It runs where the replicas' handle is: in the front.

    What a replica has to do are the routes that lead to it: Serve says that an answer has ended some time after the
    client has it, and counts questions for keys as well."""

    def initialize_state(self, *, most_load: int) -> None:
        self._affinity = PrefixAffinity(most_load)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        route: Route | None = None
        if pending_request is not None:  # one that nobody takes now is offered again, later and later
            pending_request.routing_context.should_backoff = True
            route = pending_request.kwargs.get("route")
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        return [[replicas[name]] for name in self._affinity.ranked(route or Route.aside(), replicas)]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        if route := pending_request.kwargs.get("route"):
            route.replica = replica_id.unique_id  # where the chosen one has no place, another

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        self._keep_current()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._keep_current()

    def _keep_current(self) -> None:
        self._affinity.keep({replica_id.unique_id for replica_id in self.curr_replicas})


class Forwarded(Response):
    """A replica's answer, passed on as it comes. Where the replica dies before that, another one answers; where it
    dies on the way, the last event says so."""

    def __init__(self, replicas: Any, asked: Scope, body: bytes, keys: Sequence[BlockKey]) -> None:
        self.background = None
        self._replicas = replicas.options(stream=True)
        self._asked = asked, body, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, body, keys = self._asked
        error = ApiError(503, "the replica that was to answer has died: send it again", code="replica_lost")
        for _ in range(_ATTEMPTS):
            begun: Message | None = None
            route = Route(keys)
            answer = self._replicas.answer.remote(asked, body, route=route)
            try:
                async for messages in answer:
                    for message in messages:
                        begun = begun or message
                        route.is_over = "body" in message and not message.get("more_body")
                        await send(message)
                return
            except RayError as failure:
                if begun is not None:
                    if not _is_event_stream(begun):
                        raise  # the connection is cut
                    last = b"data: " + to_json(error.content) + b"\n\n"
                    await send({"type": "http.response.body", "body": last, "more_body": False})
                    return
                if not isinstance(failure, RayActorError):
                    raise
            finally:
                route.is_over = True
                answer.cancel()  # where it has ended, nothing happens
        await error_response(error, scope["path"])(scope, receive, send)


def _is_event_stream(begun: Message) -> bool:
    kind: bytes = dict(begun.get("headers", ())).get(b"content-type", b"")
    return kind.startswith(b"text/event-stream")


class Front:
    """What clients talk to: checks keys and bodies, and passes requests on."""

    def __init__(self, plan: ServerPlan, num_replicas: int, replicas: Any) -> None:
        listen_on_one_interface()
        self._plan = plan
        self._num_replicas = num_replicas
        self._replicas = replicas

    def __serve_build_asgi_app__(self) -> ASGIApp:
        settings, schedule = self._plan.settings, self._plan.schedule
        self._telemetry = Telemetry()
        most = self._num_replicas * (schedule.max_running + schedule.max_waiting)
        self._reader = BodyReader(most, settings.max_body_bytes, Drain())
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        middleware.install(app, settings, self._telemetry)
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
        app.add_route("/{path:path}", self._pass_on, methods=methods)

        async def without_id(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_on(message: Message) -> None:  # the proxy adds the same
                if message["type"] == "http.response.start":
                    del MutableHeaders(scope=message)["x-request-id"]
                await send(message)

            await app(scope, receive, send_on)

        return without_id

    async def _pass_on(self, request: Request) -> Response:
        asked = _plain(request.scope)
        path = asked["path"]
        if request.method == "GET" and path.startswith(_ASKED_OF_ALL):
            return await self._ask_all(asked, request)
        body, keys = b"", []
        if request.method != "GET":
            body = await self._reader.apply(request, lambda raw: raw)
            if self._num_replicas > 1:
                keys = await self._keys(path, request.state.tenant, body)
        return Forwarded(self._replicas, asked, body, keys)

    async def _keys(self, path: str, tenant: str | None, body: bytes) -> list[BlockKey]:
        with suppress(RayActorError):
            keys: list[BlockKey] = await self._replicas.keys.remote(path, tenant, body)
            return keys
        return []

    async def _ask_all(self, asked: Scope, request: Request) -> Response:
        """What each replica knows of itself: put together, or that of one."""
        answers: list[Whole] = []
        with suppress(RayError, serve.exceptions.RayServeException, TimeoutError):
            asking = self._replicas.broadcast("get", asked)
            found = await asking.results_async(timeout_s=_ASK_S, return_exceptions=True)
            answers = sorted(
                (each for each in found if isinstance(each, Whole)), key=lambda each: each.replica
            )
        good = [answer for answer in answers if answer.status == 200]
        if asked["path"] == "/health":
            about = {"status": "ok" if good else "failed", "replicas": len(good), "of": self._num_replicas}
            return JsonResponse(about, status_code=200 if good else 503)
        if not answers:
            raise ApiError(503, "no replica answers: try again later", code="service_unavailable")
        if asked["path"] == "/metrics" and good:
            text = merged({answer.replica: answer.body for answer in good}, self._telemetry.refusals())
            return Response(text, headers={**LIVE_HEADERS, "Content-Type": CONTENT_TYPE})
        index = request.query_params.get("replica", "0")
        if index.isdecimal() and int(index) < len(good) and asked["path"] == "/status":
            return good[int(index)].response()
        return (good or answers)[0].response()


def _plain(scope: Scope) -> Scope:
    """A request's scope without what belongs to this process; with the id that its answer has."""
    names = (
        "type",
        "asgi",
        "http_version",
        "method",
        "scheme",
        "path",
        "raw_path",
        "query_string",
        "root_path",
    )
    headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
    headers.append((b"x-request-id", request_id.get().encode()))
    peers = {name: scope.get(name) for name in ("client", "server")}
    return {name: scope[name] for name in names if name in scope} | peers | {"headers": headers}


def application(args: Mapping[str, Any]) -> Any:
    """The application for Ray Serve, of the options of `penstock serve` by the names of its parameters."""
    given = {name: each.default.default for name, each in signature(serve_command).parameters.items()}
    if unknown := args.keys() - given.keys():
        raise SettingError(f"there is no option {', '.join(sorted(unknown))} of penstock serve")
    given |= {"ray": True, **args}
    given["threads"] = given["threads"] or 1
    return _application(ServerPlan.resolve(given), given)


def _application(plan: ServerPlan, given: Mapping[str, Any]) -> Any:
    schedule, num_replicas, num_stages = plan.schedule, given["replicas"], _num_stages(plan)
    resources = _resources(plan.engine)
    bundle = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
    placing = {"placement_group_bundles": [bundle] * num_stages} if num_stages > 1 else {}
    most = schedule.max_running + schedule.max_waiting + _SPARE_REQUESTS
    common = {
        "graceful_shutdown_timeout_s": given["grace"],
        "graceful_shutdown_wait_loop_s": _POLL_S,
        "health_check_period_s": _CHECK_S,
        "max_constructor_retry_count": 1,
    }
    replica = serve.deployment(
        Replica,
        num_replicas=num_replicas,
        ray_actor_options=resources,
        max_ongoing_requests=most,
        **placing,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"most_load": 2 * schedule.max_running}
        ),
        **common,
    )
    # One of them: what is known of who has read what is known in one place.
    front = serve.deployment(
        serve.ingress()(Front),
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=num_replicas * most,
        **common,
    )
    return front.bind(plan, num_replicas, replica.bind(plan))


def _num_stages(plan: ServerPlan) -> int:
    stages = plan.engine.stages
    if stages is not None and stages.addresses:
        raise SettingError("stages", ",".join(map(str, stages.addresses)), "a number", beside={"ray": True})
    return 1 if stages is None else stages.num_stages


def run(given: Mapping[str, Any]) -> None:
    """Serve until SIGTERM or SIGINT, on the cluster of RAY_ADDRESS, else on one that ends with this process. Answers
    then have the grace to end. A signal after the first ends it at once."""
    display = make_display()
    plan = ServerPlan.resolve(given)
    num_parts = given["replicas"] * _num_stages(plan)
    if _ADDRESS not in os.environ:
        # What is wrong here is known before anything slow, and no replica compiles while another waits for it.
        fetch(plan.model, display)
        with display.warnings("penstock.kernels"), suppress(KernelsUnavailableError):
            native_library()
    with bind(given["host"], given["port"]) as taken:
        port, url = taken.getsockname()[1], url_of(taken)
    is_up, has_stopped = threading.Event(), threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if not is_up.is_set():
            raise KeyboardInterrupt
        if has_stopped.is_set():
            complain("interrupted")
            os._exit(INTERRUPTED)  # Ray's own watch ends what is left
        has_stopped.set()

    with ExitStack() as closing:
        with display.busy("starting Ray"):
            threads = closing.enter_context(_cluster(plan, num_parts))
            plan = ServerPlan.resolve({**given, "threads": threads})
            # After Ray, which has its own ways.
            closing.enter_context(on_signals([signal.SIGINT, signal.SIGTERM], handle))
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": given["host"], "port": port},
                logging_config=_LOGGING,
            )
            closing.callback(serve.shutdown)
        with display.busy(f"starting {given['replicas']} replicas of {shortened(plan.model, 60)}"):
            _deploy(plan, given)
        closing.callback(_delete, given["grace"])
        is_up.set()
        for line in _started_lines(plan, given["replicas"], url):
            display.note(line)
        has_stopped.wait()


@contextmanager
def _cluster(plan: ServerPlan, num_parts: int) -> Iterator[int]:
    """A connection to Ray: how many threads each stage of each replica has. A cluster of our own is said to have the
    processors for that, if need be."""
    logging.getLogger("ray.serve").setLevel(_LOGGING["log_level"])
    quiet = {"namespace": NAME, "log_to_driver": True, "logging_level": "error"}
    wanted = plan.engine.threads
    threads = None if wanted.source == "default" else wanted.count or 1
    is_own = _ADDRESS not in os.environ
    try:
        if is_own:
            num_cpus = max(usable_cores(), num_parts * (threads or 1))
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
        else:
            ray.init(**quiet)
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        raise PenstockError(f"Ray cannot be reached or started: {' '.join(str(error).split())}") from None
    try:
        num_cpus = int(ray.cluster_resources().get("CPU", 0))
        threads = threads or max(1, num_cpus // num_parts)
        if num_parts * threads > num_cpus:
            because = f"replicas and stages of {threads} threads want {num_parts * threads}"
            raise SettingError(
                f"the cluster has {num_cpus} processors, and {because}: give fewer, or less --threads"
            )
        yield threads
    finally:
        ray.shutdown()


def _deploy(plan: ServerPlan, given: Mapping[str, Any]) -> None:
    try:
        serve.run(_application(plan, given), name=NAME, logging_config=_LOGGING)
    except RuntimeError:
        told = [
            each.message for each in serve.status().applications[NAME].deployments.values() if each.message
        ]
        reason = told[0].strip().splitlines()[-1] if told else "see Ray's logs"
        raise PenstockError(f"the replicas do not start: {reason}") from None


def _delete(grace_s: float) -> None:
    """Take no more requests, and wait for those at hand."""
    serve.delete(NAME, _blocking=False)
    ends_at = time.monotonic() + grace_s + _LAST_WORDS_S
    while NAME in serve.status().applications and time.monotonic() < ends_at:
        time.sleep(_POLL_S)


def _started_lines(plan: ServerPlan, num_replicas: int, url: str) -> list[str]:
    settings, stages = plan.settings, _num_stages(plan)
    lines = [
        f"penstock {__version__} serves {settings.model_name} at {url}/v1",
        f"  on Ray {ray.__version__}: {num_replicas} x {stages} x {plan.engine.threads.count} (replicas x stages x "
        "threads); requests that begin alike go to the same replica",
        f"  live page {url}/",
    ]
    return lines + open_lines(settings)
