"""How long passes take. A GPU runs behind the host: while it computes one pass, the next is being launched."""

import time
from collections import deque
from typing import Protocol

import torch


class Pace(Protocol):
    def begin(self) -> None:
        """A pass is about to be launched."""

    def end(self, *, is_done: bool) -> list[float]:
        """A pass was launched, and is known to be done or not. Returns the seconds of those that are done by now and
        were not told of before, in order: all but the last, at least."""

    def abandon(self) -> None:
        """The pass that was begun is not to be told of."""


def pace_of(device: torch.device) -> Pace:
    return _DevicePace() if device.type == "cuda" else _HostPace()


class _HostPace:
    """A pass that was launched is done."""

    def begin(self) -> None:
        self._began_s = time.perf_counter()

    def end(self, *, is_done: bool) -> list[float]:
        return [time.perf_counter() - self._began_s]

    def abandon(self) -> None:
        pass


class _DevicePace:
    """By the device's own clock. The host waits before it is two passes ahead."""

    def __init__(self) -> None:
        self._passes: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._start: torch.cuda.Event | None = None

    def begin(self) -> None:
        self._start = _event()

    def end(self, *, is_done: bool) -> list[float]:
        assert self._start is not None
        self._passes.append((self._start, _event()))
        seconds: list[float] = []
        while len(self._passes) > (0 if is_done else 1):
            start, end = self._passes.popleft()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1000)
        return seconds

    def abandon(self) -> None:
        self._start = None


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
