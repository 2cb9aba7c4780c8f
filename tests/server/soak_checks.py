"""What must be so of a server: while it is busy, when it is idle again, and after its end."""

import ctypes
import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.events import GenerationRequest, Listener
from penstock.engine.service import Service
from penstock.frontends.server.body_reader import NUM_THREADS
from penstock.plan.step import RequestId
from penstock.process_memory import anonymous_bytes
from tests.server.running import Reply, Running
from tests.server.soak_clients import Tally

# How long a busy server is left between two looks at it.
_LOOK_S = 0.3
_PREFIX = "penstock_"
_POOLED = {
    *(f"penstock-bodies_{index}" for index in range(NUM_THREADS)),
    "penstock-long-bodies_0",
    "penstock-writer_0",
}


@dataclass(frozen=True)
class Resources:
    """What this process holds: threads by name, those of libraries among `num_tasks`; files; memory."""

    threads: Counter[str]
    num_tasks: int
    num_fds: int
    allocated_bytes: int

    @classmethod
    def now(cls) -> "Resources":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, so that only what is held is counted
        allocated_bytes = anonymous_bytes()
        assert allocated_bytes is not None
        return cls(
            Counter(thread.name for thread in threading.enumerate()),
            len(os.listdir("/proc/self/task")),
            # One is of the list itself.
            len(os.listdir("/proc/self/fd")) - 1,
            allocated_bytes,
        )

    def grown_beyond(self, before: "Resources", *, is_running: bool = False) -> list[str]:
        """Threads and files that are more than before. A server that runs starts threads of its pools when it first
        needs them."""
        grown = []
        more = self.threads - before.threads
        pooled = {name for name in more if is_running and name in _POOLED}
        if kept := sorted(more.keys() - pooled):
            grown.append(f"{sum(more[name] for name in kept)} threads stayed: {', '.join(kept[:5])}")
        elif self.num_tasks > before.num_tasks + len(pooled):
            grown.append(f"{self.num_tasks - before.num_tasks} threads of libraries stayed")
        if self.num_fds > before.num_fds:
            grown.append(f"{self.num_fds - before.num_fds} files or sockets stayed open")
        return grown


@dataclass(eq=False)
class Submits:
    """Counts the requests that a service takes."""

    num_taken: int = 0

    @contextmanager
    def of(self, service: Service) -> Iterator["Submits"]:
        submit, lock = service.submit, threading.Lock()

        def counted(request: GenerationRequest, listener: Listener) -> RequestId:
            request_id = submit(request, listener)
            with lock:
                self.num_taken += 1
            return request_id

        service.submit = counted  # type: ignore[method-assign]
        try:
            yield self
        finally:
            service.submit = submit  # type: ignore[method-assign]


class ErrorLog(logging.Handler):
    """Errors that nobody is told but the log: of the server, of tasks and threads."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(logging.ERROR)
        self._tally = tally

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._tally.fail(f"an error in the log: {record.getMessage()[:200]} {error!r}")

    @contextmanager
    def listening(self) -> Iterator[None]:
        logging.getLogger().addHandler(self)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(self)


def watch(server: Running, tally: Tally, is_over: threading.Event, limit_s: float) -> None:
    """Look at a busy server time and again: it tells how it is, soon, and its cache holds what its requests do."""
    while not (is_over.wait(_LOOK_S) or tally.has_failed.is_set()):
        started = time.monotonic()
        try:
            status = _let_in(server, "/status", limit_s).json
            metrics = read_metrics(server, limit_s)
            server.service.check_integrity()
        except AssertionError as error:
            tally.fail(f"while it was busy: {error}")
            return
        except Exception as error:
            tally.fail(f"/status or /metrics could not be read: {type(error).__name__}: {error}")
            return
        if not status["is_healthy"]:
            tally.fail("the engine has stopped")
        if status["num_running"] > server.service.schedule.max_running:
            tally.fail(f"{status['num_running']} requests run at once, more than may")
        if metrics["errors_total"]:
            tally.fail(f"{metrics['errors_total']:.0f} requests ended by an error")
        if time.monotonic() - started > limit_s:
            tally.fail(f"/status, /metrics and a check of the cache took more than {limit_s:g} s")
        tally.count("looks")


def _let_in(server: Running, path: str, limit_s: float) -> Reply:
    """The answer, once there is a place for another connection."""
    deadline = time.monotonic() + limit_s
    while (reply := server.ask("GET", path)).status == 503 and time.monotonic() < deadline:
        assert reply.error["code"] == "too_many_connections"
        time.sleep(_LOOK_S)
    return reply


def read_metrics(server: Running, limit_s: float = 0.0) -> dict[str, float]:
    """Samples without the prefix, by name and, in braces, label."""
    reply = _let_in(server, "/metrics", limit_s)
    assert reply.status == 200, f"/metrics was answered with {reply.status}"
    read = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            label = ",".join(sample.labels.values())
            read[sample.name.removeprefix(_PREFIX) + (f"{{{label}}}" if label else "")] = sample.value
    return read


def check_idle(server: Running, submits: Submits, tally: Tally, rest_s: float) -> dict[str, float]:
    """What must be so within `rest_s` once every client has gone; the metrics."""
    status: dict[str, Any] = {}
    metrics: dict[str, float] = {}

    def is_at_rest() -> bool:
        # What is told to observers comes a moment after the end that it tells of.
        status.update(server.ask("GET", "/status").json)
        metrics.update(read_metrics(server))
        return not _unrest(status, metrics, submits.num_taken)

    if not _comes_true(is_at_rest, rest_s):
        for what in _unrest(status, metrics, submits.num_taken):
            tally.fail(f"at rest: {what}")
    try:
        server.service.check_integrity()
    except AssertionError as error:
        tally.fail(f"at rest: {error}")
    return metrics


def check_resources(
    before: Resources, tally: Tally, rest_s: float, when: str, *, is_running: bool = False
) -> Resources:
    """No more threads and files than before, within `rest_s`."""
    _comes_true(lambda: not Resources.now().grown_beyond(before, is_running=is_running), rest_s)
    now = Resources.now()
    for what in now.grown_beyond(before, is_running=is_running):
        tally.fail(f"{when}: {what}")
    return now


def _unrest(status: dict[str, Any], metrics: dict[str, float], num_taken: int) -> list[str]:
    """What is not as it is when there is nothing to do."""
    wrong = []
    cache = status["cache"]
    if status["requests"] or status["num_running"] or status["num_waiting"]:
        wrong.append(f"{len(status['requests'])} requests are still there")
    if cache["blocks_used"]:
        wrong.append(f"{cache['blocks_used']} blocks are still used")
    if cache["slots_used"]:
        wrong.append(f"{cache['slots_used']} slots are still used")
    if metrics["cache_blocks_used"] != cache["blocks_used"]:
        wrong.append("/metrics and /status tell of different numbers of blocks")
    ends = {
        reason: metrics[f"finished_requests_total{{{reason}}}"]
        for reason in ("stop", "length", "cancelled", "error")
    }
    if sum(ends.values()) != num_taken:
        wrong.append(f"{num_taken} requests were taken, but {sum(ends.values()):.0f} ended: {ends}")
    if metrics["cancels_total"] != ends["cancelled"] or metrics["errors_total"] != ends["error"]:
        wrong.append("cancels or errors do not add up")
    num_tokens = metrics["time_to_first_token_seconds_count"] + metrics["inter_token_seconds_count"]
    if metrics["generated_tokens_total"] != num_tokens:
        wrong.append(f"{metrics['generated_tokens_total']:.0f} tokens, but {num_tokens:.0f} waits for one")
    if ends["error"]:
        wrong.append(f"{ends['error']:.0f} requests ended by an error")
    return wrong


def _comes_true(is_so: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
