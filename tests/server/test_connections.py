"""Connections that ask for nothing, or for half of something, take nobody's place for long."""

import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from penstock.engine.llm import LLM
from penstock.errors import SettingError
from penstock.frontends.server import connections
from penstock.frontends.server.connections import Connection, Connections, Room
from penstock.frontends.server.settings import ServerSettings
from tests.server.running import NAME, Running, running, wait_for
from tests.server.test_process import Start, start  # noqa: F401

HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
HALF_BODY = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{"model"'
PLACES = 4


@contextmanager
def open_sockets(port: int, number: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        opened = []
        for _ in range(number):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            client.sendall(sent)
            opened.append(client)
        yield opened


@pytest.fixture
def few(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerSettings(NAME, max_connections=PLACES)) as started:
        yield started


def read_all(client: socket.socket) -> bytes:
    read = b""
    while part := client.recv(1 << 16):
        read += part
    return read


@pytest.mark.parametrize("sent", [b"", HALF_HEAD, HALF_BODY], ids=["nothing", "half a head", "half a body"])
def test_silent_clients_give_way(few: Running, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """One more than there are places for is refused politely, as long as the others may be about to speak."""
    monkeypatch.setattr(connections, "_GIVES_WAY_S", 3600.0)
    with open_sockets(few.port, PLACES, sent) as silent:
        reply = few.ask("GET", "/health")
        assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
        assert reply.headers["retry-after"]
        monkeypatch.setattr(connections, "_GIVES_WAY_S", 0.0)
        assert few.ask("GET", "/health").status == 200
        told = read_all(silent[0])
        assert told.startswith(b"HTTP/1.1 408") if sent else told == b""
        assert few.completion().status == 200
    few.wait_until_idle()


def test_a_client_that_is_refused_may_be_gone(
    few: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_GIVES_WAY_S", 3600.0)
    with open_sockets(few.port, PLACES):
        for _ in range(50):
            socket.create_connection(("127.0.0.1", few.port)).close()
        assert few.ask("GET", "/health").status == 503  # after all of them
    assert [record.getMessage() for record in caplog.records] == []


def test_clients_that_are_served_do_not_give_way(few: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_GIVES_WAY_S", 0.0)
    streams = [
        few.client().completions.create(model=NAME, prompt="x", max_tokens=5000, stream=True)
        for _ in range(PLACES)
    ]
    assert few.ask("GET", "/health").status == 503
    for stream in streams:
        assert next(stream).choices
        stream.close()
    wait_for(lambda: few.ask("GET", "/health").status == 200)


@pytest.mark.parametrize(("sent", "told"), [(b"", b""), (HALF_HEAD, b"HTTP/1.1 408")])
def test_a_request_has_to_begin(llm: LLM, monkeypatch: pytest.MonkeyPatch, sent: bytes, told: bytes) -> None:
    monkeypatch.setattr(connections, "BEGIN_S", 0.3)
    monkeypatch.setattr(connections, "_TICK_S", 0.1)
    with running(llm, ServerSettings(NAME)) as server, open_sockets(server.port, 1, sent) as (client,):
        assert read_all(client)[:12] == told
        assert server.completion(max_tokens=500).status == 200


def test_one_that_goes_before_it_is_refused_does_no_harm(
    few: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    admit = Connections.admit

    def late(self: Connections, connection: Connection) -> bool:
        time.sleep(0.1)  # the event loop is held up; meanwhile the client goes
        return admit(self, connection)

    monkeypatch.setattr(connections, "_GIVES_WAY_S", 3600.0)
    with open_sockets(few.port, PLACES):
        wait_for(lambda: few.ask("GET", "/health").status == 503)
        monkeypatch.setattr(Connections, "admit", late)
        for _ in range(3):
            socket.create_connection(("127.0.0.1", few.port)).close()
        assert few.ask("GET", "/health").status == 503
    assert not caplog.records


def test_what_is_no_http_is_a_bad_request(few: Running) -> None:
    with open_sockets(few.port, 1, b"nonsense\r\n\r\n") as (client,):
        told = read_all(client)
    assert told.startswith(b"HTTP/1.1 400")
    assert b'"code": "invalid_http"' in told


def test_who_sends_headers_without_end_sees_why(few: Running) -> None:
    with open_sockets(few.port, 1, HALF_HEAD + b"X-Much: " + b"a" * (1 << 18)) as (client,):
        told = read_all(client)
    assert told.startswith(b"HTTP/1.1 400")
    assert told.count(b"HTTP/1.1 400") == 1
    assert b"64 KiB" in told


def test_there_are_fewer_places_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (100, 256, 1024, 1 << 20):
        monkeypatch.setattr(connections, "_num_descriptors", lambda limit=limit: limit)
        room = Room.of_process()
        assert 1 <= room.max_served <= connections.MAX_CONNECTIONS
        assert room.max_served + room.max_refused + room.backlog + connections._num_open() < limit
        assert Room.of_process(3).max_served == 3
    monkeypatch.setattr(connections, "_num_descriptors", lambda: 256)
    with pytest.raises(SettingError, match=r"max_connections=256 is not accepted: .*give up to"):
        Room.of_process(256)
    monkeypatch.setattr(connections, "_num_descriptors", lambda: 20)
    with pytest.raises(SettingError, match="ulimit -n"):
        Room.of_process()


FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))"


def test_more_idle_connections_than_descriptors_do_no_harm(start: Start) -> None:  # noqa: F811
    process = start(before=FEW_FILES)
    client = process.client()
    port = int((process.url or "").rpartition(":")[2])
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200
    with open_sockets(port, 110):
        time.sleep(connections._GIVES_WAY_S)
        for _ in range(5):
            assert client.completions.create(model=NAME, prompt="x", max_tokens=1).choices
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
    said = "".join(process.said)
    assert "Traceback" not in said
    assert len(said) < 5000
