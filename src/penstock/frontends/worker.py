"""`penstock worker`: layers of a model for a driver on another machine, or this one."""

import signal
from types import FrameType

import typer

from penstock.frontends import options
from penstock.frontends.exits import on_signals, reported


def worker(
    listen: str = typer.Option(
        ...,
        help="The one address to listen at, HOST:PORT; the interface that the driver and the stages before and "
        "after this one reach it by. Port 0 takes a free one.",
        metavar="HOST:PORT",
        show_default=False,
    ),
    token_file: str = typer.Option(
        ...,
        help="A file that only its owner can read, with the token that driver and workers share: openssl rand "
        "-hex 32 > FILE; chmod 600 FILE.",
        metavar="PATH",
        show_default=False,
    ),
    device: str | None = options.DEVICE,
    threads: int | None = options.THREADS,
) -> None:
    """Hold layers of a model for `serve`, `generate` or Python with --stages HOST:PORT,...

    One driver at a time says which model and which layers; when it has gone, the next one is waited for. Driver and
    workers prove that they know the token. What they send is not encrypted: use a network that you trust, or a
    tunnel. SIGTERM or Ctrl-C ends it.
    """
    with reported(worker):
        # What can be refused is refused before torch is loaded.
        from penstock.engine.stages.control import Listener, read_token
        from penstock.frontends.display import make_display

        display = make_display()
        settings = options.engine_settings({"device": device, "threads": threads})
        with Listener(listen, read_token(token_file)) as listener, on_signals(_ENDS, _end):
            with display.busy("starting"):
                import torch

                from penstock.engine.stages.workers import end_worker, run_worker
                from penstock.kernels.device import find_devices

                settings = settings.on(find_devices())
            count = settings.threads.within(torch.get_num_threads())
            try:
                run_worker(listener, device=settings.device.name, threads=count, tell=display.note)
            except SystemExit:
                end_worker()


_ENDS = (signal.SIGINT, signal.SIGTERM)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
