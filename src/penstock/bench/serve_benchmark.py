"""From settings to results of serving: services that differ in one setting take turns on one model."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.bench.serve_results import Arrival, BurstRun, ServeResults, ServeSettings, StallRun
from penstock.bench.serve_runs import cache_places, run_burst, run_stall
from penstock.bench.serve_workload import Prompts, Variant, make_prompts, rounds_of
from penstock.bench.timing import rounds
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.measure.machine import this_machine
from penstock.plan.policy import ScheduleConfig

Say = Callable[[str], None]

_WARM_UP_PROMPT = 64
_WARM_UP_TOKENS = 4
# How requests come, and whether decodes are strict. One after the other takes longest: strict, it is there for its
# tokens, and runs once unless all is asked for.
_BURSTS = (
    (Arrival.AT_ONCE, False),
    (Arrival.IN_TURN, False),
    (Arrival.AT_ONCE, True),
    (Arrival.IN_TURN, True),
)
_REPEATS = 3


def run_serve_benchmark(llm: LLM, settings: ServeSettings, say: Say) -> ServeResults:
    """Measure what the settings ask for. `say` is told what goes on."""
    started = time.perf_counter()
    machine = this_machine()
    settings.workload.require_context(llm.context_length)
    prompts = make_prompts(llm.tokenizer, settings.workload)
    stalls = _run_stalls(llm, settings, prompts, say)
    bursts = _run_bursts(llm, settings, prompts, say)
    return ServeResults(
        machine=machine,
        settings=settings,
        same_bits=llm.probe.same_bits,
        stalls=tuple(stalls),
        bursts=tuple(bursts),
        duration_s=time.perf_counter() - started,
    )


def _run_stalls(llm: LLM, settings: ServeSettings, prompts: Prompts, say: Say) -> list[StallRun]:
    workload, counts = settings.workload, rounds_of(settings.repeats, full=settings.full)
    running = workload.streams + 1
    lengths = [workload.stream_prompt + workload.stream_tokens] * workload.streams
    places = cache_places([*lengths, workload.long_prompt + workload.long_tokens])
    runs: list[StallRun] = []
    for index, order in enumerate(rounds(list(Variant), max(counts.values()))):
        for variant in order:
            if index >= counts[variant]:
                continue
            schedule = variant.schedule(workload.stall_chunk, running)
            with _service(llm, schedule, places, prompts) as service:
                run = run_stall(service, variant, index, prompts, workload)
            runs.append(run)
            say(
                f"{workload.long_prompt:,} tokens beside {workload.streams} streams, round {index + 1} of "
                f"{counts[variant]}: {variant.label(workload.stall_chunk)}: longest stall "
                f"{run.longest_gap.seconds:.3f} s, all done in {run.seconds:.1f} s"
            )
    return runs


def _run_bursts(llm: LLM, settings: ServeSettings, prompts: Prompts, say: Say) -> list[BurstRun]:
    workload = settings.workload
    schedule = Variant.MIXED.schedule(workload.chunk, workload.requests)
    places = cache_places([workload.request_prompt + workload.request_tokens] * workload.requests)
    num_rounds = settings.repeats or _REPEATS
    runs: list[BurstRun] = []
    for index, order in enumerate(rounds(_BURSTS, num_rounds)):
        for arrival, strict in order:
            if arrival is Arrival.IN_TURN and strict and index > 0 and not settings.full:
                continue
            with _service(llm, schedule, places, prompts, strict=strict) as service:
                run = run_burst(service, arrival, index, prompts.requests, workload.request_tokens)
            runs.append(run)
            say(
                f"{workload.requests} requests, round {index + 1} of {num_rounds}: {arrival.value}"
                f"{', strict' if strict else ''}: {run.seconds:.1f} s, "
                f"a decode step {1000 * run.decode_step_s:.1f} ms"
            )
    return runs


@contextmanager
def _service(
    llm: LLM, schedule: ScheduleConfig, places: int, prompts: Prompts, *, strict: bool = False
) -> Iterator[Service]:
    """A service that has run before: what is done once is done. There is one at a time: the worker threads of an idle
    one would slow the other's down."""
    with Service(llm, ServiceConfig(schedule, cache_tokens=places, strict=strict, reuse=False)) as service:
        warm_up = [prompts.long[:_WARM_UP_PROMPT]] * min(2, schedule.max_running)
        run_burst(service, Arrival.AT_ONCE, 0, warm_up, _WARM_UP_TOKENS)
        yield service
