"""The connection between a driver and one of its workers: a shared token proves both ends, messages are JSON and raw
bytes of bounded length, beats tell that a peer is alive. Nothing is unpickled."""

import hmac
import json
import queue
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from penstock.errors import PenstockError, SettingError, StageLostError, StageRefusedError

DEFAULT_STAGE_TIMEOUT_S = 10.0
LEAST_TOKEN_CHARACTERS = 16

_MAGIC = b"penstock stage 1"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_HANDSHAKE_S = 5.0  # a stranger's time
_MOST_HANDSHAKES = 16  # at once; the oldest gives way
_WELCOME, _WRONG_TOKEN, _BUSY = b"\0", b"\1", b"\2"

_LENGTHS = struct.Struct("!IQ")  # of the JSON and of the raw bytes; a beat has neither
_MOST_JSON_BYTES = 1 << 20
_MOST_DATA_BYTES = 64 << 20
_PIECE_BYTES = 1 << 16  # taken from a socket at once
_MOST_WAITING = 1024  # messages that nobody has received yet
_BEAT = _LENGTHS.pack(0, 0)
_TIMEOUTS_S = (0.1, 3600.0)
_RETRY_S = 0.1
_MOST_TOKEN_BYTES = 4096


@dataclass(frozen=True)
class Address:
    """Where a worker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, setting: str = "stages") -> Self:
        """`HOST:PORT` or `[IPV6]:PORT`."""
        host, _, port = text.strip().rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else -1
        if not bare or (":" in bare and bare == host) or not 0 <= number < 1 << 16:
            raise SettingError(setting, text, "HOST:PORT, such as 10.0.0.1:7070 or [::1]:7070")
        return cls(bare, number)


def new_token() -> bytes:
    return secrets.token_hex(32).encode()


def read_token(path: Path | str) -> bytes:
    """The token in a file that only its owner can read."""

    def refuse(because: str, accepted: str) -> SettingError:
        return SettingError("token_file", str(path), accepted, because=because)

    file = Path(path)
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise refuse("it is no file", "a file that holds a token")
        if found.st_mode & 0o077:
            raise refuse("others can read or write it", f"it after chmod 600 {path}")
        with file.open("rb") as opened:
            token = opened.read(_MOST_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise refuse(error.strerror or str(error), "a file that holds a token") from None
    advice = "the output of: openssl rand -hex 32"
    if not token:
        raise refuse("it is empty", advice)
    if len(token) > _MOST_TOKEN_BYTES:
        raise refuse(f"it holds more than {_MOST_TOKEN_BYTES} bytes", advice)
    if len(token) < LEAST_TOKEN_CHARACTERS or len(set(token)) < LEAST_TOKEN_CHARACTERS // 2:
        raise refuse(
            f"its token is weak: under {LEAST_TOKEN_CHARACTERS} characters, or few of them differ", advice
        )
    return token


@dataclass(frozen=True)
class Message:
    kind: str
    about: dict[str, Any]
    data: bytearray


class Control:
    """One connection, proved at both ends. Any thread may send; one receives.

    A peer is lost when it closes the connection, sends what is no message, or is silent for `stage_timeout_s`.
    What it sent before can still be received; then `receive` and `send` raise `StageLostError`.
    """

    def __init__(
        self, connected: socket.socket, peer: str, *, stage_timeout_s: float, patience_s: float | None = None
    ) -> None:
        """Takes over a socket whose other end is known: after a handshake, or one end of a pair. A peer that has yet
        to start is given `patience_s` to say anything."""
        self.peer = peer
        self.stage: int | None = None  # for messages; the driver says which
        self.stage_timeout_s = stage_timeout_s
        connected.settimeout(patience_s or stage_timeout_s)
        # The interface by which the peer is reached: data goes the same way.
        self.local_host = "127.0.0.1"
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.local_host = str(connected.getsockname()[0])
        self._socket = connected
        self._arrived = bytearray()  # and not yet read
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._reason: str | None = None  # why the peer is gone, or that this end closed
        self._callbacks: list[Callable[[StageLostError], None]] = []
        self._closed = False
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        for work in (self._read, self._beat):
            threading.Thread(target=work, name=f"stage-{work.__name__[1:]}", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return self._reason is None

    def when_lost(self, callback: Callable[[StageLostError], None]) -> None:
        """Calls back once, on another thread, when the peer is gone; at once if it is. Not after `close`."""
        with self._state:
            if self._reason is None:
                self._callbacks.append(callback)
                return
        if not self._closed:
            callback(self._lost())

    def send(
        self, kind: str, about: Mapping[str, object] | None = None, data: bytes | memoryview = b""
    ) -> None:
        text = json.dumps([kind, about or {}], allow_nan=False).encode()
        raw = memoryview(data).cast("B")
        if len(text) > _MOST_JSON_BYTES or len(raw) > _MOST_DATA_BYTES:
            raise ValueError(f"a message of {len(text)} and {len(raw)} bytes")
        self._send(b"".join((_LENGTHS.pack(len(text), len(raw)), text, raw)))

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises `TimeoutError` where none comes in time, `StageLostError` where none can come."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"{self.peer} sent nothing for {timeout_s} s") from None
        if message is None:
            self._inbox.put(None)  # for the next one who asks
            raise self._lost()
        return message

    def close(self) -> None:
        """Ends the connection: the peer sees it at once. More than once is allowed."""
        with self._state:
            self._closed = True
            self._callbacks.clear()
        self._lose("the connection was closed at this end")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        """Waits until the connection is over, at whichever end."""
        return self._ended.wait(timeout_s)

    def _lost(self) -> StageLostError:
        return StageLostError(self.stage, self.peer, self._reason or "the connection ended")

    def _send(self, message: bytes) -> None:
        with self._sending:
            if self._reason is not None:
                raise self._lost()
            rest = memoryview(message)
            try:
                while rest:  # each piece has the timeout: a slow link is no dead one
                    rest = rest[self._socket.send(rest) :]
                return
            except TimeoutError:
                reason = f"it took nothing for {self.stage_timeout_s:g} s"
            except OSError as error:
                reason = error.strerror or str(error)
        self._lose(reason)
        raise self._lost()

    def _beat(self) -> None:
        with suppress(StageLostError):
            while not self._ended.wait(min(1.0, self.stage_timeout_s / 4)):
                self._send(_BEAT)

    def _read(self) -> None:
        try:
            while True:
                num_json, num_data = _LENGTHS.unpack(self._read_exactly(_LENGTHS.size))
                if self._socket.gettimeout() != self.stage_timeout_s:  # it has started
                    self._socket.settimeout(self.stage_timeout_s)
                if num_json > _MOST_JSON_BYTES or num_data > _MOST_DATA_BYTES:
                    raise ValueError(f"it announced a message of {num_json} and {num_data} bytes")
                if not num_json:
                    if num_data:
                        raise ValueError("it sent bytes without a message")
                    continue
                text, data = self._read_exactly(num_json), self._read_exactly(num_data)
                if self._inbox.qsize() >= _MOST_WAITING:
                    raise ValueError(f"over {_MOST_WAITING} messages of it wait")
                self._inbox.put(_parse(text, data))
        except TimeoutError:
            reason = f"it was silent for {self.stage_timeout_s:g} s"
        except EOFError:
            reason = "it closed the connection"
        except OSError as error:
            reason = error.strerror or str(error)
        except ValueError as error:
            reason = str(error)
        self._lose(reason)
        with self._sending:  # nobody polls this descriptor any more
            self._socket.close()

    def _read_exactly(self, num_bytes: int) -> bytearray:
        while len(self._arrived) < num_bytes:
            if not (piece := self._socket.recv(_PIECE_BYTES)):
                raise EOFError
            self._arrived += piece
        taken = self._arrived[:num_bytes]
        del self._arrived[:num_bytes]
        return taken

    def _lose(self, reason: str) -> None:
        with self._state:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks, self._callbacks = self._callbacks, []
        self._inbox.put(None)
        self._ended.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for callback in callbacks:
            callback(self._lost())


def tell_failure(control: Control, error: Exception) -> str:
    """A worker's: why it ends, to its driver, and to whoever watches it."""
    why = str(error) if isinstance(error, PenstockError) else repr(error)
    with suppress(StageLostError):
        control.send("failed", {"error": why, "kind": type(error).__name__})
    return why


def _parse(text: bytearray, data: bytearray) -> Message:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    match parsed:
        case [str(kind), dict(about)]:
            return Message(kind, about, data)
    raise ValueError("it sent what is no message")


def connect(
    address: Address | str,
    token: bytes,
    *,
    timeout_s: float = DEFAULT_STAGE_TIMEOUT_S,
    stage_timeout_s: float = DEFAULT_STAGE_TIMEOUT_S,
) -> Control:
    """A connection to a worker that listens. One that is not there yet, or serves another driver, is waited for."""
    if isinstance(address, str):
        address = Address.parse(address)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _connect_once(address, token, deadline, stage_timeout_s)
        except (OSError, EOFError, _BusyError) as error:
            if time.monotonic() + _RETRY_S < deadline and not isinstance(error, socket.gaierror):
                time.sleep(_RETRY_S)
                continue
            reason = getattr(error, "strerror", None) or str(error) or "it closed the connection"
            raise StageLostError(None, str(address), reason) from None


class _BusyError(Exception):
    pass


def _connect_once(address: Address, token: bytes, deadline: float, stage_timeout_s: float) -> Control:
    left_s = max(_RETRY_S, deadline - time.monotonic())
    connected = socket.create_connection((address.host, address.port), timeout=left_s)
    try:
        end = time.monotonic() + min(left_s, _HANDSHAKE_S)
        greeting = _read_by(connected, len(_MAGIC) + _NONCE_BYTES, end)
        if greeting[: len(_MAGIC)] != _MAGIC:
            raise StageRefusedError(None, str(address), "it is no worker of this version of Penstock")
        said = secrets.token_bytes(_NONCE_BYTES) + struct.pack("!d", stage_timeout_s)
        connected.sendall(_MAGIC + said + _proof(token, b"driver", greeting, said))
        answer = _read_by(connected, 1 + _MAC_BYTES, end)
        if answer[:1] == _WRONG_TOKEN:
            raise StageRefusedError(None, str(address), "its token is another")
        if not hmac.compare_digest(answer[1:], _proof(token, b"worker" + answer[:1], greeting, said)):
            raise StageRefusedError(None, str(address), "it does not prove that it knows the token")
        if answer[:1] != _WELCOME:
            raise _BusyError("it serves another driver")
        return Control(connected, str(address), stage_timeout_s=stage_timeout_s)
    except BaseException:
        connected.close()
        raise


def _proof(token: bytes, role: bytes, greeting: bytes, said: bytes) -> bytes:
    return hmac.digest(token, b"\0".join((role, greeting, said)), "sha256")


def _read_by(connected: socket.socket, num_bytes: int, end: float) -> bytes:
    """All of `num_bytes` before the time `end`, however slowly they drip."""
    read = b""
    while len(read) < num_bytes:
        connected.settimeout(max(0.001, end - time.monotonic()))
        piece = connected.recv(num_bytes - len(read))
        if not piece:
            raise EOFError
        if time.monotonic() > end:
            raise TimeoutError("timed out")
        read += piece
    return read


class Listener:
    """A worker's side: one driver at a time. Strangers are refused after at most five seconds and a hundred bytes."""

    def __init__(self, address: Address | str, token: bytes) -> None:
        """Binds the one address. A port of 0 takes a free one, see `address`."""
        if isinstance(address, str):
            address = Address.parse(address, "listen")
        self._token = token
        try:
            family, *_, place = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.create_server(place[:2], family=family, backlog=64)
        except OSError as error:
            raise SettingError(
                "listen",
                str(address),
                "an address of this machine and a free port",
                because=error.strerror or str(error),
            ) from None
        self.address = Address(*self._socket.getsockname()[:2])
        self._state = threading.Lock()
        self._handshakes: dict[socket.socket, None] = {}  # oldest first
        self._driver: Control | None = None
        self._closed = False
        self._accepted: queue.SimpleQueue[Control | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="stage-listen", daemon=True).start()

    def accept(self, timeout_s: float | None = None) -> Control:
        """The next driver. Raises `TimeoutError` where none comes in time, `EOFError` after `close`."""
        try:
            control = self._accepted.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no driver came for {timeout_s} s") from None
        if control is None:
            self._accepted.put(None)
            raise EOFError
        return control

    def close(self) -> None:
        """No further driver is let in; the present one stays."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._accepted.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        with self._socket:
            while True:
                try:
                    connected, place = self._socket.accept()
                except OSError:
                    if self._closed:
                        return
                    time.sleep(_RETRY_S)  # one that went before it was met; or no descriptor is free, for now
                    continue
                with self._state:
                    if len(self._handshakes) >= _MOST_HANDSHAKES:
                        with suppress(OSError):
                            next(iter(self._handshakes)).shutdown(socket.SHUT_RDWR)
                    self._handshakes[connected] = None
                peer = str(Address(*place[:2]))
                threading.Thread(target=self._admit, args=(connected, peer), daemon=True).start()

    def _admit(self, connected: socket.socket, peer: str) -> None:
        admitted = False
        try:
            admitted = self._handshake(connected, peer)
        except (OSError, EOFError):
            pass
        finally:
            with self._state:
                del self._handshakes[connected]
            if not admitted:
                connected.close()

    def _handshake(self, connected: socket.socket, peer: str) -> bool:
        end = time.monotonic() + _HANDSHAKE_S
        greeting = _MAGIC + secrets.token_bytes(_NONCE_BYTES)
        connected.settimeout(_HANDSHAKE_S)
        connected.sendall(greeting)
        reply = _read_by(connected, len(_MAGIC) + _NONCE_BYTES + 8 + _MAC_BYTES, end)
        said, proof = reply[len(_MAGIC) : -_MAC_BYTES], reply[-_MAC_BYTES:]
        (stage_timeout_s,) = struct.unpack("!d", said[-8:])
        known = hmac.compare_digest(proof, _proof(self._token, b"driver", greeting, said))
        if not known or reply[: len(_MAGIC)] != _MAGIC:
            connected.sendall(_WRONG_TOKEN + bytes(_MAC_BYTES))
            return False
        if not _TIMEOUTS_S[0] <= stage_timeout_s <= _TIMEOUTS_S[1]:
            return False

        def answer(status: bytes) -> None:
            connected.sendall(status + _proof(self._token, b"worker" + status, greeting, said))

        with self._state:  # a proved peer's answer fits the socket's buffer
            if self._driver is not None and self._driver.is_alive:
                answer(_BUSY)
                return False
            answer(_WELCOME)
            self._driver = Control(connected, peer, stage_timeout_s=stage_timeout_s)
            self._accepted.put(self._driver)
        return True
