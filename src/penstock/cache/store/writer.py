"""The thread that writes to the disk store, and the queue before it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger("penstock.cache")


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
