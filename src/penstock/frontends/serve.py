"""The command `penstock serve`."""

import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.frontends import options
from penstock.frontends.exits import reported

if TYPE_CHECKING:
    from penstock.engine.service import Service
    from penstock.frontends.display import Display
    from penstock.frontends.server.metrics import Telemetry
    from penstock.frontends.server.settings import ServerSettings
    from penstock.plan import EngineSettings
    from penstock.plan.policy import ScheduleConfig

_steps = options.in_panel("Steps")
_server = options.in_panel("Server")
_ray = options.in_panel("Ray")

_MAX_PORT = 65535


def serve(
    model: str = options.MODEL,
    served_name: str | None = options.on_model(
        None, "What requests call the model: --model, or the end of its path, by default.", metavar="NAME"
    ),
    dtype: options.Dtype = options.DTYPE,
    weights: str | None = options.WEIGHTS,
    activations: str | None = options.ACTIVATIONS,
    model_impl: str | None = options.MODEL_IMPL,
    device: str | None = options.DEVICE,
    threads: int | None = options.THREADS,
    stages: str | None = options.STAGES,
    layers: str | None = options.LAYERS,
    stage_timeout: float | None = options.STAGE_TIMEOUT,
    mixed: bool = options.MIXED,
    token_file: str | None = options.TOKEN_FILE,
    chunk: str | None = options.CHUNK,
    max_activation: str | None = options.MAX_ACTIVATION,
    target_itl_ms: str | None = options.TARGET_ITL_MS,
    target_ttft_ms: str | None = options.TARGET_TTFT_MS,
    align: bool | None = options.ALIGN,
    policy: str = _steps(
        "mixed",
        "Who runs where some prompts are read while others decode: mixed, interleaved, decode-priority "
        "or prefill-first.",
        metavar="NAME",
    ),
    step_tokens: int | None = _steps(
        None,
        "The most tokens of a step, decodes included; by default a chunk and all decodes, on a GPU a chunk.",
    ),
    max_running: int = _steps(16, "Requests in progress at once."),
    max_running_per_key: int | None = _steps(
        None, "Requests in progress at once of one API key, whose others wait; no limit by default."
    ),
    max_waiting: int = _steps(256, "Requests in the queue; more are refused with status 429."),
    max_decode_steps: int = _steps(8, "decode-priority: steps of decodes in a row while a prompt waits."),
    max_chunk_steps: int = _steps(64, "prefill-first: steps of chunks in a row while a decode waits."),
    cache_tokens: int | None = _steps(
        None, "Places in the K/V cache, all requests together; by free memory by default."
    ),
    reuse: bool = options.on_cache(
        True, "Keep what was read in memory, for requests that begin alike.", "--reuse/--no-reuse"
    ),
    cache_dir: str | None = options.CACHE_DIR,
    cache_size: str | None = options.CACHE_SIZE,
    isolate: bool = options.on_cache(
        False,
        "Requests share what was read only with those of the same API key, so that nobody learns by the "
        "clock what others have asked.",
        "--isolate",
    ),
    strict: bool | None = _steps(
        None,
        "The bits of a request's tokens do not depend on what runs beside it; by default where that costs nothing: "
        "with weights in bfloat16, and on a processor with quantised ones. Asked for, what answers left in the cache "
        "is not used again, either.",
        "--strict/--no-strict",
    ),
    host: str = _server("127.0.0.1", "The address to listen on."),
    port: int = _server(8000, "The port; 0 picks one and prints it.", min=0, max=_MAX_PORT),
    api_key: list[str] | None = _server(
        None,
        "A key that requests may send; one is needed then. May be given several times. $PENSTOCK_API_KEY is "
        "the safer way, and may hold several with commas in between.",
        metavar="KEY",
    ),
    allow_origin: list[str] | None = _server(
        None,
        "The origin of web pages that may use the server, such as https://chat.example. May be given several times.",
        metavar="URL",
    ),
    strict_parameters: bool = _server(
        False,
        "Refuse parameters that are not known, and answers of more tokens than there is room for; else those are "
        "ignored and told in the header x-penstock-ignored, and these cut.",
        "--strict-parameters",
    ),
    strict_model: bool = _server(
        False, "Refuse requests for a model of another name; else any name is this model's.", "--strict-model"
    ),
    grace: float = _server(30.0, "Seconds that requests have to finish once the server is told to end."),
    max_body_bytes: int = _server(8 << 20, "The largest body of a request."),
    max_prompt_tokens: int | None = _server(
        None, "The longest prompt; what context and cache hold by default."
    ),
    max_connections: int | None = _server(
        None,
        "Connections at once; more are refused with status 503. By default as many as there are descriptors for "
        "(ulimit -n), up to 1,024.",
    ),
    stalled: float = _server(
        10.0, "Seconds after which a client that takes nothing of its answer is hung up on."
    ),
    ray: bool = _ray(
        False,
        "Serve by Ray: on the cluster that $RAY_ADDRESS names, else on one that is started here and ends with the "
        "server. Needs pip install 'penstock[ray]'.",
        "--ray",
    ),
    replicas: int = _ray(
        1, "Servers of the model behind one address; requests that begin alike go to the same one.", min=1
    ),
) -> None:
    """Serve a model by OpenAI's API, many requests at once.

    SIGTERM or Ctrl-C ends it once requests have finished, or after --grace; a second Ctrl-C ends it at once.
    """
    given = locals()
    with reported(serve):
        # What can be refused is refused before anything slow: first without torch, then without the model.
        plan = ServerPlan.resolve(given)
        if ray:
            from penstock.frontends.ray import run

            run(given)
            return

        from penstock.frontends.display import make_display

        display = make_display()
        with display.busy("starting"):
            from penstock.frontends.server.app import create_app
            from penstock.frontends.server.explain import started_lines
            from penstock.frontends.server.lifecycle import bind, url_of
            from penstock.frontends.server.lifecycle import serve as serve_app
            from penstock.frontends.server.metrics import Telemetry

        telemetry = Telemetry()
        with bind(host, port) as listener, started(plan, display, telemetry) as service:

            def tell() -> None:
                for line in started_lines(service, plan.settings, url_of(listener)):
                    display.note(line)

            app = create_app(service, plan.settings, telemetry)
            serve_app(app, service, listener, grace_s=grace, on_started=tell)


@dataclass(frozen=True)
class ServerPlan:
    """A server that was asked for: its settings, as far as they follow without torch and the model."""

    model: str
    engine: "EngineSettings"
    schedule: "ScheduleConfig"
    settings: "ServerSettings"
    cache_tokens: int | None
    strict: bool | None
    reuse: bool

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> Self:
        """Out of all that the command was given."""
        from penstock.errors import SettingError
        from penstock.frontends.server.settings import KEYS_VARIABLE, ServerSettings, resolve_keys
        from penstock.plan.checks import check_int
        from penstock.plan.policy import ScheduleConfig, SchedulePolicy
        from penstock.plan.settings import check_schedule

        model, reuse, isolate = given["model"], given["reuse"], given["isolate"]
        engine = options.engine_settings(given)
        schedule = ScheduleConfig(
            policy=SchedulePolicy.parse(given["policy"]),
            chunk_size=engine.chunk.effective,
            step_tokens=given["step_tokens"],
            max_running=given["max_running"],
            max_running_per_key=given["max_running_per_key"],
            max_waiting=given["max_waiting"],
            max_chunk_steps=given["max_chunk_steps"],
            max_decode_steps=given["max_decode_steps"],
            auto_chunk=engine.chunk.is_auto,
        )
        check_schedule(engine.size, schedule)
        if not reuse and (given["cache_dir"] is not None or given["cache_size"] is not None or isolate):
            other = "isolate" if isolate else "cache_size" if given["cache_dir"] is None else "cache_dir"
            raise SettingError("reuse", False, contradicts={other: ...})
        if given["cache_tokens"] is not None:
            check_int("cache_tokens", given["cache_tokens"], 1)
        if given["ray"] and find_spec("ray") is None:
            because = "it needs Ray, which is not installed: pip install 'penstock[ray]'"
            raise SettingError("ray", True, because=because)
        if given["replicas"] > 1 and not given["ray"]:
            raise SettingError("replicas", given["replicas"], needs=("ray",))
        if not 0 <= given["grace"] < math.inf:
            raise SettingError("grace", given["grace"], "a number of seconds, 0 or more")
        keys = resolve_keys(given["api_key"])
        if schedule.max_running_per_key is not None and not keys:
            raise SettingError(
                "max_running_per_key", schedule.max_running_per_key, needs=("api_key", KEYS_VARIABLE)
            )
        name = given["served_name"]
        if name is None:
            name = Path(model).resolve().name if os.path.exists(model) else model
        settings = ServerSettings(
            model_name=name,
            host=given["host"],
            api_keys=keys,
            isolates=isolate,
            max_body_bytes=given["max_body_bytes"],
            max_prompt_tokens=given["max_prompt_tokens"],
            max_connections=given["max_connections"],
            stalled_s=given["stalled"],
            allow_origins=tuple(given["allow_origin"] or ()),
            strict_parameters=given["strict_parameters"],
            strict_model=given["strict_model"],
        )
        return cls(model, engine, schedule, settings, given["cache_tokens"], given["strict"], reuse)


@contextmanager
def started(plan: ServerPlan, display: "Display", telemetry: "Telemetry") -> Iterator["Service"]:
    """A service that runs the plan's model, for a while."""
    with display.busy("starting"):
        from penstock.engine.service import Service, ServiceConfig
        from penstock.frontends.answer import loaded
        from penstock.kernels.device import find_devices

        engine = plan.engine.on(find_devices())
    with loaded(plan.model, display, engine) as llm:
        schedule = replace(plan.schedule, chunk_size=llm.most_chunk, grid=llm.chunk.grid)
        config = ServiceConfig(schedule, plan.cache_tokens, plan.strict, reuse=plan.reuse)
        with Service(llm, config, observers=[telemetry]) as service:
            threading.Thread(target=llm.prepare_answers, name="penstock-first-answer", daemon=True).start()
            with display.busy("preparing"):
                service.wait_until_ready()
            yield service
