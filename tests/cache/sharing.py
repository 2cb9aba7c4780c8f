"""Programs in which processes share a folder and are killed. They are programs of their own because they fork, which
needs a process without threads; and because torch is then imported once.

    python -m tests.cache.sharing (together | killed) FOLDER
"""

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from penstock.cache.store.file import find_damage
from penstock.cache.store.folder import scan
from tests.cache.storing import fill, keys_of, num_found, open_store

NUM_BLOCKS = 6
FILE_BYTES = 1984


@dataclass(frozen=True)
class Writer:
    """A process that writes one prompt after the other until it is killed."""

    pid: int
    said: IO[str]

    def next_number(self) -> int:
        """Wait until the next prompt is on disk."""
        line = self.said.readline()
        assert line, "it ended by itself: what it found was wrong"
        return int(line)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.said.close()


def start(folder: Path, max_bytes: int, name: str) -> Writer:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return Writer(pid, os.fdopen(read_end))
    try:
        write_for_ever(folder, max_bytes, name, os.fdopen(write_end, "w"))
    finally:
        os._exit(1)


def write_for_ever(folder: Path, max_bytes: int, name: str, out: IO[str]) -> None:
    """Write prompts, and look for the other process's: what is found must be right to the bit."""
    store = open_store(folder, max_bytes=max_bytes)
    for number in range(1_000_000):
        fill(store, keys_of(NUM_BLOCKS, f"{name} {number}"))
        print(number, file=out, flush=True)
        for other in ("a", "b"):
            num_found(store, keys_of(NUM_BLOCKS, f"{other} {number}"))


def check_all(folder: Path) -> int:
    """The number of files, all of them whole."""
    files = [file for model in scan(folder) for file in model.files]
    for file in files:
        assert file.name is not None
        assert find_damage(file.path, file.name) is None
    return len(files)


def together(folder: Path) -> None:
    """Two processes with room for four prompts: each evicts what the other is about to read."""
    writers = [start(folder, 4 * NUM_BLOCKS * FILE_BYTES, name) for name in ("a", "b")]
    for _ in range(60):
        for writer in writers:
            writer.next_number()
    for writer in writers:
        writer.kill()
    assert 0 < check_all(folder) <= 2 * 4 * NUM_BLOCKS
    assert not list(folder.glob("*/damaged"))


def killed(folder: Path) -> None:
    """A process is killed while it writes, at one moment or another. What it had said to be on disk is on disk."""
    moments = random.Random(0)
    for trial in range(20):
        writer = start(folder, 1 << 30, f"trial {trial}")
        last = 0
        for _ in range(moments.randrange(1, 6)):
            last = writer.next_number()
        time.sleep(moments.uniform(0, 0.02))
        writer.kill()
        check_all(folder)
        store = open_store(folder)
        for number in range(last + 1):
            assert num_found(store, keys_of(NUM_BLOCKS, f"trial {trial} {number}")) == NUM_BLOCKS
        assert store.stats().num_damaged == 0
        store.close()
    names = {file.name for file in folder.glob("*/*")}
    known = {name for name in names if name.endswith(".safetensors") or name.startswith(".tmp-")}
    assert names - known == {"about.json"}


if __name__ == "__main__":
    {"together": together, "killed": killed}[sys.argv[1]](Path(sys.argv[2]))
