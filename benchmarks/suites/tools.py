"""What tools cost: a chat that may call one of many, beside the same prompt as plain text, over HTTP."""

import argparse
import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Bar, Bench, Results, bar_of, rotated, take_turns
from benchmarks.models import text_subject
from benchmarks.suite import Suite, number
from penstock.errors import PenstockError

PLAIN, HELD = "without tools", "with tools"
WAYS = (PLAIN, HELD)
# Tools that were never sent before, or were; the former where the prompt has to be read, and after a start.
NEW, KNOWN, COLD, START = "new tools", "known tools", "new tools, prompt read", "first request of a server"
CASES = (NEW, KNOWN, COLD, START)
FIRST, NEXT = "first token", "next token"
_LATER_MS, _MOST_RATIO = 50.0, 1.03
_REPEATS, _FEW_REPEATS = 7, 3
_TIMEOUT_S = 120.0
METHOD = (
    "a chat with tools in `auto`, and its rendered prompt as a plain completion, by HTTP and in turns: the same "
    "tokens. The tools are others in every turn. But for 'prompt read', the prompt is in the cache before either is "
    "sent; a server's first request finds it on disk. A first token is timed from before the request is sent; a next "
    "token is the median of an answer's"
)


def some_tools(count: int, number: int) -> list[dict[str, Any]]:
    """About as large as those of coding agents; others for another number."""
    text: dict[str, Any] = {"type": "string", "description": "what it is about, in a sentence or two"}
    files = {
        "type": "array",
        "items": {"type": "object", "properties": {"path": text, "line": {"type": "integer"}}},
    }
    kinds = {"type": "string", "enum": ["all", "some", "none", "first", "last"]}
    properties = {"path": text, "content": text, "kind": kinds, "files": files, "limit": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["path", "kind"]}
    return [
        {"type": "function", "function": {"name": f"tool_{number}_{index}", "parameters": schema}}
        for index in range(count)
    ]


@dataclass(frozen=True)
class Stamps:
    """Seconds from before a request was sent to each of its tokens."""

    tokens: tuple[float, ...]
    num_prompt: int

    @property
    def row(self) -> dict[str, tuple[str, float | None]]:
        gaps = [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]
        return {FIRST: ("ms", 1e3 * self.tokens[0]), NEXT: ("ms", 1e3 * median(gaps) if gaps else None)}


class Server:
    """`penstock serve`, in a process of its own."""

    def __init__(self, port: int, num_tools: int, num_tokens: int) -> None:
        self._port = port
        self._num_tools = num_tools
        self._how = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": num_tokens}

    def chat(self, number: int) -> dict[str, Any]:
        """A body with tools of a number."""
        question = {"role": "user", "content": "Which of these files should I read first, and why?"}
        return {"messages": [question], "tools": some_tools(self._num_tools, number)}

    def rendered(self, body: dict[str, Any]) -> str:
        text: str = self._ask("/apply-template", body)["prompt"]
        return text

    def read(self, text: str, salt: str) -> None:
        """Leave a prompt in the cache."""
        self._ask("/v1/completions", {"prompt": text, "max_tokens": 1, "cache_salt": salt})

    def stamps(self, way: str, body: dict[str, Any], text: str, salt: str) -> Stamps:
        path, given = (
            ("/v1/completions", {"prompt": text}) if way == PLAIN else ("/v1/chat/completions", body)
        )
        options = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt}
        sent = json.dumps({**given, **self._how, **options}).encode()
        started, stamps, num_prompt = time.perf_counter(), list[float](), 0
        for line in self._lines(path, sent):
            event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: {") else {}
            if any(choice.get("token_ids") for choice in event.get("choices", ())):
                stamps.append(time.perf_counter() - started)
            num_prompt = (event.get("usage") or {}).get("prompt_tokens", num_prompt)
        if not stamps:
            raise PenstockError(f"{path} gave no token")
        return Stamps(tuple(stamps), num_prompt)

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(b"".join(self._lines(path, json.dumps(body).encode())))

    def _lines(self, path: str, body: bytes) -> Iterator[bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", path, body)
            response = connection.getresponse()
            if response.status != 200:
                raise PenstockError(f"{path} answered {response.status}: {response.read()[:300]!r}")
            yield from response
        finally:
            connection.close()


@contextmanager
def _server(options: argparse.Namespace, model: Path, folder: str | None = None) -> Iterator[Server]:
    command = [sys.executable, "-m", "penstock", "serve", "--model", str(model), "--port", "0"]
    command += ["--dtype", options.dtype, *(("--cache-dir", folder) if folder else ())]
    command += ["--threads", str(options.threads)] if options.threads is not None else []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r" at http://[^:]+:(\d+)/v1$", line.strip()):
                    yield Server(int(found[1]), options.tools, options.answer_tokens)
                    return
            raise PenstockError(f"`penstock serve` did not start: {''.join(said[-3:]).strip()}")
        finally:
            process.terminate()


def _measure(options: argparse.Namespace, bench: Bench) -> None:
    num_rounds = options.repeats or _REPEATS
    subject, texts = text_subject(options.model), dict[int, str]()
    bench.describe(subject.description, options, "dtype", "tools", "answer_tokens", method=METHOD)
    few = [*take_turns(rotated(WAYS, min(num_rounds, _FEW_REPEATS)))]
    with _server(options, subject.path) as server:
        for case in (NEW, KNOWN, COLD):
            for index, way in few if case == COLD else take_turns(rotated(WAYS, num_rounds)):
                _turn(server, bench, case, way, index, texts)
    with tempfile.TemporaryDirectory() as folder:
        with _server(options, subject.path, folder) as server:  # nothing else is written while it is timed
            for index, way in few:
                _prompt(server, START, way, index, texts)
        for index, way in few:
            with _server(options, subject.path, folder) as server:
                _turn(server, bench, START, way, index, texts)
    _compare(bench.results)


def _turn(server: Server, bench: Bench, case: str, way: str, index: int, texts: dict[int, str]) -> None:
    """One request; `texts` are prompts by the number of their tools."""
    number = _number(case, way, index)
    body, salt = server.chat(number), f"salt {number}"
    if case != START:
        _prompt(server, case, way, index, texts)
    if case == KNOWN:
        server.stamps(HELD, body, "", salt)
    stamps = server.stamps(way, body, texts[number], salt)
    bench.results.add_row(case, stamps.row, way, index)
    bench.say(
        f"{case}, {way}: first token after {1e3 * stamps.tokens[0]:,.1f} ms ({stamps.num_prompt} tokens)"
    )


def _number(case: str, way: str, index: int) -> int:
    """Of tools that only this turn has."""
    return 1000 * CASES.index(case) + 2 * index + WAYS.index(way)


def _prompt(server: Server, case: str, way: str, index: int, texts: dict[int, str]) -> None:
    """Render a turn's prompt, and read it before, but where that is timed."""
    number = _number(case, way, index)
    texts[number] = server.rendered(server.chat(number))
    if case != COLD:
        server.read(texts[number], f"salt {number}")


def later(case: str) -> str:
    return f"first token later by, {case}"


def cost(case: str) -> str:
    return f"next token, with tools over without, {case}"


def _compare(results: Results) -> None:
    results.arrange(WAYS)
    for case in CASES:
        results.add_ratio(cost(case), case, NEXT, HELD, PLAIN, as_name="ratio")
        held, plain = (results.figure(FIRST, way, case) for way in (HELD, PLAIN))
        if held is not None and plain is not None:
            pairs = [(held.by_round[index], plain.by_round[index]) for index in sorted(plain.by_round)]
            results.add("with tools", later(case), "ms", *(one - other for one, other in pairs))


def _bars(results: Results) -> list[Bar]:
    """None where the prompt is read: that takes seconds, whose noise is more than tools take."""
    found = [(case, results.figure(later(case), section="with tools")) for case in (NEW, KNOWN, START)]
    return [
        *results.ratio_bars({cost(case): (_MOST_RATIO, False) for case in (NEW, KNOWN)}),
        *(bar_of(later(case), figure, _LATER_MS, is_lower_limit=False) for case, figure in found),
    ]


TOOLS = Suite(
    "What tools cost: the first and the next token of a chat that may call one of 24 tools, beside the same prompt "
    "without them, over HTTP and in turns. Takes about three minutes on two cores.",
    _measure,
    _bars,
    repeats="rounds (7; 3 of starts, and where the prompt is read)",
    options={
        "--tools": number(24, "how many tools"),
        "--answer-tokens": number(64, "tokens of the answer"),
    },
)
