"""One request to a service, from its submission to its first token, and how much of it was in the cache."""

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.bench.cache_workload import CacheWorkload
from penstock.engine.events import Event, Failed, Finished, GenerationRequest, TokenGenerated
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.errors import RequestFailedError


@dataclass(frozen=True)
class Answer:
    """What came back of a prompt."""

    first_token_s: float  # from the submission, which looks on disk, to the first token
    token_ids: tuple[int, ...]
    cached_tokens: int  # of the prompt, that were not read


def open_service(llm: LLM, workload: CacheWorkload, *, keeps: bool) -> Service:
    """With room for a prompt, and for what is kept of others. Without `keeps` it shares and stores nothing."""
    places = 2 * (workload.total_tokens + workload.warm_up_tokens)
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
    """One request, alone. What earlier ones left behind is collected first, outside the time."""
    events: list[Event] = []
    stamps: list[float] = []  # of the tokens
    is_over = threading.Event()

    def listen(event: Event) -> None:
        if isinstance(event, TokenGenerated):
            stamps.append(time.perf_counter())
        events.append(event)
        if isinstance(event, Finished | Failed):
            is_over.set()

    gc.collect()
    started = time.perf_counter()
    service.submit(GenerationRequest(prompt, num_tokens, ignore_eos=True), listen)
    is_over.wait()
    end = events[-1]
    if not isinstance(end, Finished) or len(stamps) != num_tokens:
        why = end.error if isinstance(end, Failed) else f"it gave {len(stamps)} of {num_tokens} tokens"
        raise RequestFailedError(f"a request of the benchmark failed: {why}")
    tokens = tuple(event.token for event in events if isinstance(event, TokenGenerated))
    return Answer(stamps[0] - started, tokens, end.usage.cached_tokens)
