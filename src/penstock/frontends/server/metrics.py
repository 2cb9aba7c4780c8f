"""What a service does, for Prometheus and for the live page: its state when it is asked (`_STATE`), and what was
counted and measured as it happened (`Telemetry`). How to add a metric: docs/architecture.md."""

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.engine.batcher import ENDED_EXPLAINED
from penstock.engine.status import Outcome, RequestSummary, ServiceStatus, StepRecord
from penstock.plan.step import RequestId, SpanKind
from penstock.plan.step_time import StepTimeModel

# The format that `render` writes.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A first token waits for its whole prompt and the queue; a step, and the token after it, for much less.
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_CHUNK_TOKENS = tuple(2**power for power in range(16))
# Statuses that are there from the start, as 0.
_REFUSALS = (400, 401, 403, 404, 405, 408, 413, 429, 500, 503)
# The waits of which percentiles are shown.
WINDOW = 2048
# Steps are judged so many at a time, which costs each of them less; and the last of them say how it is now.
JUDGED = 16
RECENT = 64
# A step is slow where it takes so many times as long as the fastest of its kind. Before so many, nothing is known.
SLOW = 1.5
LEAST_STEPS = 48
# Requests whose numbers are remembered.
NUMBERED = 4096


class _State(NamedTuple):
    """A metric of a service's state: its name, its help, and the number's place in `ServiceStatus`; with a label, a
    place for each of the label's values. Names that end in `_total` are counters, others gauges."""

    name: str
    text: str
    place: str | Mapping[str, str]
    label: str = ""

    def of(self, status: ServiceStatus) -> Metric:
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        name = f"penstock_{self.name}".removesuffix("_total")
        if isinstance(self.place, str):
            return kind(name, self.text, value=attrgetter(self.place)(status) or 0)
        family = kind(name, self.text, labels=[self.label])
        for which, place in self.place.items():
            family.add_metric([which], attrgetter(place)(status))
        return family


_STATE = (
    _State("requests_running", "Requests in progress", "num_running"),
    _State("requests_waiting", "Requests in the queue", "num_waiting"),
    _State("cache_blocks", "Blocks of the K/V cache", "cache.blocks_total"),
    _State("cache_blocks_used", "Blocks of the K/V cache in use", "cache.blocks_used"),
    _State("cache_blocks_idle", "Blocks of the K/V cache kept for reuse", "cache.blocks_idle"),
    _State("state_slots", "Slots of recurrent state", "cache.slots_total"),
    _State("state_slots_used", "Slots of recurrent state in use", "cache.slots_used"),
    _State("state_slots_idle", "Slots of recurrent state kept for reuse", "cache.slots_idle"),
    _State(
        "prefix_hit_tokens_total",
        "Prompt tokens that were found and not read",
        {"memory": "reuse.memory_tokens", "disk": "reuse.disk_tokens"},
        "where",
    ),
    _State("prefix_miss_tokens_total", "Prompt tokens that were not found", "reuse.missed_tokens"),
    _State(
        "prefix_requests_total",
        "Requests by whether some of the prompt was found",
        {"hit": "reuse.num_hits", "miss": "reuse.num_misses"},
        "result",
    ),
    _State(
        "prefix_evictions_total",
        "What was given up for space, in memory",
        {"block": "reuse.num_evicted_blocks", "state": "reuse.num_evicted_states"},
        "what",
    ),
    # Zeros on a server without a folder for its cache.
    _State("disk_cache_writes_total", "Files written to the cache folder", "reuse.num_disk_written"),
    _State("disk_cache_evictions_total", "Files deleted for space", "reuse.num_disk_evicted"),
    _State("disk_cache_damaged_total", "Files found damaged and set aside", "reuse.num_disk_damaged"),
    _State(
        "disk_cache_dropped_total", "Files not written for a slow or failing disk", "reuse.num_disk_dropped"
    ),
    _State("disk_cache_bytes", "Bytes in the cache folder", "reuse.disk_bytes"),
    _State("disk_cache_limit_bytes", "The most bytes there", "reuse.disk_limit_bytes"),
)


# Of each stage of a model that has several: name, help, place in `StageStatus`.
_STAGES = (
    ("stage_up", "Whether the stage is there", "is_up"),
    ("stage_steps_total", "Steps that the stage ran", "num_steps"),
    ("stage_busy_seconds_total", "Seconds that the stage computed", "busy_s"),
    ("stage_waiting_seconds_total", "Seconds that it waited for the stage before it", "waited_s"),
    ("stage_link_seconds_total", "Seconds that it took to hand on what it computed", "link_s"),
    ("stage_restarts_total", "Times that it was lost and came back", "num_restarts"),
)


class _StateCollector(Collector):
    def __init__(self, status: ServiceStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield from (metric.of(self._status) for metric in _STATE)
        for name, text, place in _STAGES if self._status.stages else ():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"penstock_{name}".removesuffix("_total"), text, labels=["stage"])
            for stage in self._status.stages:
                family.add_metric([str(stage.stage)], float(attrgetter(place)(stage)))
            yield family
        if (kernels := self._status.kernels) is not None:
            text = "1, of the kernels that run; where faster ones do not, `slower` says why"
            labels = {name: value or "" for name, value in asdict(kernels).items()}
            family = GaugeMetricFamily("penstock_kernels", text, labels=list(labels))
            family.add_metric(list(labels.values()), 1.0)
            yield family


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds. p95 is the least wait that at least 95 of 100 did not exceed."""

    count: int
    p50: float
    p95: float
    p99: float
    max: float


class LatencyWindow:
    """The last waits: what users feel now, not the mean since the start. Adding one is cheap; they are sorted when
    asked for. Any thread may do either."""

    def __init__(self, size: int = WINDOW) -> None:
        self._lock = threading.Lock()
        self._last: deque[float] = deque(maxlen=size)

    def add(self, seconds: float) -> None:
        with self._lock:
            self._last.append(seconds)

    def percentiles(self) -> Percentiles | None:
        """None before the first wait."""
        with self._lock:
            waits = sorted(self._last)
        if not waits:
            return None
        # The nearest rank in whole numbers: a float's ceiling may be one too many.
        p50, p95, p99 = (waits[-(-percent * len(waits) // 100) - 1] for percent in (50, 95, 99))
        return Percentiles(len(waits), p50, p95, p99, waits[-1])


class StepPace:
    """How long steps take, against how long the fastest of their kind took: about 1 on an idle machine, and more
    where others compute, too. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fastest = StepTimeModel(of_fastest=True)
        self._new: list[StepRecord] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)  # measured and expected seconds
        self._num_judged = 0
        self._num_slow = 0

    def add(self, step: StepRecord) -> None:
        with self._lock:
            self._new.append(step)
            if len(self._new) == JUDGED:
                self._judge()

    @property
    def num_slow(self) -> int:
        with self._lock:
            self._judge()
            return self._num_slow

    @property
    def ratio(self) -> float | None:
        """Of the last steps, measured to expected time; None before enough have run."""
        with self._lock:
            self._judge()
            expected = sum(expected for _, expected in self._recent)
            return sum(measured for measured, _ in self._recent) / expected if expected else None

    def _judge(self) -> None:
        shapes = [step.shape for step in self._new]
        for step, shape in zip(self._new, shapes, strict=True):
            expected = self._fastest.predict(shape) if self._num_judged >= LEAST_STEPS else None
            if expected:
                self._recent.append((step.seconds, expected))
                self._num_slow += step.seconds > SLOW * expected
        for step, shape in zip(self._new, shapes, strict=True):
            self._fastest.record(shape, step.seconds)
        self._num_judged += len(self._new)
        self._new.clear()


class RequestNumbers:
    """Numbers for people, who tell requests apart by them more easily than by ids: 1 is the first that was seen. Any
    thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[RequestId, int] = {}
        self._next = itertools.count(1)

    def of(self, request_id: RequestId) -> int:
        with self._lock:
            if (number := self._numbers.get(request_id)) is None:
                number = self._numbers[request_id] = next(self._next)
                if len(self._numbers) > NUMBERED:
                    del self._numbers[next(iter(self._numbers))]
            return number


class EndedRequests:
    """The requests that ended last: those whose chunks the engine can still explain. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[RequestId, RequestSummary] = {}

    def add(self, summary: RequestSummary) -> None:
        with self._lock:
            self._last[summary.id] = summary
            if len(self._last) > ENDED_EXPLAINED:
                del self._last[next(iter(self._last))]

    def get(self, request_id: RequestId) -> RequestSummary | None:
        with self._lock:
            return self._last.get(request_id)

    def last(self, most: int) -> tuple[RequestSummary, ...]:
        """So many at most, the newest first."""
        with self._lock:
            return tuple(self._last.values())[: -most - 1 : -1]


class _PaceCollector(Collector):
    def __init__(self, pace: StepPace) -> None:
        self._pace = pace

    def collect(self) -> Iterator[Metric]:
        text = "Steps that took much longer than the fastest of their kind"
        yield CounterMetricFamily("penstock_slow_steps", text, value=self._pace.num_slow)
        text = "Seconds of the last steps, to those of the fastest of their kind"
        yield GaugeMetricFamily("penstock_step_time_ratio", text, value=self._pace.ratio or 1.0)


class Telemetry:
    """An observer of a service. `render` gives what it saw, and the service's present state, to Prometheus."""

    def __init__(self) -> None:
        self.first_token = LatencyWindow()
        self.inter_token = LatencyWindow()
        self.ended = EndedRequests()
        self.pace = StepPace()
        self.numbers = RequestNumbers()
        # Its own registry: two services in one process do not mix.
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="penstock", registry=self._registry)
        histogram = partial(Histogram, namespace="penstock", registry=self._registry)
        of_step = partial(histogram, buckets=_STEP_S)
        self._first_token = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_FIRST_TOKEN_S,
        )
        self._inter_token = of_step("inter_token_seconds", "From a token of a request to its next")
        self._chunk_tokens = histogram("chunk_tokens", "Tokens of a prompt's chunk", buckets=_CHUNK_TOKENS)
        self._chunk_seconds = of_step("chunk_seconds", "Seconds of a step that read tokens")
        self._stall_seconds = of_step(
            "decode_stall_seconds", "Seconds of a step that read tokens while a decode waited"
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens read, repeats included")
        self._generated = counter("generated_tokens", "Tokens generated")
        self._preemptions = counter("preemptions", "Times that a request gave cache space up")
        self._shrinks = counter("chunk_shrinks", "Times that memory ran out and chunks were halved")
        self._cancels = counter("cancels", "Requests that were cancelled")
        self._errors = counter("errors", "Requests that ended by an error")
        self._finished = counter("finished_requests", "Requests that ended", ["reason"])
        for outcome in get_args(Outcome):
            self._finished.labels(outcome)  # there from the start, as 0
        self._refused = counter("refused_requests", "Answers that are errors", ["status"])
        for status in _REFUSALS:
            self._refused.labels(str(status))
        self._ignored = counter(
            "ignored_parameters", "Parameters of requests that were not known, and ignored"
        )
        self._registry.register(_PaceCollector(self.pace))

    def on_step(self, record: StepRecord) -> None:
        self.pace.add(record)
        if record.is_repeated:
            return
        for span in record.spans:
            self.numbers.of(span.request_id)
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
        self.numbers.of(summary.id)
        self.ended.add(summary)
        self._finished.labels(summary.outcome).inc()
        if summary.outcome == "cancelled":
            self._cancels.inc()
        elif summary.outcome == "error":
            self._errors.inc()

    def on_refusal(self, status: int) -> None:
        """An answer was an error."""
        self._refused.labels(str(status)).inc()

    def on_ignored(self, count: int) -> None:
        """So many parameters of a request were ignored."""
        self._ignored.inc(count)

    def num_failed(self) -> int:
        """Requests that ended by an error."""
        return self._count("errors")

    def num_tokens(self) -> dict[str, int]:
        """Tokens so far: of prompts that were read, repeats included, and of answers."""
        return {"read": self._count("prompt_tokens"), "generated": self._count("generated_tokens")}

    def refusals(self) -> dict[str, int]:
        """How many answers were errors, by status."""
        (family,) = self._refused.collect()
        counted = {
            one.labels["status"]: int(one.value) for one in family.samples if one.name.endswith("_total")
        }
        return {status: number for status, number in counted.items() if number}

    def _count(self, name: str) -> int:
        return int(self._registry.get_sample_value(f"penstock_{name}_total") or 0)

    def render(self, status: ServiceStatus) -> bytes:
        """The text that Prometheus scrapes, of type `CONTENT_TYPE`."""
        of_status = CollectorRegistry()
        of_status.register(_StateCollector(status))
        return generate_latest(self._registry) + generate_latest(of_status)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(pages: Mapping[str, bytes], refusals: Mapping[str, int]) -> bytes:
    """The metrics of several servers as one text: each number with the label `replica`. Answers that are errors are
    counted by whoever is in front of them, by status."""
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for part in text_string_to_metric_families(page.decode()):
            whole = families.setdefault(part.name, Metric(part.name, part.documentation, part.type))
            whole.samples += [one._replace(labels={**one.labels, "replica": replica}) for one in part.samples]
    name = "penstock_refused_requests"
    text = families[name].documentation if name in families else ""
    families = {each: family for each, family in families.items() if not each.startswith(name)}
    refused = families[name] = CounterMetricFamily(name, text, labels=["status"])
    for status in sorted({*map(str, _REFUSALS), *refusals}):
        refused.add_metric([status], refusals.get(status, 0))
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)
