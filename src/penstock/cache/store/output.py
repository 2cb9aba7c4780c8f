"""Writing to one model's folder of the disk store, on a thread of its own. Nothing that goes wrong is more than a
warning."""

import errno
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from penstock.cache.store.file import FileLayout, FileName, blank_header, make_header
from penstock.cache.store.folder import (
    ABOUT,
    FINGERPRINT_DIGITS,
    check_owner,
    make_private,
    sync_folder,
    touch,
    write_file,
)
from penstock.cache.store.limit import SizeLimit

_log = logging.getLogger("penstock.cache")

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_FULL_PAUSE_S = 60.0


class Warnings:
    """Each kind of warning once: the same would be said for every block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: set[object] = set()

    def say(self, kind: object, message: str, *values: object) -> None:
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        _log.warning(message, *values)


@dataclass(frozen=True)
class FileToWrite:
    name: FileName
    layout: FileLayout
    pieces: Sequence[memoryview]  # the data, in order
    used_ns: int


class StoreOutput:
    """The folder of a model, kept within the limit of the folder that it lies in. Its methods are for one thread at
    a time; its counters are for any."""

    def __init__(
        self, folder: Path, fingerprint: str, about: Mapping[str, str], limit: SizeLimit, warnings: Warnings
    ) -> None:
        self.folder = folder
        self.model_folder = folder / fingerprint[:FINGERPRINT_DIGITS]
        self.num_written = self.num_dropped = 0
        self._fingerprint = fingerprint
        self._about = json.dumps(dict(about), indent=1).encode() + b"\n"
        self._limit = limit
        self._warnings = warnings
        self._paused_until_s = 0.0

    def open(self) -> bool:
        """Make the folder ready; False, with a warning, where it cannot be used at all."""
        try:
            self._make_folders()
        except OSError as error:
            self._warnings.say(
                "open", "the cache folder %s cannot be used, so nothing is kept: %s", self.folder, _why(error)
            )
            return False
        try:
            self._describe()
        except OSError as error:  # files can be read from a folder that cannot be written
            self._warn_of(error)
        return True

    def write(self, files: Sequence[FileToWrite]) -> None:
        """Write those that are not there yet. What cannot be written is dropped, with all that come after it."""
        done: set[Path] = set()
        if time.monotonic() >= self._paused_until_s:
            try:
                self._make_folders()  # they may have been removed
                self._describe()
                for file in files:
                    if not self._write_one(file, done):
                        break
                    done.add(self.path(file.name))
                sync_folder(self.model_folder)
            except OSError as error:
                self._warn_of(error)
                if error.errno in _DISK_FULL:
                    self._paused_until_s = time.monotonic() + _DISK_FULL_PAUSE_S
        self.num_dropped += len(files) - len(done)

    def path(self, name: FileName) -> Path:
        return self.model_folder / str(name)

    def _write_one(self, file: FileToWrite, keep: set[Path]) -> bool:
        path = self.path(file.name)
        num_bytes = len(blank_header(file.name, self._fingerprint, file.layout)) + file.layout.num_bytes
        before = size_of(path)
        if before == num_bytes:
            touch(path, file.used_ns)
            return True
        if not self._limit.make_room(num_bytes, keep, file.used_ns, file.name.num_blocks):
            self._warnings.say(
                "limit",
                "not all that was read can be kept: files of %d bytes in the %d that %s may have; "
                "a larger cache size is needed",
                num_bytes,
                self._limit.max_bytes,
                self.folder,
            )
            return False
        data = sha256()
        for piece in file.pieces:
            data.update(piece)
        header = make_header(file.name, self._fingerprint, file.layout, data)
        write_file(path, [header, *file.pieces], file.used_ns)
        self._limit.add(num_bytes - (before or 0))
        self.num_written += 1
        return True

    def _make_folders(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(self.folder)
        make_private(self.model_folder)

    def _describe(self) -> None:
        about = self.model_folder / ABOUT
        if size_of(about) != len(self._about):
            write_file(about, [self._about])

    def _warn_of(self, error: OSError) -> None:
        then = f"; trying again in {_DISK_FULL_PAUSE_S:g} s" if error.errno in _DISK_FULL else ""
        self._warnings.say(
            error.errno, "cannot write to %s: %s; what was read is not kept%s", self.folder, _why(error), then
        )


def size_of(path: Path) -> int | None:
    try:
        return os.lstat(path).st_size
    except OSError:
        return None


def _why(error: OSError) -> str:
    return error.strerror or str(error)


@dataclass(frozen=True)
class _Job:
    num_bytes: int
    run: Callable[[], None]


class StoreWriter:
    """Jobs that run one after the other on a thread of their own, which starts with the first of them.

    The queue is bounded by the bytes that its jobs hold. Whoever adds one never waits: a job that finds no room is
    refused. One job is always taken, however large, where no other waits or runs.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._held_bytes = 0
        self._num_put = self._num_done = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def put(self, num_bytes: int, run: Callable[[], None]) -> bool:
        """Have a job run, which holds so many bytes until then. False where it was refused."""
        with self._changed:
            if self._is_closed or (num_bytes and not self.has_room(num_bytes)):
                return False
            self._jobs.append(_Job(num_bytes, run))
            self._held_bytes += num_bytes
            self._num_put += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="penstock-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def has_room(self, num_bytes: int) -> bool:
        with self._changed:
            return not self._held_bytes or self._held_bytes + num_bytes <= self._max_bytes

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs that were put by now have run; whether they have."""
        with self._changed:
            wanted = self._num_put
            return self._changed.wait_for(lambda: self._num_done >= wanted, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Wait for the jobs, but no longer than that, and end the thread. Whether all have run: those that have not
        never will, but for the one that runs."""
        until_s = time.monotonic() + timeout_s
        is_done = self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._num_done += len(self._jobs)
            self._jobs.clear()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(max(until_s - time.monotonic(), 0.0))
        return is_done

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job.run()
            except Exception:  # the next one may fare better, and whoever flushes waits for this thread
                _log.exception("writing to the disk cache failed")
            with self._changed:
                self._held_bytes -= job.num_bytes
                self._num_done += 1
                del job
                self._changed.notify_all()
