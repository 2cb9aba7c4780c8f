"""What workers of the tests run: parts of a worker's life that need no model."""

import os
import time

from penstock.engine.stages.control import Control


def echo(control: Control, *, device: str | None = None) -> None:
    """Tells what it has, then sends back what it gets. Told to, it fails, or computes without ever looking up."""
    control.send(
        "hello",
        {
            "pid": os.getpid(),
            "device": device,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "processors": sorted(os.sched_getaffinity(0)),
        },
    )
    while (message := control.receive()).kind != "stop":
        if message.kind == "fail":
            raise RuntimeError("told to")
        if message.kind == "hang":
            time.sleep(600)
        control.send(message.kind, message.about, bytes(message.data))
