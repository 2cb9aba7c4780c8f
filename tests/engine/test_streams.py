"""Events for coroutines: of several requests at once, all of which run or none."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from penstock.engine.events import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    JsonFormat,
    PromptProgress,
    TokenGenerated,
)
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.engine.streams import EventStream
from penstock.errors import PromptError, ServiceClosedError, SettingError
from penstock.plan.progress import Progress
from tests.byte_models import model_of_bytes
from tests.oracle import random_prompt


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(model_of_bytes("llama", tmp_path_factory.mktemp("models") / "llama"), dtype="float32")


@pytest.fixture(scope="module")
def service(llm: LLM) -> Iterator[Service]:
    with Service(llm, ServiceConfig(cache_tokens=4096)) as service:
        yield service


def request_of(length: int, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(random_prompt(length, 256, length), max_tokens, ignore_eos=True)


def test_each_event_comes_with_its_requests_index(llm: LLM, service: Service) -> None:
    async def run() -> list[tuple[int, Event]]:
        async with EventStream(service) as stream:
            stream.submit([request_of(30, 5), request_of(90, 9)])
            assert len(set(stream.ids)) == 2
            return [pair async for pair in stream]

    events = asyncio.run(run())
    for index, (length, max_tokens) in enumerate([(30, 5), (90, 9)]):
        *before, last = [event for of, event in events if of == index]
        assert isinstance(last, Finished)
        assert last.reason == "length"
        tokens = tuple(event.token for event in before if isinstance(event, TokenGenerated))
        # Neither greedy answer has an end in it.
        assert tokens == llm.generate(random_prompt(length, 256, length), max_tokens=max_tokens).token_ids


def test_where_one_cannot_be_run_none_begins(service: Service) -> None:
    async def run() -> list[tuple[int, Event]]:
        stream = EventStream(service)
        with pytest.raises(PromptError):
            stream.submit([request_of(30, 2000), request_of(0, 5)])
        return [pair async for pair in stream]

    assert asyncio.run(run()) == []


def test_one_that_is_refused_takes_the_others_with_it(service: Service) -> None:
    """Where that is known only when the others have begun, as of a schema that cannot be compiled."""
    refused = replace(request_of(30, 5), json_format=JsonFormat({"type": "nonsense"}))

    async def run() -> list[tuple[int, Event]]:
        stream = EventStream(service)
        with pytest.raises(SettingError):
            stream.submit([request_of(30, 2000), refused])
        return [pair async for pair in stream]

    *_, (index, last) = asyncio.run(run())
    assert index == 0
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"


def test_what_is_submitted_after_a_cancel_ends_at_once(service: Service) -> None:
    async def run() -> list[Event]:
        stream = EventStream(service)
        stream.cancel()
        stream.submit([request_of(30, 2000), request_of(40, 2000)])
        return [event async for _, event in stream if not isinstance(event, TokenGenerated)]

    ends = [event.reason for event in asyncio.run(run()) if isinstance(event, Finished)]
    assert ends == ["cancelled", "cancelled"]


def test_leaving_cancels(service: Service) -> None:
    async def run() -> list[Event]:
        async with EventStream(service) as stream:
            stream.submit([request_of(30, 2000)])
        return [event async for _, event in stream]

    *_, last = asyncio.run(run())
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"


def test_a_stream_that_fails_ends_whatever_the_service_does(service: Service) -> None:
    async def run() -> list[Event]:
        stream = EventStream(service)
        stream.fail(ServiceClosedError("over"))
        stream.submit([request_of(30, 2000)])
        events = [event async for _, event in stream]
        stream.cancel()
        return events

    [only] = asyncio.run(run())
    assert isinstance(only, Failed)
    assert str(only.error) == "over"


def test_a_loop_is_woken_once_for_all_that_came_meanwhile(service: Service) -> None:
    """However many streams there are: what each would wake it for is work that the engine's thread waits for."""

    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def run() -> tuple[list[object], list[list[tuple[int, Event]]]]:
        loop = asyncio.get_running_loop()
        loops.append(weakref.ref(loop))
        woken: list[object] = []
        wake = loop.call_soon_threadsafe

        def counted(work: Callable[..., object], *args: object) -> asyncio.Handle:
            woken.append(work)
            return wake(work, *args)

        streams = [EventStream(service) for _ in range(3)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", counted)
            for number in range(4):
                for stream in streams:
                    stream._deliver(number, PromptProgress(Progress(number, 4, 1, 4, 0.0, None)))
            before = list(woken)
            await asyncio.sleep(0)
            streams[0]._deliver(4, Failed(PromptError("the end")))
        found = [[stream._events.get_nowait() for _ in range(4)] for stream in streams]
        await asyncio.sleep(0)
        assert isinstance(streams[0]._events.get_nowait()[1], Failed)
        assert len(woken) == len(before) + 1
        return before, found

    woken, found = asyncio.run(run())
    assert len(woken) == 1
    assert [[index for index, _ in each] for each in found] == [[0, 1, 2, 3]] * 3
    gc.collect()
    assert loops[0]() is None  # nor is a loop kept that is gone


def test_what_comes_after_a_loop_is_closed_is_not_kept(service: Service) -> None:
    async def run() -> EventStream:
        stream = EventStream(service)
        waiting = asyncio.create_task(stream._events.get())
        await asyncio.sleep(0)
        stream._deliver(0, Failed(PromptError("the end")))
        await waiting
        return stream

    stream = asyncio.run(run())
    for number in range(3):
        stream._deliver(number, Failed(PromptError("late")))
    assert not stream._mailbox._items
