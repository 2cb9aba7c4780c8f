"""A client that does not read is not waited for: it is hung up on, and its requests end."""

import asyncio
import json
import select
import socket
import time
from dataclasses import replace

import pytest

from penstock.engine.llm import LLM
from penstock.engine.service import ServiceConfig
from penstock.frontends.server import connections
from penstock.frontends.server.settings import ServerSettings
from penstock.plan.policy import ScheduleConfig
from tests.server.running import NAME, Running, running, wait_for

STALL_S = 0.3
STALLED = ServerSettings(NAME, stalled_s=STALL_S)


def ask(
    server: Running, path: str, body: dict[str, object], buffer_bytes: int | None = 4096
) -> socket.socket:
    """Ask on a socket that has hardly any room for the answer, unless it has more."""
    data = json.dumps(body).encode()
    client = socket.socket()
    if buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.settimeout(60)
    client.connect(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def stream(
    server: Running, max_tokens: int, top_logprobs: int = 20, buffer_bytes: int | None = 4096
) -> socket.socket:
    body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens}
    return ask(
        server,
        "/v1/chat/completions",
        body | {"stream": True, "logprobs": True, "top_logprobs": top_logprobs},
        buffer_bytes,
    )


def is_hung_up_on(client: socket.socket) -> bool:
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return False


def test_a_stream_that_nobody_reads_ends(llm: LLM) -> None:
    with running(llm, STALLED) as server, stream(server, 5900) as client:
        cancelled = 'penstock_finished_requests_total{reason="cancelled"} 1.0'
        wait_for(lambda: cancelled in server.ask("GET", "/metrics").body.decode())
        assert not server.service.status().requests
        assert is_hung_up_on(client)


def test_an_answer_that_nobody_takes_is_given_up(llm: LLM) -> None:
    with (
        running(llm, STALLED) as server,
        ask(server, "/tokenize", {"content": "x" * 3_000_000}) as client,  # more than the system keeps
    ):
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        hanging_up = select.poll()
        hanging_up.register(client, 0)
        assert hanging_up.poll(60_000)  # though nothing more was read
        assert is_hung_up_on(client)


def test_one_who_reads_slowly_gets_all_of_it(llm: LLM) -> None:
    """Where the reader itself was kept waiting for longer than is allowed, it says nothing: more is allowed then."""
    for stall_s in (STALL_S, 4 * STALL_S, 16 * STALL_S):
        with running(llm, replace(STALLED, stalled_s=stall_s)) as server, stream(server, 400) as client:
            if reads_slowly(client, stall_s):
                return
    pytest.fail("one who reads slowly is hung up on")


@pytest.mark.parametrize("buffer_bytes", [4096, None], ids=["little room", "all the room there is"])
def test_what_systems_take_is_not_what_the_client_takes(llm: LLM, buffer_bytes: int | None) -> None:
    """Where this system, or the client's, has room for all of an answer that nobody reads, its request ends all the
    same, and whoever waits for its place gets it."""
    schedule = ScheduleConfig(max_running=2, chunk_size=64)
    with running(llm, STALLED, ServiceConfig(schedule, cache_tokens=20_000)) as server:
        unread = [stream(server, 5900, top_logprobs=0, buffer_bytes=buffer_bytes) for _ in range(2)]
        wait_for(lambda: server.service.status().num_running == 2)
        assert server.completion(max_tokens=1).status == 200
        wait_for(lambda: not server.service.status().requests)
        assert all(map(is_hung_up_on, unread))
        for client in unread:
            client.close()
        generated = "penstock_generated_tokens_total "
        metrics = server.ask("GET", "/metrics").body.decode()
        (line,) = (line for line in metrics.splitlines() if line.startswith(generated))
        assert float(line.removeprefix(generated)) < 5900


def test_sixteen_who_read_nothing_stop_another_no_longer_than_that(llm: LLM) -> None:
    """All places are theirs, until they have had their time; a machine that is busy has some more."""
    stall_s, others_s = 2.0, 4.0
    service = ServiceConfig(ScheduleConfig(max_running=16, chunk_size=64), cache_tokens=110_000)
    with running(llm, replace(STALLED, stalled_s=stall_s), service) as server:
        unread = [stream(server, 5900, top_logprobs=0, buffer_bytes=None) for _ in range(16)]
        wait_for(lambda: server.service.status().num_running == 16)
        began = time.monotonic()
        assert server.completion(max_tokens=1).status == 200
        assert time.monotonic() - began < stall_s + others_s
        wait_for(lambda: not server.service.status().requests)
        assert all(map(is_hung_up_on, unread))
        for client in unread:
            client.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_a_program_of_this_machine_has_not_read_is_known(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as client,
        listener.accept()[0] as served,
    ):
        ends = (
            connections._written(client.getsockname()[:2]),
            connections._written(listener.getsockname()[:2]),
        )
        served.sendall(b"x" * 5000)
        wait_for(lambda: connections._unread_here().get(ends) == 5000)
        client.recv(1000)
        assert connections._unread_here().get(ends) == 4000


@pytest.mark.parametrize("tells", [True, False], ids=["the system tells", "it does not"])
def test_one_who_takes_a_long_answer_slowly_gets_all_of_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    """Looked at again and again, each time when some more of it was taken, however long that has taken."""
    made: list[connections.Connection] = []
    connection_made = connections.Connection.connection_made

    def noted(self: connections.Connection, transport: asyncio.Transport) -> None:
        made.append(self)
        connection_made(self, transport)

    monkeypatch.setattr(connections.Connection, "connection_made", noted)
    monkeypatch.setattr(connections, "_TICK_S", 3600.0)
    if not tells:
        monkeypatch.delattr(socket, "TCP_INFO")
    with (
        running(llm, replace(STALLED, stalled_s=3600.0)) as server,
        ask(server, "/tokenize", {"content": "x" * 3_000_000}) as client,
    ):
        read = client.recv(100)
        (held,) = made
        time_s = time.monotonic()
        for _ in range(3):
            while not asyncio.run_coroutine_threadsafe(has_moved(held), held.loop).result(60):
                read += client.recv(1 << 16)
            time_s += 3000
            assert asyncio.run_coroutine_threadsafe(look_at(held, time_s), held.loop).result(60)
        head, _, content = read.partition(b"\r\n\r\n")
        (length,) = (int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
        while len(content) < length:
            content += client.recv(1 << 16)
    assert json.loads(content)["count"] == 3_000_000


async def has_moved(held: connections.Connection) -> bool:
    return held.acknowledged()[0] - held._num_taken >= connections._MOVED_BYTES


async def look_at(held: connections.Connection, now: float) -> bool:
    """Whether it is still held."""
    held.look(now, *held.acknowledged())
    return not held.transport.is_closing()


def reads_slowly(client: socket.socket, stall_s: float) -> bool:
    """Whether all came, to one who takes a while for each piece, and longer than the limit for all of them."""
    read = b""
    until = time.monotonic() + 6 * stall_s
    try:
        while not read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = client.recv(1 << 13)
            assert part
            read += part
            if time.monotonic() < until:
                time.sleep(stall_s / 3)
    except ConnectionResetError:
        return False
    return True
