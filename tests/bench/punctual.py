"""A prompt that comes in time: the service waits for it, with the streams that run."""

import threading

import pytest

from penstock.bench.serve_runs import Watch
from penstock.engine.events import Event, GenerationRequest, Listener
from penstock.engine.service import Service
from penstock.plan.step import RequestId

PATIENCE_S = 60.0


def make_punctual(monkeypatch: pytest.MonkeyPatch, num_streams: int) -> None:
    """When all streams are settled, the service's thread waits for the next request. Otherwise they go on while the
    thread that is to send it is late, and may have ended when it does."""
    tell, submit = Watch.__call__, Service.submit
    settled: set[Watch] = set()
    has_come = threading.Event()

    def is_stream(listener: Listener) -> bool:
        return isinstance(listener, Watch) and listener._settle_tokens > 1

    def told(watch: Watch, event: Event) -> None:
        tell(watch, event)
        if is_stream(watch) and watch.settled.is_set() and watch not in settled:
            settled.add(watch)
            if len(settled) % num_streams == 0:
                has_come.wait(PATIENCE_S)

    def submitted(service: Service, request: GenerationRequest, listener: Listener) -> RequestId:
        if is_stream(listener):
            has_come.clear()
        request_id = submit(service, request, listener)
        if not is_stream(listener):
            has_come.set()
        return request_id

    monkeypatch.setattr(Watch, "__call__", told)
    monkeypatch.setattr(Service, "submit", submitted)
