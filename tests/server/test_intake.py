"""What comes in is bounded, and does not stop others."""

import http.client
import json
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.engine.llm import LLM
from penstock.frontends.server.settings import ServerSettings
from tests.server.running import NAME, Running, running

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


def test_long_texts_are_tokenized_beside_the_event_loop(server: Running) -> None:
    text = "Every sluice has its hour. " * 150_000  # a second or more of work
    waits: list[float] = []
    done = threading.Event()

    def look() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        while not done.is_set():
            started = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            waits.append(time.perf_counter() - started)
            time.sleep(0.005)

    thread = threading.Thread(target=look)
    thread.start()
    started = time.perf_counter()
    reply = server.ask("POST", "/tokenize", {"content": text})
    seconds = time.perf_counter() - started
    done.set()
    thread.join()
    assert reply.json["count"] == len(text)
    assert max(waits) < seconds / 2


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
