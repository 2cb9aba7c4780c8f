"""How far a prompt has been read, and how long the rest will take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The state of a prefill after a finished chunk. `eta_s` is None before the first."""

    num_done: int
    num_tokens: int
    chunks_done: int
    num_chunks: int
    elapsed_s: float
    eta_s: float | None
    num_cached: int = 0  # of those done, that were in the cache and took no time

    @property
    def tokens_per_s(self) -> float:
        return (self.num_done - self.num_cached) / self.elapsed_s if self.elapsed_s > 0 else 0.0


class PrefillClock:
    """Learns the cost of a token from finished chunks: a constant part, and one that grows with its position,
    since a later token attends to a longer past."""

    def __init__(self, num_tokens: int, num_chunks: int) -> None:
        self._num_tokens = num_tokens
        self._num_chunks = num_chunks
        self._num_done = 0
        self._num_cached = 0
        self._chunks_done = 0
        self._elapsed_s = 0.0
        # Sums of the least-squares problem: cost per token = base + slope * position.
        self._weight = self._x = self._xx = self._y = self._xy = 0.0

    def record(self, start: int, end: int, seconds: float) -> None:
        """A chunk [start, end) took this long."""
        count, middle = end - start, (start + end) / 2
        per_token = seconds / count
        self._weight += count
        self._x += count * middle
        self._xx += count * middle * middle
        self._y += count * per_token
        self._xy += count * middle * per_token
        self._num_done = end
        self._chunks_done += 1
        self._elapsed_s += seconds

    def skip(self, end: int) -> None:
        """Tokens up to `end` need not be read: they were in the cache."""
        if end > self._num_done:
            self._num_cached += end - self._num_done
            self._num_done = end

    def progress(self) -> Progress:
        return Progress(
            self._num_done,
            self._num_tokens,
            self._chunks_done,
            self._num_chunks,
            self._elapsed_s,
            self._eta_s(),
            self._num_cached,
        )

    def _eta_s(self) -> float | None:
        if self._chunks_done == 0:
            return None
        remaining = self._num_tokens - self._num_done
        mean_y, mean_x = self._y / self._weight, self._x / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = (self._xy / self._weight - mean_x * mean_y) / spread if spread > 0 else 0.0
        # A later token never costs less than an earlier one: a falling line is noise.
        slope = max(slope, 0.0)
        middle = (self._num_done + self._num_tokens) / 2
        return remaining * (mean_y + slope * (middle - mean_x))
