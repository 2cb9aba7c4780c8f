"""Threads of a processor's work: how many it is cut for, whose they are, and what becomes of them in a crowd.

torch's threads stay awake for milliseconds after each operation, and every one of them must be let in before the next
can begin. On an idle machine nothing is faster. Where others want the processors, too, most of the time goes by until
all threads have had their turn. There torch has as many threads as others leave processors, and where that is one,
what the native library does is claimed piece by piece by threads of its own, which sleep when there is nothing to do.
Bits do not depend on any of this: work is cut for the same number of threads, whoever does it, and torch's products
of bfloat16 are the same by any number of them. Those of float32 are not always, and keep theirs.
"""

import os
import threading
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from types import TracebackType

import torch


class _Own(threading.local):
    """torch's number of threads is each thread's own, and so is this."""

    cut_for = 0  # what torch would use if it had not been left fewer threads; 0: it has all
    depth = 0  # of `with` blocks


_own = _Own()


def num_threads() -> int:
    """How many threads work is cut for."""
    return _own.cut_for or torch.get_num_threads()


def native_threads() -> int:
    """The same for the native library: its own threads, or torch's, which it is told by a negative number."""
    torchs = torch.get_num_threads()
    return _own.cut_for if _own.cut_for and torchs == 1 else -torchs


class Crowd:
    """Whether others want the processors: they and this process want to run more threads than there are processors,
    look after look."""

    EVERY_S, NUM_LOOKS = 0.01, 2
    # After so long without a look, all threads of this process are asleep but the one that looks.
    PAUSE_S = 0.05
    # While it is there: looks are dearer. How long it must be quiet before torch has all threads again; longer, each
    # time that this was wrong.
    EVERY_THERE_S, QUIET_S, MOST_QUIET_S = 0.04, 0.25, 1.0

    def __init__(
        self,
        loads: Path = Path("/proc/loadavg"),
        num_processors: int | None = None,
        own: Path = Path("/proc/self/task"),
    ) -> None:
        self.is_there = False
        self._num_others = 0  # threads that want to run beside ours
        self._seen_others = 0  # at the last look
        self._loads: Path | None = loads
        self._own = own
        self._num_processors = num_processors or os.cpu_count() or 1
        self._looked_s = -inf
        self._num_crowded = 0  # looks in a row
        self._quiet_since_s = 0.0
        self._left_s = -inf
        self._quiet_s = self.QUIET_S

    @property
    def processors_left(self) -> int:
        """Those that others do not want; a fourth of all where they want all of them."""
        return max(self._num_processors - self._num_others, self._num_processors // 4, 1)

    def look(self, now: float, num_own: int) -> bool:
        """Whether it has come, changed or gone, where this process wants to run so many threads."""
        since_s = now - self._looked_s
        if since_s < (self.EVERY_THERE_S if self.is_there else self.EVERY_S) or self._loads is None:
            return False
        self._looked_s = now
        try:
            # On an idle machine all of its threads are awake, and asking for each would cost too much.
            num_awake = self._num_awake() if self.is_there else 1 if since_s > self.PAUSE_S else num_own
            others = max(int(self._loads.read_text().split()[3].split("/")[0]) - num_awake, 0)
        except (OSError, ValueError, IndexError):  # a system that does not tell
            self._loads = None
            return False
        is_crowded = others + num_own > self._num_processors
        self._num_crowded = self._num_crowded + 1 if is_crowded else 0
        before, self._seen_others = self._seen_others, others
        if is_crowded:
            self._quiet_since_s = now
            # Threads of this process may have been taken for others', or others for threads of it.
            both = (before, others) if self._num_crowded > 1 else (others,)
            num_others = max(both) if self.is_there else min(both)
            has_changed, self._num_others = self.is_there and num_others != self._num_others, num_others
            if has_changed:
                return True
        if not self.is_there and self._num_crowded >= self.NUM_LOOKS:
            is_again = now - self._left_s < self.MOST_QUIET_S
            self._quiet_s = min(2 * self._quiet_s, self.MOST_QUIET_S) if is_again else self.QUIET_S
            self.is_there = True
            return True
        if self.is_there and now - self._quiet_since_s > self._quiet_s:
            self.is_there, self._left_s = False, now
            return True
        return False

    def _num_awake(self) -> int:
        """Threads of this process that want to run."""
        found = 0
        for task in self._own.iterdir():
            with suppress(OSError):  # it has ended
                found += (task / "stat").read_bytes().rpartition(b") ")[2].startswith(b"R")
        return found


class StepThreads:
    """The threads of a model's steps, each of which is a `with` block of the thread that runs it."""

    def __init__(self, *, is_host: bool, torch_multiplies: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        """Where torch has nothing large to do, it has one thread in any case. A device that is not the host computes
        by itself."""
        self._leaves_torch_one = is_host and not torch_multiplies
        has_crowd = is_host and torch_multiplies and dtype == torch.bfloat16
        self._crowd = Crowd() if has_crowd else None

    def __enter__(self) -> None:
        _own.depth += 1
        if _own.depth == 1 and self._leaves_torch_one:
            _leave_torch(1)
        if _own.depth == 1 and self._crowd is not None and self._crowd.is_there:
            _leave_torch(self._crowd.processors_left)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _own.depth -= 1
        if _own.depth == 0:
            _give_torch_all()

    def look(self) -> None:
        """Between layers, within the block: a step can take long where nobody is let in."""
        crowd = self._crowd
        if crowd is None or not crowd.look(time.perf_counter(), num_threads()):
            return
        if crowd.is_there:
            _leave_torch(crowd.processors_left)
        else:
            _give_torch_all()


def _leave_torch(count: int) -> None:
    _own.cut_for = num_threads()
    torch.set_num_threads(min(count, _own.cut_for))


def _give_torch_all() -> None:
    if _own.cut_for:
        torch.set_num_threads(_own.cut_for)
        _own.cut_for = 0
