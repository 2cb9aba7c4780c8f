"""A client that does not read is not waited for: it is hung up on, and its requests end."""

import json
import socket
import time

import pytest

from penstock.engine.llm import LLM
from penstock.frontends.server import connection
from penstock.frontends.server.settings import ServerSettings
from tests.server.running import NAME, Running, running, wait_for

STALL_S = 0.3


def ask(server: Running, path: str, body: dict[str, object]) -> socket.socket:
    """Ask on a socket that has hardly any room for the answer."""
    data = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(30)
    client.connect(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def stream(server: Running, max_tokens: int) -> socket.socket:
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens}
    return ask(server, "/v1/chat/completions", body | {"stream": True, "logprobs": True, "top_logprobs": 20})


def is_hung_up_on(client: socket.socket) -> bool:
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return False


def test_a_stream_that_nobody_reads_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_S", STALL_S)
    with running(llm, ServerSettings(NAME)) as server, stream(server, 5900) as client:
        wait_for(lambda: server.service.status().requests)
        wait_for(lambda: not server.service.status().requests, timeout_s=20)
        cancelled = 'penstock_finished_requests_total{reason="cancelled"} 1.0'
        wait_for(lambda: cancelled in server.ask("GET", "/metrics").body.decode(), timeout_s=5)
        assert is_hung_up_on(client)


def test_an_answer_that_nobody_takes_is_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_S", STALL_S)
    with (
        running(llm, ServerSettings(NAME)) as server,
        ask(server, "/tokenize", {"content": "x" * 3_000_000}) as client,  # more than the system keeps
    ):
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        time.sleep(4 * STALL_S)
        assert is_hung_up_on(client)


def test_one_who_reads_slowly_gets_all_of_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_S", STALL_S)
    with running(llm, ServerSettings(NAME)) as server, stream(server, 400) as client:
        read = b""
        until = time.monotonic() + 6 * STALL_S
        while not read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = client.recv(1 << 13)
            assert part
            read += part
            if time.monotonic() < until:
                time.sleep(STALL_S / 3)
