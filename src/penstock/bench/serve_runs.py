"""One turn of a service: requests go in, and every token is stamped as it comes out."""

import gc
import threading
import time
from collections.abc import Iterable, Sequence
from statistics import median

from penstock.bench.serve_gaps import gaps_of
from penstock.bench.serve_results import Arrival, BurstRun, StallRun
from penstock.bench.serve_workload import SETTLE_TOKENS, Prompts, Variant, Workload
from penstock.cache import BLOCK_TOKENS
from penstock.engine.events import Event, Failed, Finished, GenerationRequest, TokenGenerated
from penstock.engine.service import Service
from penstock.measure.growth import MeasurementError

_POLL_S = 1.0


class Watch:
    """A listener that stamps tokens. `settled` is set with the token of that number, `ended` with the end."""

    def __init__(self, settle_tokens: int = 1) -> None:
        self.stamps: list[float] = []
        self.token_ids: list[int] = []
        self.settled = threading.Event()
        self.ended = threading.Event()
        self.error: str | None = None
        self.request_id = ""
        self._settle_tokens = settle_tokens

    def __call__(self, event: Event) -> None:
        match event:
            case TokenGenerated(token=token):
                self.stamps.append(time.perf_counter())
                self.token_ids.append(token)
                if len(self.stamps) == self._settle_tokens:
                    self.settled.set()
            case Finished(reason=reason):
                self._end(None if reason == "length" else f"it ended with {reason!r}")
            case Failed(error=error):
                self._end(str(error))

    def _end(self, error: str | None) -> None:
        self.error = error
        self.settled.set()
        self.ended.set()


def run_stall(
    service: Service, variant: Variant, round_index: int, prompts: Prompts, workload: Workload
) -> StallRun:
    """Streams decode; when all of them run, the long prompt arrives."""
    gc.collect()
    started = time.perf_counter()
    streams = [
        submit(service, prompt, workload.stream_tokens, Watch(SETTLE_TOKENS)) for prompt in prompts.streams
    ]
    for watch in streams:
        wait(service, watch.settled)
    arrived = time.perf_counter()
    long = submit(service, prompts.long, workload.long_tokens, Watch())
    _finish(service, [*streams, long], [workload.stream_tokens] * len(streams) + [workload.long_tokens])
    if any(watch.stamps[-1] <= arrived for watch in streams):
        raise MeasurementError("a stream ended before the long prompt arrived: give more --stream-tokens")
    return StallRun(
        variant=variant,
        round_index=round_index,
        stream_stamps=tuple(tuple(stamp - arrived for stamp in watch.stamps) for watch in streams),
        first_token_s=long.stamps[0] - arrived,
        first_token=long.token_ids[0],
        seconds=max(watch.stamps[-1] for watch in [*streams, long]) - started,
        num_tokens=workload.stall_total,
    )


def run_burst(
    service: Service,
    arrival: Arrival,
    round_index: int,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
) -> BurstRun:
    """All requests, at once or one after the other."""
    gc.collect()
    started = time.perf_counter()
    if arrival is Arrival.AT_ONCE:
        watches = [submit(service, prompt, num_tokens, Watch()) for prompt in prompts]
        _finish(service, watches, [num_tokens] * len(watches))
    else:
        watches = []
        for prompt in prompts:
            watches.append(submit(service, prompt, num_tokens, Watch()))
            _finish(service, watches[-1:], [num_tokens])
    return BurstRun(
        arrival=arrival,
        strict=service.config.strict,
        round_index=round_index,
        seconds=max(watch.stamps[-1] for watch in watches) - started,
        decode_step_s=_decode_step(arrival, [watch.stamps for watch in watches]),
        token_ids=tuple(tuple(watch.token_ids) for watch in watches),
    )


def _decode_step(arrival: Arrival, stamps: Sequence[Sequence[float]]) -> float:
    """The median gap in which nothing but decodes ran: where requests come at once, those of all of them. Where
    no such time was (few tokens for many prompts), of all gaps."""
    gaps = [gap for each in stamps for gap in gaps_of(each)]
    if arrival is Arrival.AT_ONCE:
        all_read, first_end = max(each[0] for each in stamps), min(each[-1] for each in stamps)
        gaps = [gap for gap in gaps if gap.start_s >= all_read and gap.end_s <= first_end] or gaps
    return median(gap.seconds for gap in gaps)


def submit(service: Service, prompt: Sequence[int], num_tokens: int, watch: Watch) -> Watch:
    """Ask for so many tokens after a prompt, to be told to the watch, which has the request's name from then on."""
    watch.request_id = service.submit(GenerationRequest(prompt, num_tokens, ignore_eos=True), watch)
    return watch


def _finish(service: Service, watches: Sequence[Watch], num_tokens: Sequence[int]) -> None:
    """Wait for the end of all, each with as many tokens as it was to have."""
    for watch, wanted in zip(watches, num_tokens, strict=True):
        wait(service, watch.ended)
        if watch.error is not None or len(watch.token_ids) != wanted:
            why = watch.error or f"it gave {len(watch.token_ids)} tokens where {wanted} were asked for"
            raise MeasurementError(f"a request of the benchmark failed: {why}")


def wait(service: Service, event: threading.Event) -> None:
    """Until it is set, as long as the service lives."""
    while not event.wait(_POLL_S):
        if not service.is_healthy:
            raise MeasurementError("the service's thread has died: nothing could be measured")


def cache_places(lengths: Iterable[int]) -> int:
    """Room in the cache for sequences of these lengths, each in blocks of its own."""
    return sum((-(-length // BLOCK_TOKENS) + 1) * BLOCK_TOKENS for length in lengths)
