"""Workers as threads of this process: all that a stage has but a process of its own, in milliseconds."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

import pytest

from penstock.engine.stages import pipeline
from penstock.engine.stages.control import Control
from penstock.engine.stages.worker import serve_driver
from penstock.engine.stages.workers import StageShare
from penstock.errors import StageLostError


class ThreadWorker:
    """A stage on a thread. `kill` ends its connection, as the end of a process does."""

    name = "a thread"
    opened: ClassVar[list["ThreadWorker"]] = []

    def __init__(self, share: StageShare, *, device: str | None = None) -> None:
        self._device = device
        self._ours: Control | None = None
        self._theirs: Control | None = None

    def open(self, stage: int, *, timeout_s: float, stage_timeout_s: float) -> Control:
        ours, theirs = socket.socketpair()
        self._theirs = Control(theirs, "the driver", stage_timeout_s=stage_timeout_s)
        threading.Thread(target=self._serve, args=(self._theirs,), daemon=True).start()
        self._ours = Control(ours, f"thread {stage}", stage_timeout_s=stage_timeout_s)
        self._ours.stage = stage
        ThreadWorker.opened.append(self)
        return self._ours

    def close(self) -> None:
        if self._ours is not None:
            self._ours.close()

    def kill(self) -> None:
        assert self._theirs is not None
        self._theirs.close()

    def _serve(self, control: Control) -> None:
        with control:
            try:
                serve_driver(control, device=self._device)
            except Exception as error:
                with suppress(StageLostError):
                    control.send("failed", {"error": str(error), "kind": type(error).__name__})


@contextmanager
def workers_as_threads() -> Iterator[None]:
    """Local workers are threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "LocalWorker", ThreadWorker)
        patch.setattr(ThreadWorker, "opened", [])
        yield
