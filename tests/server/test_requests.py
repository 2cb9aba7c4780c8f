"""What comes in is bounded, and does not stop others."""

import asyncio
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from penstock.engine.llm import LLM
from penstock.engine.sampler import SamplingParams
from penstock.frontends.server.bodies import GenerationBody
from penstock.frontends.server.errors import ApiError
from penstock.frontends.server.lifecycle import Drain
from penstock.frontends.server.requests import NUM_THREADS, BodyReader
from penstock.frontends.server.settings import ServerSettings
from tests.server.running import NAME, Reply, Running, running, wait_for

LIMIT = 20_000


@pytest.fixture(scope="module")
def small(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerSettings(NAME, max_body_bytes=LIMIT)) as started:
        yield started


def body_of(num_bytes: int) -> bytes:
    body = json.dumps({"model": NAME, "prompt": "x", "max_tokens": 1}).encode()
    return body + b" " * (num_bytes - len(body))


def test_a_body_of_just_the_limit_is_taken(small: Running) -> None:
    assert small.ask("POST", "/v1/completions", body_of(LIMIT)).status == 200


@pytest.mark.parametrize("num_bytes", [LIMIT + 1, 5_000_000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_larger_one_is_refused(small: Running, path: str, num_bytes: int) -> None:
    reply = small.ask("POST", path, body_of(num_bytes))
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    assert str(LIMIT) in reply.error["message"]


@pytest.mark.parametrize(("num_bytes", "status"), [(LIMIT, 200), (LIMIT + 1, 413), (1_000_000, 413)])
def test_pieces_of_unknown_number_are_counted(small: Running, num_bytes: int, status: int) -> None:
    connection = small.connect()
    body = body_of(num_bytes)
    pieces = (body[start : start + 1000] for start in range(0, num_bytes, 1000))
    connection.request("POST", "/v1/completions", pieces, encode_chunked=True)
    assert connection.getresponse().status == status
    connection.close()


def test_a_client_that_goes_while_it_sends_leaves_no_trace(small: Running) -> None:
    connection = small.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b'{"model":')
    connection.close()
    assert small.completion().status == 200
    small.wait_until_idle()


def test_long_texts_are_tokenized_beside_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else is answered between the beginning and the end of it: at least once in a few times, since a thread
    that is to look may have to wait for its turn itself."""
    text = "Every sluice has its hour. " * 150_000  # a second or more of work
    has_begun, has_ended = threading.Event(), threading.Event()
    encode = server.service.llm.tokenizer.encode

    def noted(text: str, *, add_special_tokens: bool) -> list[int]:
        has_begun.set()
        try:
            return encode(text, add_special_tokens=add_special_tokens)
        finally:
            has_ended.set()

    def is_answered_meanwhile() -> bool:
        has_begun.clear()
        has_ended.clear()
        replies: list[Reply] = []
        asked = {"content": text}
        thread = threading.Thread(target=lambda: replies.append(server.ask("POST", "/tokenize", asked)))
        thread.start()
        assert has_begun.wait(60)
        assert server.ask("GET", "/health").status == 200
        is_meanwhile = not has_ended.is_set()
        thread.join()
        assert replies[0].json["count"] == len(text)
        return is_meanwhile

    monkeypatch.setattr(server.service.llm.tokenizer, "encode", noted)
    assert any(is_answered_meanwhile() for _ in range(5))


class Client:
    """A request whose body is there, of a client that goes when it is told."""

    def __init__(self, body: bytes) -> None:
        self._messages = [{"type": "http.request", "body": body, "more_body": False}]
        self.has_gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self.has_gone.wait()
        return {"type": "http.disconnect"}


def large_pieces() -> list[int]:
    """The sizes of what was allocated since tracing began and is still there, as far as it is large."""
    return [trace.size for trace in tracemalloc.take_snapshot().traces if trace.size > 1_000_000]


def test_a_body_whose_client_has_gone_is_never_looked_at() -> None:
    seen: list[bytes] = []
    may_go_on = threading.Event()

    def work(raw: bytes) -> None:
        seen.append(raw[:1])
        may_go_on.wait(30)

    async def run() -> None:
        drain = Drain()
        reader = BodyReader(10, 10_000_000, drain)
        busy = [asyncio.create_task(reader.apply(Client(b"a"), work)) for _ in range(NUM_THREADS)]  # type: ignore[arg-type]
        while len(seen) < NUM_THREADS:
            await asyncio.sleep(0.001)
        tracemalloc.start()
        clients = [Client(bytes([letter]) * 3_000_000) for letter in b"bc"]
        leaving, waiting = (asyncio.create_task(reader.apply(client, work)) for client in clients)  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert len(large_pieces()) == 2
        clients[0].has_gone.set()
        with pytest.raises(ApiError, match="gone"):
            await leaving
        assert len(large_pieces()) == 1  # though the threads are still busy
        drain.finish()
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
        assert not large_pieces()
        may_go_on.set()
        await asyncio.gather(*busy, return_exceptions=True)
        reader.close()

    try:
        asyncio.run(run())
    finally:
        may_go_on.set()
        tracemalloc.stop()
    assert seen == [b"a"] * NUM_THREADS


@pytest.mark.parametrize("streams", [False, True])
def test_nothing_is_kept_of_a_body_while_it_is_answered(server: Running, streams: bool) -> None:
    body = json.dumps({"model": NAME, "prompt": "x", "max_tokens": 5900, "stream": streams}).encode()
    body += b" " * 4_000_000
    connection = server.connect()
    tracemalloc.start()
    try:
        connection.request("POST", "/v1/completions", body)
        wait_for(lambda: any(request.num_generated for request in server.service.status().requests))
        # At once, or a moment later: but not only when it has been answered.
        wait_for(lambda: not large_pieces() or not server.service.status().requests)
        assert server.service.status().requests
    finally:
        tracemalloc.stop()
        connection.close()
    server.wait_until_idle()


def test_a_client_that_goes_while_its_text_is_tokenized_leaves_nothing(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    encode = server.service.llm.tokenizer.encode

    def slow(text: str, *, add_special_tokens: bool) -> list[int]:
        has_begun.set()
        may_go_on.wait(30)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(server.service.llm.tokenizer, "encode", slow)
    connection = server.connect()
    connection.request("POST", "/v1/completions", body_of(200))
    assert has_begun.wait(30)
    connection.close()
    time.sleep(0.2)
    may_go_on.set()
    monkeypatch.undo()
    server.wait_until_idle()
    assert server.completion().status == 200


def test_every_sampling_parameter_of_the_engine_is_one_of_a_body() -> None:
    assert {field.name for field in fields(SamplingParams)} <= set(GenerationBody.model_fields)


def test_tokenize(server: Running, llm: LLM) -> None:
    chat = [{"role": "user", "content": "hello"}]
    for body, expected in (
        ({"content": "hello"}, llm.tokenizer.encode("hello", add_special_tokens=False)),
        ({"content": ""}, []),
        ({"prompt": "hello", "model": NAME}, llm.tokenize("hello", raw=True)),
        ({"content": "hello", "add_special": True}, llm.tokenize("hello", raw=True)),
        ({"messages": chat}, llm.tokenize(chat)),
    ):
        reply = server.ask("POST", "/tokenize", body)
        assert reply.json == {"tokens": expected, "count": len(expected)}
    for wrong in (
        {},
        {"content": "a", "prompt": "b"},
        {"messages": chat, "add_special": True},
        {"content": 3},
    ):
        assert server.ask("POST", "/tokenize", wrong).status == 400
    assert server.ask("POST", "/tokenize", {"content": "a", "model": "b"}).status == 404
