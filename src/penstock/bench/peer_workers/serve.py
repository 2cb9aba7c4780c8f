"""Runs one engine for a benchmark: `python serve.py MODULE`. A request a line comes in, an answer a line goes out.

The module has `describe()`, a line about the engine; `load(settings)`, which returns a function of a prompt, a number
of tokens and what to call with each token, and which may have `weights`, a line about how those lie in memory; and,
if there is something to make beforehand, `prepare(settings)`.

    {"do": "prepare", "settings": {...}}             {"ok": {}}
    {"do": "load", "settings": {...}}                {"ok": {"about": "...", "weights": null, "load_s": 1.2}}
    {"do": "generate", "prompt": [...], "num_tokens": 2}   {"ok": {"token_ids": [...], "stamps_s": [...]}}
    {"do": "close"}                                  (it ends, as it does where no more requests can come)

What fails is answered with {"error": "..."}. Stamps count from the call to each token. Between requests the process
waits for its input, so that it computes nothing while others do.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, TextIO

Generate = Callable[[list[int], int, Callable[[int], None]], object]


class Server:
    """One engine, loaded at most once at a time."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._generate: Generate | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        engine: Any = import_module(self._module)
        what = request["do"]
        if what == "prepare":
            engine.prepare(request["settings"])
            return {}
        if what == "load":
            started = time.perf_counter()
            self._generate = engine.load(request["settings"])
            load_s = time.perf_counter() - started
            weights = getattr(self._generate, "weights", None)
            return {"about": engine.describe(), "weights": weights, "load_s": load_s}
        if what == "generate":
            return self._time(request["prompt"], request["num_tokens"])
        raise ValueError(f"{what!r} is no request")

    def _time(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        if self._generate is None:
            raise ValueError("nothing is loaded")
        token_ids: list[int] = []
        stamps_s: list[float] = []
        gc.collect()
        started = time.perf_counter()

        def on_token(token: int) -> None:
            stamps_s.append(time.perf_counter() - started)
            token_ids.append(token)

        self._generate(prompt, num_tokens, on_token)
        return {"token_ids": token_ids, "stamps_s": stamps_s}


def serve(module: str, requests: TextIO, answers: TextIO) -> None:
    """Until it is told to end, or there is nobody left to tell it."""
    server = Server(module)
    for line in requests:
        request = json.loads(line)
        if request["do"] == "close":
            return
        try:
            answer: dict[str, Any] = {"ok": server.answer(request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # What engines and their processes print goes to the errors: the output is for answers alone.
    private = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(private, "w") as output:
        serve(sys.argv[1], sys.stdin, output)
