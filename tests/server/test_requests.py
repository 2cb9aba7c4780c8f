"""What comes in is bounded, and does not stop others."""

import asyncio
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from starlette.datastructures import Headers

from penstock.engine.llm import LLM
from penstock.engine.sampler import SamplingParams
from penstock.engine.service import ServiceConfig
from penstock.frontends.server import body_reader
from penstock.frontends.server.bodies import GenerationBody
from penstock.frontends.server.body_reader import BodyReader
from penstock.frontends.server.errors import ApiError
from penstock.frontends.server.lifecycle import Drain
from penstock.frontends.server.settings import ServerSettings
from penstock.plan.policy import ScheduleConfig
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
        self.headers = Headers()

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
        busy = [asyncio.create_task(reader.apply(Client(b"a" * 10**5), work))]  # type: ignore[arg-type]
        while not seen:
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
    assert seen == [b"a"]


def begin_body(server: Running, num_bytes: int, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {num_bytes}\r\n\r\n"
    client.sendall(head.encode() + sent)
    return client


def status_of(client: socket.socket) -> int:
    with client:
        return int(client.recv(1000).split()[1])


def test_bodies_that_do_not_come_take_nobodys_place(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more are half sent than may wait for a thread. They are given up soon; one that comes is not."""
    monkeypatch.setattr(body_reader, "BODY_GRACE_S", 1.0)
    monkeypatch.setattr(body_reader, "LEAST_RATE", 100)
    config = ServiceConfig(ScheduleConfig(max_running=2, max_waiting=2), cache_tokens=2000)
    with running(llm, ServerSettings(NAME), config) as server:
        halves = [begin_body(server, 500, b"{") for _ in range(12)]
        slow = begin_body(server, 500, b" " * 200)
        assert server.completion().status == 200
        assert {status_of(half) for half in halves} == {408}
        slow.sendall(body_of(300))
        assert status_of(slow) == 200


def test_where_bodies_take_too_much_the_slowest_gives_way(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "_MOST_LARGEST", 4)
    with running(llm, ServerSettings(NAME, max_body_bytes=10_000)) as server:
        slowest = begin_body(server, 10_000, b" " * 100)
        others = [begin_body(server, 10_000, b" " * 9_900) for _ in range(4)]
        wait_for(lambda: server.completion().status == 200)
        others.append(begin_body(server, 10_000, b" " * 9_900))
        assert status_of(slowest) == 429
        assert status_of(others[0]) == 429  # of the rest, the one that began first
        assert server.completion().status == 200
        for other in others:
            other.close()


def test_short_bodies_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    may_go_on = threading.Event()

    def work(raw: bytes) -> None:
        may_go_on.wait(30)
        done.append(len(raw))

    async def run() -> None:
        reader = BodyReader(10, 10_000_000, Drain())
        sizes = (900_000, 800_000, 300_000, 100_000, 200_000)
        long = [asyncio.create_task(reader.apply(Client(b"x" * size), work)) for size in sizes]  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        short = asyncio.create_task(reader.apply(Client(b"x"), lambda raw: len(raw)))  # type: ignore[arg-type]
        assert await asyncio.wait_for(short, 30) == 1
        may_go_on.set()
        await asyncio.gather(*long)
        reader.close()

    asyncio.run(run())
    assert done == [900_000, 100_000, 200_000, 300_000, 800_000]


def test_a_text_that_is_far_too_long_is_not_tokenized(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = server.service.llm.tokenizer.encode

    def noted(text: str, *, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(server.service.llm.tokenizer, "encode", noted)
    for reply in (
        server.completion(prompt="sluice " * 1_000_000),
        server.chat(messages=[{"role": "user", "content": "sluice " * 1_000_000}]),
    ):
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert sum(lengths) < 200_000


@pytest.mark.parametrize("num_bytes", [100 << 20])
def test_a_body_that_is_far_too_large_is_told_so(small: Running, num_bytes: int) -> None:
    connection = small.connect()
    pieces = (bytes(1 << 20) for _ in range(num_bytes >> 20))
    connection.request("POST", "/v1/completions", pieces, {"Content-Length": str(num_bytes)})
    assert connection.getresponse().status == 413
    connection.close()


def test_who_asks_before_sending_too_much_is_told_at_once(small: Running) -> None:
    connection = small.connect()
    connection.request(
        "POST", "/v1/completions", headers={"Content-Length": "99999", "Expect": "100-continue"}
    )
    assert connection.getresponse().status == 413
    connection.close()


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
    names = {field.name for field in fields(SamplingParams)} - {"bad_sequences"} | {
        "bad_words"
    }  # as tokens, as text
    assert names <= set(GenerationBody.model_fields)


def test_tokenize(server: Running, strict: Running, llm: LLM) -> None:
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
    assert strict.ask("POST", "/tokenize", {"content": "a", "model": "b"}).status == 404
