"""One turn with a latency target or a fixed chunk: streams decode, a prompt arrives, every token is stamped."""

import copy
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

from penstock.bench.serve_gaps import Gap, gaps_of
from penstock.bench.serve_results import Arrival
from penstock.bench.serve_runs import Watch, cache_places, run_burst, submit, wait
from penstock.bench.target_results import ArrivalRun
from penstock.bench.target_workload import SETTLE_TOKENS, Sizing, TargetPrompts, TargetWorkload
from penstock.engine.llm import LLM
from penstock.engine.profile import load_profile
from penstock.engine.service import Service, ServiceConfig
from penstock.measure.growth import MeasurementError
from penstock.plan.policy import ScheduleConfig
from penstock.plan.settings import Resolved
from penstock.plan.step_time import StepTimeModel

_WARM_UP_PROMPT = 64
_WARM_UP_TOKENS = 4


def with_target(llm: LLM, target_ms: int | None) -> LLM:
    """The same weights with this target and no other bound, and with step times that are its own: what others
    measure teaches it nothing, what it measures itself it knows the next time."""
    own = copy.copy(llm)
    target_s = None if target_ms is None else target_ms / 1000
    own.settings = replace(
        llm.settings,
        max_activation=Resolved(None),
        target_itl_s=Resolved(target_s),
        target_ttft_s=Resolved(None),
    )
    profile = load_profile(llm)
    own.times = StepTimeModel(profile.coefficients if profile else None)
    return own


@contextmanager
def serving(llm: LLM, sizing: Sizing, workload: TargetWorkload, prompts: TargetPrompts) -> Iterator[Service]:
    """A service that has run before: what is done once is done."""
    schedule = ScheduleConfig(
        chunk_size=llm.most_chunk if sizing.fixed is None else sizing.fixed,
        max_running=workload.streams + 1,
        grid=llm.chunk.grid,
        auto_chunk=sizing.fixed is None,
    )
    lengths = [workload.stream_prompt + workload.stream_tokens] * workload.streams
    places = cache_places([*lengths, workload.prompt_tokens + 1])
    with Service(llm, ServiceConfig(schedule, cache_tokens=places, reuse=False)) as service:
        run_burst(service, Arrival.AT_ONCE, 0, [prompts.long[:_WARM_UP_PROMPT]] * 2, _WARM_UP_TOKENS)
        yield service


def run_arrival(
    service: Service, sizing: Sizing, round_index: int, prompts: TargetPrompts, workload: TargetWorkload
) -> ArrivalRun:
    """When all streams run, the prompt arrives; when it is read, all is over."""
    gc.collect()
    streams = [
        submit(service, prompt, workload.stream_tokens, Watch(SETTLE_TOKENS)) for prompt in prompts.streams
    ]
    for watch in streams:
        wait(service, watch.settled)
    arrived = time.perf_counter()
    long = submit(service, prompts.long, 1, Watch())
    wait(service, long.ended)
    for watch in streams:
        service.cancel(watch.request_id)
        wait(service, watch.ended)
    if long.error is not None or not long.stamps:
        raise MeasurementError(f"the long prompt failed: {long.error or 'it gave no token'}")
    chunks = service.explain(long.request_id)
    if not chunks:
        raise MeasurementError("nothing is known of the long prompt's chunks")
    first_token_s = long.stamps[0] - arrived
    stamps = [[stamp - arrived for stamp in watch.stamps] for watch in streams]
    return ArrivalRun(
        sizing=sizing,
        round_index=round_index,
        first_token_s=first_token_s,
        first_token=long.token_ids[0],
        decode_gap_s=_decode_gap(stamps),
        gaps=tuple(gap for each in stamps for gap in reading_gaps(each, first_token_s, len(chunks))),
        chunks=chunks,
    )


def reading_gaps(stamps: list[float], first_token_s: float, num_chunks: int) -> list[Gap]:
    """Those that ended with a step which read a chunk. Each such step gave the stream a token, the last of them about
    when the prompt's first token came, a little before it or after: what began then is another step's."""
    gaps = [gap for gap in gaps_of(stamps) if (gap.start_s + gap.end_s) / 2 < first_token_s][-num_chunks:]
    if len(gaps) < num_chunks or stamps[-1] < gaps[-1].end_s:
        raise MeasurementError(
            f"a stream has {len(gaps)} gaps while a prompt was read in {num_chunks} chunks: it ended too early"
        )
    return gaps


def _decode_gap(stamps: list[list[float]]) -> float:
    """The median gap when all streams ran and the prompt had not come."""
    all_run = max(each[0] for each in stamps)
    gaps = [gap for each in stamps for gap in gaps_of(each) if gap.start_s >= all_run and gap.end_s <= 0.0]
    return median(gap.seconds for gap in gaps or [gap for each in stamps for gap in gaps_of(each)])
