"""Percentiles of the last waits: what users feel now, not the mean since the start."""

import threading
from collections import deque
from dataclasses import dataclass

WINDOW = 2048


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds. p95 is the least wait that at least 95 of 100 did not exceed."""

    count: int
    p50: float
    p95: float
    p99: float
    max: float


class LatencyWindow:
    """The last waits. Adding one is cheap; they are sorted when asked for. Any thread may do either."""

    def __init__(self, size: int = WINDOW) -> None:
        self._lock = threading.Lock()
        self._last: deque[float] = deque(maxlen=size)

    def add(self, seconds: float) -> None:
        with self._lock:
            self._last.append(seconds)

    def percentiles(self) -> Percentiles | None:
        """None before the first wait."""
        with self._lock:
            waits = list(self._last)
        if not waits:
            return None
        waits.sort()
        return Percentiles(len(waits), _at(waits, 50), _at(waits, 95), _at(waits, 99), waits[-1])


def _at(waits: list[float], percent: int) -> float:
    # The nearest rank in whole numbers: a float's ceiling may be one too many.
    return waits[-(-percent * len(waits) // 100) - 1]
