"""The clients of a soak: they ask, compare, leave midway, send nonsense and hang up; some read slowly, one is well
behaved, and one holds connections that come to nothing."""

import http.client
import json
import math
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.server.soak_cases import CHAT, Answer, Case, Refusal

# What a client does next: asks and reads on to the end, perhaps slowly, leaves on the way, sends something wrong, or
# half of it.
ACTS = {"ask": 50, "slow": 5, "leave": 33, "refused": 8, "half": 4}
# What is held open to no end: a connection, a part of a request, an answer that nobody reads.
HELD = ("idle", "half", "unread")
# The longest that a slow reader waits between two events.
_SLOW_S = 0.005
LEAVES = ("at once", "waiting", "in prompt", "in answer")
# Log-probabilities of a service that is not strict differ by rounding.
_LOGPROB_ERROR = 1e-3
# How long a client waits that was told to try again.
_RETRY_S = (0.05, 0.5)
# Failures that are told; more of them say nothing new.
_MOST_FAILURES = 12


class Tally:
    """What the clients saw, from all their threads. The first failure ends the load."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first_token_s: list[float] = []
        self.failures: list[str] = []
        self.has_failed = threading.Event()
        self._lock = threading.Lock()

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.counts[what] += number

    def wait(self, seconds: float) -> None:
        with self._lock:
            self.first_token_s.append(seconds)

    def fail(self, what: str) -> None:
        with self._lock:
            if len(self.failures) < _MOST_FAILURES:
                self.failures.append(what)
        self.has_failed.set()


@dataclass(frozen=True)
class Traffic:
    """What clients draw from, and what they hold the server to."""

    cases: Sequence[Case]
    refusals: Sequence[Refusal]
    limit_s: float  # the longest that a client may have to wait for an answer's end
    is_exact: bool  # log-probabilities are the same bits
    patience_s: float = 60.0  # the longest that a well-behaved client may have to wait, whatever others do


class WrongError(Exception):
    """Something that a server must not do."""


@dataclass(eq=False)
class Client:
    """One client, in a thread of its own."""

    port: int
    traffic: Traffic
    tally: Tally
    rng: random.Random
    key: str
    _connection: http.client.HTTPConnection | None = field(default=None, init=False)
    _deadline: float = field(default=math.inf, init=False)
    _pause_s: float = field(default=0.0, init=False)  # before each event that it reads

    def run(self, is_over: threading.Event) -> None:
        acts, weights = list(ACTS), list(ACTS.values())
        while not (is_over.is_set() or self.tally.has_failed.is_set()):
            (act,) = self.rng.choices(acts, weights)
            try:
                match act:
                    case "ask":
                        self._ask(self.rng.choice(self.traffic.cases), is_over)
                    case "slow":
                        self._pause_s = self.rng.uniform(0, _SLOW_S)
                        self._ask(self.rng.choice(self.traffic.cases), is_over, streams=True)
                        self.tally.count("read slowly")
                        self._pause_s = 0.0
                    case "leave":
                        self._leave(self.rng.choice(self.traffic.cases), self.rng.choice(LEAVES))
                    case "refused":
                        self._be_refused(self.rng.choice(self.traffic.refusals))
                    case "half":
                        self._send_half(self.rng.choice(self.traffic.cases))
            except WrongError as error:
                self.tally.fail(f"{act}: {error}")
            except TimeoutError:
                self.tally.fail(f"{act}: a client waited for longer than {self.traffic.limit_s:g} s")
            except Exception as error:
                self.tally.fail(f"{act}: {type(error).__name__}: {error}")
        self._hang_up()

    def serve_well(self, is_over: threading.Event) -> None:
        """Ask on and on, one at a time, as one who wants an answer does; each has to come within `patience_s`."""
        while not (is_over.is_set() or self.tally.has_failed.is_set()):
            started = time.monotonic()
            try:
                self._ask(
                    min(self.traffic.cases, key=lambda case: case.num_prompt + case.num_answer), is_over
                )
            except Exception as error:
                self.tally.fail(f"a well-behaved client: {type(error).__name__}: {error}")
            waited_s = time.monotonic() - started
            if waited_s > self.traffic.patience_s:
                self.tally.fail(f"a well-behaved client waited for {waited_s:.1f} s")
            self.tally.count("served well")
            is_over.wait(0.1)
        self._hang_up()

    def _ask(self, case: Case, is_over: threading.Event, *, streams: bool = False) -> None:
        body = dict(case.body)
        if streams := streams or self.rng.random() < 0.6:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            body["return_progress"] = self.rng.random() < 0.5
        while not is_over.is_set():
            started = time.monotonic()
            response = self._send(case.path, body)
            if response.status != 200:
                self._expect(response, 429)
                continue
            answers, usage = self._read_stream(response, started) if streams else _read_whole(response)
            _compare(case, answers, usage, is_exact=self.traffic.is_exact)
            self.tally.count("answers compared")
            self.tally.count(f"of kind {case.kind}")
            if self.rng.random() < 0.5:
                self._hang_up()
            return

    def _leave(self, case: Case, when: str) -> None:
        body = dict(case.body)
        if when.startswith("in "):
            body |= {"stream": True, "return_progress": True}
        if when in ("at once", "waiting"):
            self._send_only(case.path, body)
            time.sleep(self.rng.uniform(0, 0.4) if when == "waiting" else 0)
            self.tally.count(f"left {when}")
            self._hang_up(by_reset=self.rng.random() < 0.5)
            return
        response = self._send(case.path, body)
        if response.status != 200:
            self._expect(response, 429)
            return
        num_pieces = self.rng.randint(1, 8)
        for event in self._events(response):
            choice = (event.get("choices") or [{}])[0]
            if when == "in prompt" and "prompt_progress" in event:
                progress = event["prompt_progress"]
                if progress["processed"] < progress["total"]:
                    self.tally.count("left in prompt")
                    break
            elif choice.get("text") or choice.get("delta", {}).get("content"):
                num_pieces -= 1
                if num_pieces == 0:
                    self.tally.count("left in answer")
                    break
        self._hang_up(by_reset=self.rng.random() < 0.5)

    def _be_refused(self, refusal: Refusal) -> None:
        response = self._send(refusal.path, refusal.body)
        if response.status == 429:
            self._expect(response, 429)
            return
        self._expect(response, refusal.status)
        self.tally.count("refused")

    def _send_half(self, case: Case) -> None:
        body = json.dumps(case.body).encode()
        data = _head(case, len(body), self.key) + body
        with socket.create_connection(("127.0.0.1", self.port), self.traffic.limit_s) as raw:
            raw.sendall(data[: self.rng.randrange(1, len(data))])
            time.sleep(self.rng.uniform(0, 0.2))
            if self.rng.random() < 0.5:
                _reset_on_close(raw)
        self.tally.count("half sent")

    def _send(self, path: str, body: Any) -> http.client.HTTPResponse:
        """The head of the answer."""
        is_used = self._connection is not None
        try:
            response = self._send_only(path, body).getresponse()
        except ConnectionError:
            if not is_used:
                raise
            self._hang_up()
            response = self._send_only(path, body).getresponse()
        if response.status == 503:  # too many are connected
            self._expect(response, 503)
            return self._send(path, body)
        if response.status >= 500:
            raise WrongError(f"{path} was answered with {response.status}: {response.read()[:300]!r}")
        return response

    def _send_only(self, path: str, body: Any) -> http.client.HTTPConnection:
        """A server may close a connection that nobody used for a while, just when it is used again: then it is asked
        on a new one."""
        is_used = self._connection is not None
        try:
            return self._try_to_send(path, body)
        except ConnectionError:
            if not is_used:
                raise
            self._hang_up()
            return self._try_to_send(path, body)

    def _try_to_send(self, path: str, body: Any) -> http.client.HTTPConnection:
        self.tally.count("requests")
        if self._connection is None:
            self._connection = http.client.HTTPConnection(
                "127.0.0.1", self.port, timeout=self.traffic.limit_s
            )
        self._deadline = time.monotonic() + self.traffic.limit_s
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        self._connection.request("POST", path, data, headers)
        return self._connection

    def _expect(self, response: http.client.HTTPResponse, status: int) -> None:
        """An error of this status, in its shape; the connection is left as the server wants it."""
        content = response.read()
        if response.status != status:
            raise WrongError(f"{response.status} instead of {status}: {content[:300]!r}")
        error = json.loads(content)["error"]
        if not error["message"]:
            raise WrongError(f"{status} without a message")
        if response.will_close:
            self._hang_up()
        if status in (429, 503):
            self.tally.count(f"{status}s")
            if not response.getheader("Retry-After"):
                raise WrongError(f"{status} without Retry-After")
            time.sleep(self.rng.uniform(*_RETRY_S))

    def _hang_up(self, *, by_reset: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if by_reset and connection.sock is not None:
            _reset_on_close(connection.sock)
        connection.close()  # and the answer, which is the connection's

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Server-sent events up to `[DONE]`."""
        for line in response:
            time.sleep(self._pause_s)
            if time.monotonic() > self._deadline:
                raise TimeoutError
            if line == b"\n":
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                response.read()
                return
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise WrongError(f"an answer broke off: {event['error']['message']}")
            yield event
        raise WrongError("an answer broke off")

    def _read_stream(
        self, response: http.client.HTTPResponse, started: float
    ) -> tuple[list[Answer], Mapping[str, int]]:
        parts: dict[int, _Parts] = {}
        usage: Mapping[str, int] | None = None
        waited_s: float | None = None
        for event in self._events(response):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                part = parts.setdefault(choice["index"], _Parts())
                if part.add(choice) and waited_s is None:
                    waited_s = time.monotonic() - started
                    self.tally.wait(waited_s)
        if usage is None:
            raise WrongError("a stream without the usage that it was asked for")
        return [parts[index].answer() for index in sorted(parts)], usage


@dataclass(eq=False)
class Nuisance:
    """Holds so many connections that come to nothing, and opens another where it was hung up on."""

    port: int
    traffic: Traffic
    tally: Tally
    rng: random.Random
    key: str
    number: int

    def run(self, is_over: threading.Event) -> None:
        held: dict[socket.socket, str] = {}
        try:
            while not (is_over.wait(0.02) or self.tally.has_failed.is_set()):
                for client, kind in tuple(held.items()):
                    if _is_over(client, reads=kind != "unread"):
                        self.tally.count(f"hung up on {kind}")
                        client.close()
                        del held[client]
                if len(held) < self.number:
                    kind = self.rng.choice(HELD)
                    held[self._open(kind)] = kind
        except Exception as error:
            self.tally.fail(f"connections that come to nothing: {type(error).__name__}: {error}")
        finally:
            for client in held:
                client.close()

    def _open(self, kind: str) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(self.traffic.limit_s)
        client.connect(("127.0.0.1", self.port))
        case = self.rng.choice(self.traffic.cases)
        body = json.dumps({**case.body, "stream": True, "max_tokens": 200}).encode()
        data = _head(case, len(body), self.key) + body
        with suppress(ConnectionError):  # it may be hung up on already
            client.sendall(data if kind == "unread" else data[: len(data) // 2] if kind == "half" else b"")
        return client


def _is_over(client: socket.socket, *, reads: bool) -> bool:
    """Whether it was hung up on; one that reads sees its answer, if it is an error."""
    looking = select.poll()
    looking.register(client, select.POLLIN if reads else 0)
    return bool(looking.poll(0))


def _head(case: Case, num_bytes: int, key: str) -> bytes:
    lines = (
        f"POST {case.path} HTTP/1.1",
        "Host: localhost",
        f"X-Api-Key: {key}",
        f"Content-Length: {num_bytes}",
    )
    return "\r\n".join((*lines, "", "")).encode()


@dataclass
class _Parts:
    """One choice of a stream, piece by piece."""

    texts: list[str] = field(default_factory=list)
    reason: str = ""
    logprobs: list[float] | None = None

    def add(self, choice: Mapping[str, Any]) -> bool:
        """Whether there was text in it."""
        if self.reason:
            raise WrongError("a choice went on after its end")
        text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        self.texts.append(text)
        self.reason = choice["finish_reason"] or ""
        if (more := _logprobs(choice)) is not None:
            self.logprobs = [*(self.logprobs or ()), *more]
        return text != ""

    def answer(self) -> Answer:
        return Answer(
            "".join(self.texts), self.reason, None if self.logprobs is None else tuple(self.logprobs)
        )


def _read_whole(response: http.client.HTTPResponse) -> tuple[list[Answer], Mapping[str, int]]:
    content = json.loads(response.read())
    answers = [
        Answer(
            choice["text"] if "text" in choice else choice["message"]["content"],
            choice["finish_reason"],
            _logprobs(choice),
        )
        for choice in content["choices"]
    ]
    return answers, content["usage"]


def _logprobs(choice: Mapping[str, Any]) -> tuple[float, ...] | None:
    match choice["logprobs"]:
        case None:
            return None
        case {"token_logprobs": values}:
            return tuple(values)
        case {"content": entries}:
            return tuple(entry["logprob"] for entry in entries)
    raise WrongError(f"log-probabilities of no known shape: {choice['logprobs']}")


def _compare(case: Case, answers: Sequence[Answer], usage: Mapping[str, int], *, is_exact: bool) -> None:
    alone = case.alone
    what = f"{case.kind}, {'chat' if case.path == CHAT else 'completion'} of {case.num_prompt} tokens"
    if len(answers) != case.num_choices:
        raise WrongError(f"{what}: {len(answers)} choices instead of {case.num_choices}")
    for answer in answers:
        if (answer.text, answer.reason) != (alone.text, alone.reason):
            raise WrongError(
                f"{what}: the answer is {answer.text!r} ({answer.reason}), alone it is {alone.text!r} "
                f"({alone.reason})"
            )
        if (answer.logprobs is None) != (alone.logprobs is None):
            raise WrongError(f"{what}: log-probabilities where none were asked for, or none where they were")
        if answer.logprobs is None or alone.logprobs is None:
            continue
        off = [abs(one - other) for one, other in zip(answer.logprobs, alone.logprobs, strict=False)]
        most = max(off, default=0.0)
        if len(answer.logprobs) != len(alone.logprobs) or most > (0.0 if is_exact else _LOGPROB_ERROR):
            raise WrongError(f"{what}: log-probabilities differ from those alone, by up to {most:g}")
    counted = (usage["prompt_tokens"], usage["completion_tokens"])
    if counted != (case.num_prompt, case.num_answer):
        raise WrongError(f"{what}: usage is {counted}, and should be {(case.num_prompt, case.num_answer)}")


def _reset_on_close(raw: socket.socket) -> None:
    """Close by a reset instead of a farewell, as a process that dies does."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
