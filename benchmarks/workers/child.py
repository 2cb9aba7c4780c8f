"""Runs one engine for a benchmark: `python child.py MODULE:CLASS`. Requests come in, answers go out,
a line of JSON each.

    {"do": "load", "model": "...", ...}                    {"ok": {...}}
    {"do": "generate", "prompt": [...], "num_tokens": 2}   {"ok": {"token_ids": [...], "stamps_s": [...], ...}}
    {"do": "close"}                                        (it ends, as it does where no more requests can come)

`do` is a method of the class, the other fields are its arguments. `generate` has one argument more: what to call with
each token; stamps count from the call to each token. What fails is answered with {"error": "..."}. Between requests
the process waits for its input, so that it computes nothing while others do. Nothing but the standard library is
imported here: it runs inside other engines' environments.
"""

import gc
import json
import os
import sys
import time
from importlib import import_module
from typing import Any, TextIO


def stamped(engine: Any, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """An engine's tokens, each with its time since the call, and what else the engine says."""
    token_ids: list[int] = []
    stamps_s: list[float] = []
    gc.collect()
    started = time.perf_counter()

    def on_token(token: int) -> None:
        stamps_s.append(time.perf_counter() - started)
        token_ids.append(token)

    more = engine.generate(prompt, num_tokens, on_token)
    return {"token_ids": token_ids, "stamps_s": stamps_s, **(more or {})}


def serve(engine: Any, requests: TextIO, answers: TextIO) -> None:
    """Until it is told to end, or there is nobody left to tell it."""
    for line in requests:
        request = json.loads(line)
        what = request.pop("do")
        if what == "close":
            return
        try:
            done = stamped(engine, **request) if what == "generate" else getattr(engine, what)(**request)
            answer: dict[str, Any] = {"ok": done or {}}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # What engines and their processes print goes to the errors: the output is for answers alone.
    private = os.dup(1)
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    with os.fdopen(private, "w") as output:
        serve(getattr(import_module(module), name)(), sys.stdin, output)
