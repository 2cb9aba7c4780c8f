"""Driver and worker prove themselves to each other, messages arrive whole, and whoever is gone is noticed in time."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.stages import control as module
from penstock.engine.stages.control import Address, Control, Listener, connect, new_token, read_token
from penstock.errors import SettingError, StageLostError, StageRefusedError

TOKEN = new_token()
TIMEOUT_S = 0.6


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener("127.0.0.1:0", TOKEN) as opened:
        yield opened


def joined(listener: Listener) -> tuple[Control, Control]:
    driver = connect(listener.address, TOKEN, timeout_s=5, stage_timeout_s=TIMEOUT_S)
    return driver, listener.accept(5)


def pair() -> tuple[Control, socket.socket]:
    """One end of a connection, and the bare socket at the other."""
    ours, theirs = socket.socketpair()
    return Control(ours, "peer", stage_timeout_s=TIMEOUT_S), theirs


def frame(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("!IQ", len(text), len(data)) + text + data


def bare(listener: Listener) -> socket.socket:
    return socket.create_connection((listener.address.host, listener.address.port), timeout=5)


def test_messages_arrive_whole_and_in_order_from_many_threads(listener: Listener) -> None:
    driver, worker = joined(listener)
    payload = bytes(range(256)) * 4000

    def talk(who: int) -> None:
        for turn in range(20):
            driver.send("step", {"who": who, "turn": turn}, payload if turn % 5 == 0 else b"")

    threads = [threading.Thread(target=talk, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {who: [] for who in range(4)}
    for _ in range(80):
        message = worker.receive(5)
        assert message.kind == "step"
        assert message.data == (payload if message.about["turn"] % 5 == 0 else b"")
        seen[message.about["who"]].append(message.about["turn"])
    assert all(turns == list(range(20)) for turns in seen.values())
    driver.close()
    with pytest.raises(StageLostError, match="closed"):
        worker.receive(5)


def test_a_connection_without_messages_lives_on_by_its_beats(listener: Listener) -> None:
    driver, worker = joined(listener)
    with pytest.raises(TimeoutError):
        worker.receive(3 * TIMEOUT_S)
    assert driver.is_alive
    assert worker.is_alive
    driver.send("stop")
    assert worker.receive(5).kind == "stop"
    worker.close()


def test_whoever_is_lost_is_told_of_once_with_a_reason(listener: Listener) -> None:
    driver, worker = joined(listener)
    told: list[StageLostError] = []
    driver.stage = 3
    driver.when_lost(told.append)
    began = time.monotonic()
    worker.send("ready")
    worker.close()
    assert driver.wait_closed(5)
    assert driver.receive().kind == "ready"  # sent before it went
    for _ in range(2):
        with pytest.raises(StageLostError) as raised:
            driver.receive()
    assert (raised.value.stage, raised.value.address) == (3, str(listener.address))
    with pytest.raises(StageLostError):
        driver.send("step")
    late: list[StageLostError] = []
    driver.when_lost(late.append)
    assert len(late) == 1
    while not told:  # by another thread
        assert time.monotonic() < began + 5
        time.sleep(0.01)
    driver.close()
    assert len(told) == 1


def test_silence_is_noticed_within_the_timeout() -> None:
    ours, theirs = pair()
    theirs.sendall(frame(b'["ready", {}]')[:15])  # truncated, and no beat after it
    began = time.monotonic()
    with pytest.raises(StageLostError, match="silent"):
        ours.receive(5)
    assert time.monotonic() - began < TIMEOUT_S + 1
    theirs.close()


def test_a_peer_that_takes_nothing_is_noticed_within_the_timeout() -> None:
    ours, theirs = pair()
    alive = threading.Event()

    def beat() -> None:  # alive, yet it reads nothing
        while not alive.wait(0.1):
            theirs.sendall(bytes(12))

    threading.Thread(target=beat, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(StageLostError, match="took nothing"):
        ours.send("step", {}, bytes(16 << 20))
    assert time.monotonic() - began < TIMEOUT_S + 1
    alive.set()


@pytest.mark.parametrize(
    "sent",
    [
        frame(b"x" * 8)[:4],  # truncated, then closed
        struct.pack("!IQ", (1 << 20) + 1, 0),
        struct.pack("!IQ", 16, (64 << 20) + 1),
        struct.pack("!IQ", 0, 16) + bytes(16),
        frame(b"\x80\x04K\x01."),  # a pickle
        frame(b'{"kind": "stop"}'),
        frame(b'["stop"]'),
        frame(b"[1, {}]"),
        frame(b"[" * 100_000),
        frame(b'["step", {}]') * 1030,  # nobody receives
    ],
)
def test_what_is_no_message_ends_the_connection(sent: bytes) -> None:
    ours, theirs = pair()
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    assert ours.wait_closed(TIMEOUT_S / 2)
    theirs.close()


def test_what_is_too_long_is_not_sent() -> None:
    ours, theirs = pair()
    with pytest.raises(ValueError, match="a message of"):
        ours.send("step", {}, bytes((64 << 20) + 1))
    with pytest.raises(ValueError, match="JSON"):
        ours.send("step", {"x": float("nan")})
    assert ours.is_alive
    ours.close()
    theirs.close()


def test_a_wrong_token_is_refused_on_both_sides(listener: Listener) -> None:
    with pytest.raises(StageRefusedError, match="token"):
        connect(listener.address, new_token(), timeout_s=5)
    # One who answers as a worker does and knows no token.
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def serve() -> None:
            met, _ = fake.accept()
            with met:
                met.sendall(module._MAGIC + bytes(32))
                met.recv(4096)
                met.sendall(b"\0" + bytes(32))
                met.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(StageRefusedError, match="prove"):
            connect(Address(*fake.getsockname()), TOKEN, timeout_s=5)
    driver, worker = joined(listener)  # the true one is let in after all that
    driver.close()
    worker.close()


def test_a_replayed_handshake_is_refused(listener: Listener) -> None:
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def forward() -> None:
            met, _ = relay.accept()
            with met, bare(listener) as real:
                met.sendall(real.recv(4096))
                recorded.extend(met.recv(4096))
                real.sendall(recorded)
                met.sendall(real.recv(33))
                met.recv(4096)

        threading.Thread(target=forward, daemon=True).start()
        driver = connect(Address(*relay.getsockname()), TOKEN, timeout_s=5, stage_timeout_s=TIMEOUT_S)
    worker = listener.accept(5)
    driver.close()
    assert worker.wait_closed(5)
    with bare(listener) as stranger:
        stranger.recv(4096)
        stranger.sendall(recorded)
        assert stranger.recv(1) == module._WRONG_TOKEN
    with pytest.raises(TimeoutError):
        listener.accept(0.1)


def test_strangers_do_not_keep_a_driver_out(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HANDSHAKE_S", 0.5)
    strangers = [bare(listener) for _ in range(3 * module._MOST_HANDSHAKES)]  # they send nothing
    strangers[0].close()
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
    driver, worker = joined(listener)
    for stranger in strangers[2:]:  # each was greeted, then closed
        stranger.settimeout(5)
        while stranger.recv(4096):
            pass
        stranger.close()
    deadline = time.monotonic() + 5
    while listener._handshakes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not listener._handshakes
    assert driver.is_alive
    assert worker.is_alive
    driver.close()


def test_one_driver_at_a_time_and_then_the_next(listener: Listener) -> None:
    driver, worker = joined(listener)
    with pytest.raises(StageLostError, match="another driver"):
        connect(listener.address, TOKEN, timeout_s=0.3)
    threading.Timer(0.3, driver.close).start()
    second = connect(listener.address, TOKEN, timeout_s=5, stage_timeout_s=TIMEOUT_S)  # waits its turn
    assert not worker.is_alive
    third = listener.accept(5)
    third.send("hello")
    assert second.receive(5).kind == "hello"
    second.close()
    listener.close()
    with pytest.raises(EOFError):
        listener.accept(5)


def test_a_worker_that_is_not_there_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address(*taken.getsockname())
        with pytest.raises(SettingError, match="in use"):
            Listener(address, TOKEN)
    with pytest.raises(StageLostError, match="refused"):
        connect(address, TOKEN, timeout_s=0.3)
    opened: list[Listener] = []
    threading.Timer(0.3, lambda: opened.append(Listener(address, TOKEN))).start()
    connect(address, TOKEN, timeout_s=5).close()
    opened[0].close()


def test_a_server_of_another_kind_is_no_worker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"x" * 100), daemon=True).start()
        with pytest.raises((StageRefusedError, StageLostError)):
            connect(Address(*other.getsockname()), TOKEN, timeout_s=1)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":7070", "host:70000", "host:-1", "::1:70", "host:٣", "a:1:2"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(SettingError):
        Address.parse(text)


def test_addresses_are_read_as_they_are_written() -> None:
    for text in ("10.0.0.1:7070", "[::1]:7070", "worker-1:0"):
        assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (b"", 0o600, "empty"),
        (b" \n", 0o600, "empty"),
        (b"secret", 0o600, "weak"),
        (b"a" * 64, 0o600, "weak"),
        (b"x1y2" * 2000, 0o600, "more than"),
        (TOKEN, 0o644, "chmod 600"),
        (TOKEN, 0o620, "chmod 600"),
        (None, 0o600, "No such file"),
    ],
    # Not by their content: a token is another one in each process of the tests.
    ids=["nothing", "blank", "short", "one letter", "long", "others read", "others write", "absent"],
)
def test_a_token_file_that_protects_nothing_is_refused(
    tmp_path: Path, content: bytes | None, mode: int, why: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(SettingError, match=why):
        read_token(path)


def test_a_token_is_read_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o600)
    assert read_token(path) == TOKEN
    with pytest.raises(SettingError, match="no file"):
        read_token(tmp_path)
