"""One request to a service, from its submission to its first token, and how much of it was in the cache."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.bench.cache_workload import CacheWorkload
from penstock.bench.memory import MeasurementError
from penstock.bench.serve_runs import Watch, cache_places, submit, wait
from penstock.engine.events import Event, Finished
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig


@dataclass(frozen=True)
class Answer:
    """What came back of a prompt."""

    first_token_s: float  # from the submission, which looks on disk, to the first token
    token_ids: tuple[int, ...]
    cached_tokens: int  # of the prompt, that were not read


class _UsageWatch(Watch):
    """A watch that is told how much was in the cache, too."""

    cached_tokens = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.cached_tokens = event.usage.cached_tokens
        super().__call__(event)


def open_service(llm: LLM, workload: CacheWorkload, *, keeps: bool) -> Service:
    """With room for a prompt, and for what is kept of another. Without `keeps` it shares and stores nothing."""
    places = cache_places([workload.total_tokens] * 2 + [workload.warm_up_tokens + workload.answer_tokens])
    return Service(llm, ServiceConfig(cache_tokens=places, reuse=keeps))


@contextmanager
def warm_service(
    llm: LLM, workload: CacheWorkload, warm_up: Sequence[int], *, keeps: bool
) -> Iterator[Service]:
    """The same, after it has run once: what is done once is done."""
    with open_service(llm, workload, keeps=keeps) as service:
        ask(service, warm_up, workload.answer_tokens)
        yield service


def ask(service: Service, prompt: Sequence[int], num_tokens: int) -> Answer:
    """One request, alone."""
    gc.collect()
    watch = _UsageWatch()
    started = time.perf_counter()
    submit(service, prompt, num_tokens, watch)
    wait(service, watch.ended)
    if watch.error is not None or len(watch.token_ids) != num_tokens:
        why = watch.error or f"it gave {len(watch.token_ids)} tokens where {num_tokens} were asked for"
        raise MeasurementError(f"a request of the benchmark failed: {why}")
    return Answer(watch.stamps[0] - started, tuple(watch.token_ids), watch.cached_tokens)
