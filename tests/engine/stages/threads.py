"""Workers as threads of this process: all that a stage has but a process of its own, in milliseconds."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest

from penstock.engine.stages import pipeline
from penstock.engine.stages.control import Control, tell_failure
from penstock.engine.stages.worker import serve_driver
from penstock.engine.stages.workers import StageShare, WorkerPlace


class ThreadWorker(WorkerPlace):
    """A stage on a thread. `kill` ends its connection, as the end of a process does."""

    opened: ClassVar[list["ThreadWorker"]] = []

    def __init__(self, share: StageShare, *, device: str | None = None) -> None:
        super().__init__("a thread")
        self._device = device
        self._theirs: Control | None = None

    def _connect(self, timeout_s: float, stage_timeout_s: float) -> Control:
        ours, theirs = socket.socketpair()
        self._theirs = Control(theirs, "the driver", stage_timeout_s=stage_timeout_s)
        self._thread = threading.Thread(target=self._serve, args=(self._theirs,), daemon=True)
        self._thread.start()
        ThreadWorker.opened.append(self)
        return Control(ours, self.name, stage_timeout_s=stage_timeout_s)

    def kill(self) -> None:
        assert self._theirs is not None
        self._theirs.close()

    def end(self) -> None:
        """One that is in torch when Python ends would abort the process."""
        self.kill()
        self._thread.join(10)

    def _serve(self, control: Control) -> None:
        with control:
            try:
                serve_driver(control, device=self._device)
            except Exception as error:
                tell_failure(control, error)


@contextmanager
def workers_as_threads() -> Iterator[None]:
    """Local workers are threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "LocalWorker", ThreadWorker)
        patch.setattr(ThreadWorker, "opened", opened := list[ThreadWorker]())
        yield
        for worker in opened:
            worker.end()
