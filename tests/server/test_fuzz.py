"""Bodies that were right before chance had them: none is the server's failure, takes long, or much memory."""

import http.client
import json
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.engine.llm import LLM
from penstock.engine.service import ServiceConfig
from penstock.frontends.server import body_reader
from penstock.frontends.server.settings import ServerSettings
from penstock.process_memory import anonymous_bytes, peak_anonymous_bytes, reset_peak
from tests.server.running import NAME, Running, running

LIMIT_S = 10.0
MAX_GROWTH_BYTES = 1 << 30
NUM_BODIES = 150
CHAT: dict[str, Any] = {
    "model": NAME,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "é"}]},
    ],
    "max_tokens": 2,
    "temperature": 0.7,
    "stop": ["a", "b"],
    "logit_bias": {"5": -1.5},
    "logprobs": True,
    "top_logprobs": 2,
    "seed": 3,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
}
COMPLETION: dict[str, Any] = {
    "model": NAME,
    "prompt": ["one", "two"],
    "max_tokens": 2,
    "n": 2,
    "repetition_penalty": 1.1,
    "stream": True,
    "stream_options": {"include_usage": True},
}
TOOL: dict[str, Any] = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "é"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "required",
    "max_tokens": 2,
    "chat_template_kwargs": {"enable_thinking": True},
}
ITEMS: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "é"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
    ],
    "tools": [{"type": "function", **TOOL}],
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "max_output_tokens": 2,
    "stream": True,
}
BLOCKS: dict[str, Any] = {
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        {"role": "user", "content": "é"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
    ],
    "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
    "tool_choice": {"type": "any"},
    "max_tokens": 2,
}
ASKED = (
    ("/v1/chat/completions", TOOL_CHAT),
    ("/v1/chat/completions", {**TOOL_CHAT, "tool_choice": "auto", "stream": True}),
    ("/apply-template", TOOL_CHAT),
    ("/completion", {"prompt": ["a", 1], "n_predict": 2, "n_probs": 2, "logit_bias": [[5, False]]}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}], "n_predict": 2}),
    ("/v1/embeddings", {"input": ["one", [1, 2]], "encoding_format": "base64", "pooling": "last"}),
    ("/v1/responses", ITEMS),
    ("/v1/messages", BLOCKS),
    ("/v1/messages/count_tokens", BLOCKS),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 1, "min_p": 0.1}),
    ("/tokenize", {"content": "a text"}),
    ("/tokenize", {"messages": CHAT["messages"]}),
)
# What stands in the place of something: of no type that is wanted, beyond every range, or very much of it.
STRANGE: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: None,
    lambda rng: rng.choice([True, False, [], {}, "", " ", "\0", "\ufeff", "NaN", "user", "<|im_start|>"]),
    lambda rng: rng.choice([-1, 0, 1, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 10**400]),
    lambda rng: rng.choice([-0.0, 1e-320, 5e-324, 1e-308, 1e308, 2.5, -2.0, 1e-7]),
    lambda rng: "".join(
        chr(rng.choice([65, 233, 0x4E00, 0x1F600, 0x200D, 0xFFFF])) for _ in range(rng.randrange(50))
    ),
    lambda rng: "ab " * rng.choice([1, 1000, 300_000]),
    lambda rng: [0] * rng.choice([1, 100, 100_000]),
    lambda rng: nested(rng.choice([2, 30, 190, 400]), rng.choice(["a", "properties", "items", "anyOf"])),
    lambda rng: {f"k{index}": index for index in range(rng.choice([1, 2000]))},
    lambda rng: {"type": rng.choice(["object", "array", "string"]), "pattern": "(a*)*b", "minItems": 10**6},
)


def nested(depth: int, name: str) -> Any:
    value: Any = 0
    for index in range(depth):
        value = {name: value} if index % 2 else [value]
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in a value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from places(item, (*path, name))


def changed(body: Any, rng: random.Random) -> Any:
    """A copy with something strange in a place, or under another name."""
    copy = json.loads(json.dumps(body))
    *way, last = rng.choice(list(places(copy)))
    at = copy
    for name in way:
        at = at[name]
    if isinstance(at, dict) and rng.random() < 0.2:
        at[rng.choice(["tools", "best_of", "x", "prompt", "messages", last])] = at.pop(last)
    else:
        at[last] = rng.choice(STRANGE)(rng)
    return copy


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The same bytes with some lost, repeated, moved or replaced."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(data) + 1)
        end = min(start + rng.choice([1, 2, 10, 100]), len(data))
        piece = rng.choice(
            [b"", bytes([rng.randrange(256)]), b'"', b"\\u", b"]" * 50, b"\\ud800", data[start:end] * 3]
        )
        data = data[:start] + piece + data[end:]
    return data


def headers_for(data: bytes, rng: random.Random) -> dict[str, str]:
    drawn = rng.random()
    if drawn < 0.8:
        return {}
    return rng.choice(
        [
            {"Content-Encoding": rng.choice(["gzip", "identity", "\xff"])},
            {"Content-Type": rng.choice(["text/plain", "multipart/form-data; boundary=x", "\xff"])},
            {"Transfer-Encoding": "chunked"},  # which it is not
            {"Content-Length": str(len(data) // 2)},
            {"Authorization": "Bearer " + "x" * 10_000},
            {"X-Request-ID": "\xe9" * 300},
            {"Upgrade": "websocket", "Connection": "Upgrade"},
        ]
    )


def ask(server: Running, path: str, data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
    try:
        connection.request("POST", path, data, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    """With a small cache: an answer whose limit was lost takes all the room there is."""
    with running(llm, ServerSettings(NAME), ServiceConfig(cache_tokens=1024)) as started:
        yield started


@pytest.fixture(autouse=True)
def _in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request whose length is wrong, the rest is not waited for as long as usual."""
    monkeypatch.setattr(body_reader, "BODY_GRACE_S", 0.3)


@pytest.mark.parametrize("seed", range(4))
def test_no_body_is_the_servers_failure(server: Running, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    before = anonymous_bytes() or 0
    reset_peak()
    seen: set[int] = set()
    for index in range(NUM_BODIES):
        path, body = rng.choice(ASKED)
        for _ in range(rng.choice([0, 1, 1, 2])):
            body = changed(body, rng)
        data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
        data = damaged(data, rng) if rng.random() < 0.4 else data
        started = time.monotonic()
        try:
            status, answer = ask(server, path, data, headers_for(data, rng))
        except (ConnectionError, http.client.BadStatusLine):
            status, answer = 400, b""  # what is left of a request whose length was wrong is none
        what = f"seed {seed}, body {index}: {path} {data[:300]!r}: {status} {answer[:300]!r}"
        assert status < 500, what
        assert b'"server_error"' not in answer, what
        assert time.monotonic() - started < LIMIT_S, what
        seen.add(status)
    assert {200, 400} <= seen
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert (peak_anonymous_bytes() or 0) - before < MAX_GROWTH_BYTES
    assert server.completion().status == 200
    server.wait_until_idle()


RIGHT = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n" + (
    b'{"content": "ab"}\r\n0\r\n\r\n'
)


def test_no_bytes_are_the_servers_failure(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Whole requests of which bytes are lost or changed: each is answered or hung up on, and the next one served."""
    rng = random.Random(0)
    for _ in range(120):
        data = damaged(RIGHT, rng)
        with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while part := client.recv(1 << 16):
                answer += part
        assert not answer or answer.startswith(b"HTTP/1.1 "), (data, answer)
        assert b" 500 " not in answer[:15], (data, answer)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert server.ask("POST", "/tokenize", {"content": "ab"}).status == 200
