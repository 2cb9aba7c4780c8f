"""What a service does, counted for Prometheus and for the live page."""

import threading
from collections import OrderedDict
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from penstock.engine.batcher import ENDED_EXPLAINED
from penstock.engine.status import Outcome, RequestSummary, ServiceStatus, StepRecord
from penstock.frontends.server.latency import LatencyWindow
from penstock.frontends.server.reuse_metrics import ReuseMetrics
from penstock.plan.step import RequestId, SpanKind

# The format that `render` writes.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A first token waits for its whole prompt and the queue; a step, and the token after it, for much less.
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_CHUNK_TOKENS = tuple(2**power for power in range(16))

_REFUSALS = (400, 401, 403, 404, 405, 408, 413, 429, 500, 503)


class EndedRequests:
    """The requests that ended last: those whose chunks the engine can still explain. Any thread may ask."""

    def __init__(self, size: int = ENDED_EXPLAINED) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._last: OrderedDict[RequestId, RequestSummary] = OrderedDict()

    def add(self, summary: RequestSummary) -> None:
        with self._lock:
            self._last[summary.id] = summary
            if len(self._last) > self._size:
                self._last.popitem(last=False)

    def get(self, request_id: RequestId) -> RequestSummary | None:
        with self._lock:
            return self._last.get(request_id)

    def last(self, most: int) -> tuple[RequestSummary, ...]:
        """So many at most, the newest first."""
        with self._lock:
            return tuple(
                summary for summary, _ in zip(reversed(self._last.values()), range(most), strict=False)
            )


class Telemetry:
    """An observer of a service. `render` gives all it saw, and the service's present state, to Prometheus."""

    def __init__(self) -> None:
        self.first_token = LatencyWindow()
        self.inter_token = LatencyWindow()
        self.ended = EndedRequests()
        # Its own registry: two services in one process do not mix.
        self._registry = CollectorRegistry()
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _FIRST_TOKEN_S
        )
        self._inter_token = self._histogram(
            "inter_token_seconds", "From a token of a request to its next", _STEP_S
        )
        self._chunk_tokens = self._histogram("chunk_tokens", "Tokens of a prompt's chunk", _CHUNK_TOKENS)
        self._chunk_seconds = self._histogram("chunk_seconds", "Seconds of a step that read tokens", _STEP_S)
        self._stall_seconds = self._histogram(
            "decode_stall_seconds", "Seconds of a step that read tokens while a decode waited", _STEP_S
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read, repeats included")
        self._generated = self._counter("generated_tokens", "Tokens generated")
        self._preemptions = self._counter("preemptions", "Times that a request gave cache space up")
        self._shrinks = self._counter("chunk_shrinks", "Times that memory ran out and chunks were halved")
        self._cancels = self._counter("cancels", "Requests that were cancelled")
        self._errors = self._counter("errors", "Requests that ended by an error")
        self._finished = Counter(
            "penstock_finished_requests", "Requests that ended", ["reason"], registry=self._registry
        )
        for outcome in get_args(Outcome):
            self._finished.labels(outcome)  # there from the start, as 0
        self._refused = Counter(
            "penstock_refused_requests", "Answers that are errors", ["status"], registry=self._registry
        )
        for status in _REFUSALS:
            self._refused.labels(str(status))
        self._blocks_used = self._gauge("cache_blocks_used", "Blocks of the K/V cache in use")
        self._blocks_total = self._gauge("cache_blocks", "Blocks of the K/V cache")
        self._slots_used = self._gauge("state_slots_used", "Slots of recurrent state in use")
        self._slots_total = self._gauge("state_slots", "Slots of recurrent state")
        self._running = self._gauge("requests_running", "Requests in progress")
        self._waiting = self._gauge("requests_waiting", "Requests in the queue")

    def on_step(self, record: StepRecord) -> None:
        for span in record.spans:
            if span.kind is SpanKind.CHUNK:
                self._chunk_tokens.observe(span.end - span.start)
                self._prompt_tokens.inc(span.end - span.start)
        if record.num_chunk_tokens:
            self._chunk_seconds.observe(record.seconds)
        if record.stalls_decodes:
            self._stall_seconds.observe(record.seconds)
        self._preemptions.inc(len(record.preempted))

    def on_token(self, request_id: RequestId, gap_s: float, *, is_first: bool) -> None:
        (self._first_token if is_first else self._inter_token).observe(gap_s)
        (self.first_token if is_first else self.inter_token).add(gap_s)
        self._generated.inc()

    def on_shrink(self) -> None:
        self._shrinks.inc()

    def on_end(self, summary: RequestSummary) -> None:
        self.ended.add(summary)
        self._finished.labels(summary.outcome).inc()
        if summary.outcome == "cancelled":
            self._cancels.inc()
        elif summary.outcome == "error":
            self._errors.inc()

    def on_refusal(self, status: int) -> None:
        """An answer was an error."""
        self._refused.labels(str(status)).inc()

    def render(self, status: ServiceStatus) -> bytes:
        """The text that Prometheus scrapes, of type `CONTENT_TYPE`."""
        self._blocks_used.set(status.cache.blocks_used)
        self._blocks_total.set(status.cache.blocks_total)
        self._slots_used.set(status.cache.slots_used)
        self._slots_total.set(status.cache.slots_total)
        self._running.set(status.num_running)
        self._waiting.set(status.num_waiting)
        of_status = CollectorRegistry()
        of_status.register(ReuseMetrics(status))
        return generate_latest(self._registry) + generate_latest(of_status)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"penstock_{name}", text, registry=self._registry, buckets=buckets)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"penstock_{name}", text, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"penstock_{name}", text, registry=self._registry)
