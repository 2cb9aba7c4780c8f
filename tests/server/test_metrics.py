"""What was observed is what is rendered, and percentiles are those of the last waits."""

import math
import threading
from collections import Counter
from dataclasses import dataclass, fields
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.status import (
    CacheStatus,
    Outcome,
    RequestSummary,
    ReuseStatus,
    ServiceStatus,
    SpanRecord,
    StepRecord,
)
from penstock.frontends.server.metrics import LatencyWindow, Telemetry, merged
from penstock.plan.step import SpanKind

SECONDS = st.floats(0, 500, allow_nan=False)
IDS = st.sampled_from(["a", "b", "c"])
COUNTS = st.integers(0, 10_000)
IDLE = ServiceStatus((), (), CacheStatus(0, 8, 64, 0, 0), 0, 0, 1.0)


@dataclass(frozen=True)
class Token:
    gap_s: float
    is_first: bool


@dataclass(frozen=True)
class Shrink:
    pass


spans = st.builds(
    lambda request_id, kind, start, size: SpanRecord(
        request_id, kind, start, start + (1 if kind is SpanKind.DECODE else size)
    ),
    IDS,
    st.sampled_from(SpanKind),
    COUNTS,
    st.integers(1, 5000),
)
steps = st.builds(
    StepRecord,
    index=COUNTS,
    start_s=SECONDS,
    seconds=SECONDS,
    spans=st.lists(spans, min_size=1, max_size=5).map(tuple),
    num_held_decodes=st.integers(0, 3),
    preempted=st.lists(IDS, max_size=2).map(tuple),
)
summaries = st.builds(
    RequestSummary,
    id=IDS,
    outcome=st.sampled_from(get_args(Outcome)),
    num_prompt_tokens=COUNTS,
    num_generated=COUNTS,
    first_token_s=st.none() | SECONDS,
    seconds=SECONDS,
)
happenings = st.lists(steps | summaries | st.builds(Token, SECONDS, st.booleans()) | st.builds(Shrink))
statuses = st.builds(
    ServiceStatus,
    requests=st.just(()),
    steps=st.just(()),
    cache=st.builds(CacheStatus, COUNTS, COUNTS, st.just(64), COUNTS, COUNTS, COUNTS, COUNTS),
    reuse=st.builds(
        ReuseStatus,
        is_on=st.booleans(),
        **{field.name: COUNTS for field in fields(ReuseStatus) if field.type is int},
        disk_bytes=st.none() | COUNTS,
        disk_limit_bytes=st.none() | COUNTS,
    ),
    num_running=COUNTS,
    num_waiting=COUNTS,
    uptime_s=SECONDS,
)


def samples(telemetry: Telemetry, status: ServiceStatus = IDLE) -> dict[str, float]:
    """All samples by name and labels, such as `penstock_finished_requests_total{stop}`."""
    read = {}
    for family in text_string_to_metric_families(telemetry.render(status).decode()):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            read[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return read


def observe(telemetry: Telemetry, happening: object) -> None:
    match happening:
        case StepRecord():
            telemetry.on_step(happening)
        case RequestSummary():
            telemetry.on_end(happening)
        case Token():
            telemetry.on_token("a", happening.gap_s, is_first=happening.is_first)
        case Shrink():
            telemetry.on_shrink()


@given(happenings)
def test_counts_are_what_was_observed(happened: list[object]) -> None:
    telemetry = Telemetry()
    for happening in happened:
        observe(telemetry, happening)
    read = samples(telemetry)
    records = [one for one in happened if isinstance(one, StepRecord)]
    ends = Counter(one.outcome for one in happened if isinstance(one, RequestSummary))
    tokens = [one for one in happened if isinstance(one, Token)]
    chunks = [span for one in records for span in one.spans if span.kind is SpanKind.CHUNK]
    num_chunk_tokens = sum(span.end - span.start for span in chunks)
    assert read["penstock_prompt_tokens_total"] == num_chunk_tokens
    assert read["penstock_generated_tokens_total"] == len(tokens)
    assert read["penstock_preemptions_total"] == sum(len(one.preempted) for one in records)
    assert read["penstock_chunk_shrinks_total"] == happened.count(Shrink())
    assert read["penstock_cancels_total"] == ends["cancelled"]
    assert read["penstock_errors_total"] == ends["error"]
    for outcome in get_args(Outcome):
        assert read[f"penstock_finished_requests_total{{{outcome}}}"] == ends[outcome]
    observed: dict[str, list[float]] = {
        "time_to_first_token_seconds": [one.gap_s for one in tokens if one.is_first],
        "inter_token_seconds": [one.gap_s for one in tokens if not one.is_first],
        "chunk_tokens": [span.end - span.start for span in chunks],
        "chunk_seconds": [one.seconds for one in records if one.num_chunk_tokens],
        "decode_stall_seconds": [one.seconds for one in records if one.stalls_decodes],
    }
    for name, values in observed.items():
        assert read[f"penstock_{name}_count"] == len(values)
        assert read[f"penstock_{name}_sum"] == pytest.approx(sum(values))
        for edge in bucket_edges(read, name):
            at_most = sum(value <= edge for value in values)
            assert read[f"penstock_{name}_bucket{{{label(edge)}}}"] == at_most


def test_steps_that_take_longer_than_the_fastest_of_their_kind_are_slow() -> None:
    """Of each kind it is known how fast it can be: a machine that is busy for long is not taken for a slow one."""
    random, telemetry = Random(1), Telemetry()

    def run(factor: float, num_steps: int) -> dict[str, float]:
        for index in range(num_steps):
            past = random.randrange(4000)
            size = random.choice([1, 1, 1, 64, 512])
            kind = SpanKind.DECODE if size == 1 else SpanKind.CHUNK
            seconds = (0.004 + 5e-4 * size + (size + 5) * past * 1e-7) * random.uniform(1, 1.15) * factor
            telemetry.on_step(StepRecord(index, 0.0, seconds, (SpanRecord("a", kind, past, past + size),), 0))
        return samples(telemetry)

    read = run(1, 400)
    assert 0.95 < read["penstock_step_time_ratio"] < 1.25
    few = read["penstock_slow_steps_total"]
    assert few < 20  # while kinds were new
    read = run(2.2, 400)
    assert 1.8 < read["penstock_step_time_ratio"] < 2.6
    assert read["penstock_slow_steps_total"] > few + 350
    assert run(1, 400)["penstock_step_time_ratio"] < 1.25
    assert samples(telemetry)["penstock_slow_steps_total"] < read["penstock_slow_steps_total"] + 20


def bucket_edges(read: dict[str, float], name: str) -> list[float]:
    start = f"penstock_{name}_bucket{{"
    edges = [float(key.removeprefix(start).rstrip("}")) for key in read if key.startswith(start)]
    assert edges == sorted(edges)
    assert edges[-1] == math.inf
    return edges


def label(edge: float) -> str:
    return "+Inf" if edge == math.inf else str(edge)


@given(statuses)
def test_gauges_are_the_status(status: ServiceStatus) -> None:
    telemetry = Telemetry()
    samples(telemetry)  # an earlier scrape leaves nothing behind
    read = samples(telemetry, status)
    assert read["penstock_cache_blocks_used"] == status.cache.blocks_used
    assert read["penstock_cache_blocks"] == status.cache.blocks_total
    assert read["penstock_state_slots_used"] == status.cache.slots_used
    assert read["penstock_state_slots"] == status.cache.slots_total
    assert read["penstock_requests_running"] == status.num_running
    assert read["penstock_requests_waiting"] == status.num_waiting
    assert read["penstock_cache_blocks_idle"] == status.cache.blocks_idle
    assert read["penstock_state_slots_idle"] == status.cache.slots_idle
    assert read["penstock_disk_cache_bytes"] == (status.reuse.disk_bytes or 0)
    assert read["penstock_disk_cache_limit_bytes"] == (status.reuse.disk_limit_bytes or 0)


@given(statuses)
def test_what_was_reused_is_the_status(status: ServiceStatus) -> None:
    read, reuse = samples(Telemetry(), status), status.reuse
    assert read["penstock_prefix_hit_tokens_total{memory}"] == reuse.memory_tokens
    assert read["penstock_prefix_hit_tokens_total{disk}"] == reuse.disk_tokens
    assert read["penstock_prefix_miss_tokens_total"] == reuse.missed_tokens
    assert read["penstock_prefix_requests_total{hit}"] == reuse.num_hits
    assert read["penstock_prefix_requests_total{miss}"] == reuse.num_misses
    assert read["penstock_prefix_evictions_total{block}"] == reuse.num_evicted_blocks
    assert read["penstock_prefix_evictions_total{state}"] == reuse.num_evicted_states
    assert read["penstock_disk_cache_writes_total"] == reuse.num_disk_written
    assert read["penstock_disk_cache_evictions_total"] == reuse.num_disk_evicted
    assert read["penstock_disk_cache_damaged_total"] == reuse.num_disk_damaged
    assert read["penstock_disk_cache_dropped_total"] == reuse.num_disk_dropped


def test_two_do_not_mix() -> None:
    one, other = Telemetry(), Telemetry()
    one.on_token("a", 0.1, is_first=True)
    assert samples(one)["penstock_generated_tokens_total"] == 1
    assert samples(other)["penstock_generated_tokens_total"] == 0
    assert REGISTRY.get_sample_value("penstock_generated_tokens_total") is None


@given(st.lists(SECONDS, min_size=1, max_size=200), st.integers(1, 100))
def test_percentiles_are_those_of_the_last_waits(waits: list[float], size: int) -> None:
    window = LatencyWindow(size)
    for wait in waits:
        window.add(wait)
    last = sorted(waits[-size:])
    percentiles = window.percentiles()
    assert percentiles is not None
    assert percentiles.count == len(last)
    assert percentiles.max == last[-1]
    for percent, value in ((50, percentiles.p50), (95, percentiles.p95), (99, percentiles.p99)):
        # The least wait that so many of a hundred did not exceed.
        enough = [wait for wait in last if 100 * sum(one <= wait for one in last) >= percent * len(last)]
        assert value == min(enough)


def test_no_waits_no_percentiles() -> None:
    assert LatencyWindow().percentiles() is None


def test_a_window_may_be_read_while_it_is_written() -> None:
    window, is_over = LatencyWindow(64), threading.Event()

    def write() -> None:
        while not is_over.is_set():
            window.add(1.0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(2000):
            percentiles = window.percentiles()
            assert percentiles is None or (percentiles.p50, percentiles.max) == (1.0, 1.0)
    finally:
        is_over.set()
        writer.join()


def test_metrics_of_several_servers_are_one_text_with_a_label_for_each() -> None:
    pages = {}
    for number, name in enumerate(("one", "two")):
        telemetry = Telemetry()
        for _ in range(number):
            telemetry.on_refusal(400)
            telemetry.on_shrink()
        pages[name] = telemetry.render(IDLE)
    text = merged(pages, {"418": 3}).decode()
    lines = text.splitlines()
    assert 'penstock_chunk_shrinks_total{replica="one"} 0.0' in lines
    assert 'penstock_chunk_shrinks_total{replica="two"} 1.0' in lines
    # Answers pass the one in front, which counts them once.
    assert 'penstock_refused_requests_total{status="418"} 3.0' in lines
    assert 'penstock_refused_requests_total{status="400"} 0.0' in lines
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for alone in text_string_to_metric_families(pages["one"].decode()):
        if not alone.name.startswith("penstock_refused_requests"):
            together = families[alone.name]
            assert (together.type, together.documentation) == (alone.type, alone.documentation)
            assert len(together.samples) == 2 * len(alone.samples)
