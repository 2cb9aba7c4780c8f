"""The command `penstock serve`."""

from functools import partial
from typing import Annotated

import typer

from penstock.frontends import options
from penstock.frontends.exits import reported

_steps = partial(typer.Option, rich_help_panel="Steps")
_server = partial(typer.Option, rich_help_panel="Server")

_MAX_PORT = 65535


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    served_name: Annotated[
        str | None,
        options.on_model(
            metavar="NAME", help="What requests call the model: --model, or the end of its path, by default."
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    device: options.Device = None,
    threads: options.Threads = None,
    chunk: options.Chunk = None,
    max_activation: options.MaxActivation = None,
    target_itl_ms: options.TargetItl = None,
    target_ttft_ms: options.TargetTtft = None,
    align: options.Align = None,
    policy: Annotated[
        str,
        _steps(
            metavar="NAME",
            help="Who runs where some prompts are read while others decode: mixed, interleaved, decode-priority "
            "or prefill-first.",
        ),
    ] = "mixed",
    step_tokens: Annotated[
        int | None,
        _steps(
            help="The most tokens of a step, decodes included; by default a chunk and all "
            "decodes, on a GPU a chunk."
        ),
    ] = None,
    max_running: Annotated[int, _steps(help="Requests in progress at once.")] = 16,
    max_waiting: Annotated[
        int, _steps(help="Requests in the queue; more are refused with status 429.")
    ] = 256,
    max_decode_steps: Annotated[
        int, _steps(help="decode-priority: steps of decodes in a row while a prompt waits.")
    ] = 8,
    max_chunk_steps: Annotated[
        int, _steps(help="prefill-first: steps of chunks in a row while a decode waits.")
    ] = 64,
    cache_tokens: Annotated[
        int | None, _steps(help="Places in the K/V cache, all requests together; by free memory by default.")
    ] = None,
    reuse: Annotated[
        bool,
        options.on_cache(
            "--reuse/--no-reuse", help="Keep what was read in memory, for requests that begin alike."
        ),
    ] = True,
    cache_dir: options.CacheDir = None,
    cache_size: options.CacheSize = None,
    isolate: Annotated[
        bool,
        options.on_cache(
            "--isolate",
            help="Requests share what was read only with those of the same API key, so that nobody learns by the "
            "clock what others have asked.",
        ),
    ] = False,
    strict: Annotated[
        bool,
        _steps("--strict", help="The bits of a request's tokens do not depend on what runs beside it."),
    ] = False,
    host: Annotated[str, _server(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _server(min=0, max=_MAX_PORT, help="The port; 0 picks one and prints it.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        _server(
            metavar="KEY",
            help="A key that requests may send; one is needed then. May be given several times. $PENSTOCK_API_KEY is "
            "the safer way, and may hold several with commas in between.",
        ),
    ] = None,
    grace: Annotated[
        float, _server(help="Seconds that requests have to finish once the server is told to end.")
    ] = 30.0,
    max_body_bytes: Annotated[int, _server(help="The largest body of a request.")] = 8 << 20,
    max_prompt_tokens: Annotated[
        int | None, _server(help="The longest prompt; what context and cache hold by default.")
    ] = None,
) -> None:
    """Serve a model by OpenAI's API, many requests at once.

    SIGTERM or Ctrl-C ends it once requests have finished, or after --grace; a second Ctrl-C ends it at once.
    """
    given = locals()
    with reported(serve):
        # What can be refused is refused before anything slow: first without torch, then without the model.
        import math
        from dataclasses import replace
        from pathlib import Path

        from penstock.errors import SettingError
        from penstock.frontends.server.settings import ServerSettings, resolve_keys
        from penstock.plan.checks import check_int
        from penstock.plan.policy import ScheduleConfig, SchedulePolicy
        from penstock.plan.settings import check_schedule

        engine = options.engine_settings(given)
        schedule = ScheduleConfig(
            policy=SchedulePolicy.parse(policy),
            chunk_size=engine.chunk.effective,
            step_tokens=step_tokens,
            max_running=max_running,
            max_waiting=max_waiting,
            max_chunk_steps=max_chunk_steps,
            max_decode_steps=max_decode_steps,
            auto_chunk=engine.chunk.is_auto,
        )
        check_schedule(engine.size, schedule)
        if not reuse and (cache_dir is not None or cache_size is not None or isolate):
            other = "isolate" if isolate else "cache_size" if cache_dir is None else "cache_dir"
            raise SettingError("reuse", False, contradicts={other: ...})
        if cache_tokens is not None:
            check_int("cache_tokens", cache_tokens, 1)
        if not 0 <= grace < math.inf:
            raise SettingError("grace", grace, "a number of seconds, 0 or more")
        if served_name is None:
            served_name = Path(model).resolve().name if Path(model).exists() else model
        settings = ServerSettings(
            model_name=served_name,
            host=host,
            api_keys=resolve_keys(api_key),
            isolates=isolate,
            max_body_bytes=max_body_bytes,
            max_prompt_tokens=max_prompt_tokens,
        )

        from penstock.frontends.answer import loaded
        from penstock.frontends.display import make_display

        display = make_display()
        with display.busy("starting"):
            from penstock.engine.service import Service, ServiceConfig
            from penstock.frontends.server.app import create_app
            from penstock.frontends.server.explain import open_warning, started_lines
            from penstock.frontends.server.lifecycle import bind, url_of
            from penstock.frontends.server.lifecycle import serve as serve_app
            from penstock.frontends.server.metrics import Telemetry
            from penstock.kernels.device import find_devices

            engine = engine.on(find_devices())
        with bind(host, port) as listener, loaded(model, display, engine) as llm:
            schedule = replace(schedule, chunk_size=llm.most_chunk, grid=llm.chunk.grid)
            telemetry = Telemetry()
            config = ServiceConfig(schedule, cache_tokens, strict, reuse=reuse)
            with Service(llm, config, observers=[telemetry]) as service:

                def tell() -> None:
                    for line in started_lines(service, settings, url_of(listener)):
                        display.note(line)
                    warning = open_warning(settings)
                    if warning is not None:
                        display.note(warning)

                app = create_app(service, settings, telemetry)
                serve_app(app, service, listener, grace_s=grace, on_started=tell)
