"""How long passes take. A GPU runs behind the host: while it computes one pass, the next is being launched."""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from penstock.kernels.device import device_kind


class Pace(Protocol):
    def begin(self) -> None:
        """A pass is about to be launched."""

    def launched(self) -> None:
        """It was. There may be one that was launched before and is not told of yet."""

    def end(self, *, is_done: bool) -> list[float]:
        """All that was launched belongs to steps that have ended, the last of which is known to be done or not.
        Returns the seconds of those that are done by now and were not told of before, in order: of all but the last,
        at least."""

    def abandon(self) -> None:
        """The pass that was begun last, if it is not told of yet, is not to be told of."""


def pace_of(device: torch.device) -> Pace:
    kind = device_kind(device)
    return _DevicePace(kind.event) if kind.steps_in_flight > 1 else _HostPace()


class _HostPace:
    """A pass that was launched is done; what follows in its step counts, too."""

    def begin(self) -> None:
        self._began_s = time.perf_counter()

    def launched(self) -> None:
        pass

    def end(self, *, is_done: bool) -> list[float]:
        return [time.perf_counter() - self._began_s]

    def abandon(self) -> None:
        pass


class _DevicePace:
    """By the device's own clock. The host waits before it is two passes ahead."""

    def __init__(self, event: Callable[[], torch.cuda.Event]) -> None:
        self._event = event
        self._passes: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._start: torch.cuda.Event | None = None
        self._last: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # begun last, and not told of

    def begin(self) -> None:
        self._start, self._last = self._event(), None

    def launched(self) -> None:
        assert self._start is not None
        self._last = (self._start, self._event())
        self._passes.append(self._last)

    def end(self, *, is_done: bool) -> list[float]:
        seconds: list[float] = []
        self._last = None
        while len(self._passes) > (0 if is_done else 1):
            start, end = self._passes.popleft()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1000)
        return seconds

    def abandon(self) -> None:
        if self._last is not None:
            self._passes.remove(self._last)
        self._last = None
