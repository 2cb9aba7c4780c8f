"""A process that is killed while it reads a long prompt, and started again, as often as it takes.

Run as a program: `python -m tests.engine.crashing FOLDER CACHE NUM_KILLS SEED`. It prints what became of each start.
Starting Python and torch anew would take most of the time, so each start is a fork of a process that has imported
them and computed nothing.
"""

import contextlib
import json
import os
import random
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from penstock.engine.llm import LLM
from penstock.plan.progress import Progress

NUM_PROMPT = 2000
CHUNK = 64
MAX_TOKENS = 4
PATIENCE_S = 60


@dataclass(frozen=True)
class Start:
    """One start: what it found on disk, and the answer, unless it was killed."""

    num_cached: int | None  # None: it was killed before it had looked
    num_read: int  # of the prompt when it ended, what it had found included
    answer: list[int] | None


def prompt_of(seed: int) -> list[int]:
    return [random.Random(seed + 1000 * place).randrange(211) for place in range(NUM_PROMPT)]


def read_prompt(folder: Path, cache: Path, seed: int, tell: int, may_go_on: int) -> None:
    """In a process of its own: a line for what was found, for each chunk, and for the answer. After each it waits to
    be told to go on, so that it is never far from where it is to be killed, however late that comes."""

    def say(**what: object) -> None:
        os.write(tell, (json.dumps(what) + "\n").encode())
        os.read(may_go_on, 1)

    def on_progress(progress: Progress) -> None:
        say(read=progress.num_done)

    torch.set_num_threads(1)
    with LLM(folder, dtype="float32", chunk=CHUNK, threads=1, cache_dir=cache) as llm:
        stream = llm.stream(prompt_of(seed), max_tokens=MAX_TOKENS, on_progress=on_progress)
        say(cached=stream.progress.num_cached)
        for _ in stream:
            pass
        say(answer=stream.result.token_ids)


def start(folder: Path, cache: Path, seed: int, rng: random.Random | None, *, grows: bool = False) -> Start:
    """Start a process and, with `rng`, kill it at some moment: where it `grows`, when it has stored a block."""
    said, theirs = os.pipe()
    may_go_on, goes_on = os.pipe()
    num_before = num_blocks(cache)
    child = os.fork()
    if child == 0:
        os.close(said)
        os.close(goes_on)
        status = 1
        try:
            read_prompt(folder, cache, seed, theirs, may_go_on)
            status = 0
        finally:
            os._exit(status)
    os.close(theirs)
    lines: list[dict[str, object]] = []
    # Some die before they begin, others a few chunks later, after a part of the time that a chunk takes.
    num_lines = rng.randrange(8) if rng else None
    with os.fdopen(said, "rb") as out:
        while num_lines is None or len(lines) < num_lines or (grows and num_blocks(cache) == num_before):
            ready, _, _ = select.select([out], [], [], PATIENCE_S)
            assert ready, "it says nothing"
            line = out.readline()
            if not line:
                break
            lines.append(json.loads(line))
            with contextlib.suppress(BrokenPipeError):
                os.write(goes_on, b".")
            if grows and num_blocks(cache) == num_before:
                time.sleep(0.02)  # it stores behind its back
        if rng is not None:
            time.sleep(rng.random() * 0.02)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        lines += [json.loads(line) for line in out if line.endswith(b"\n")]
    os.close(may_go_on)
    os.close(goes_on)
    assert rng is not None or status == 0, f"it ended with {status}"
    told = {key: value for line in lines for key, value in line.items()}
    return Start(told.get("cached"), told.get("read", 0), told.get("answer"))  # type: ignore[arg-type]


def num_blocks(cache: Path) -> int:
    return sum(".state." not in path.name for path in cache.rglob("*-*.safetensors"))


def main(folder: Path, cache: Path, num_kills: int, seed: int) -> None:
    rng = random.Random(seed)
    for index in range(num_kills + 1):
        is_last = index == num_kills
        stored = sorted(
            path.name[:8] for path in cache.rglob("*-*.safetensors") if ".state." not in path.name
        )
        states = sorted(int(path.name[:8]) for path in cache.rglob("*.state.safetensors"))
        num_stored = next((n for n, name in enumerate(stored) if int(name) != n), len(stored))
        # Every other one stores a block, or more: so what is stored grows, whatever the disk.
        result = start(folder, cache, seed, None if is_last else rng, grows=index % 2 == 1 and not is_last)
        print(json.dumps({"num_stored": num_stored, "states": states, **asdict(result)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
