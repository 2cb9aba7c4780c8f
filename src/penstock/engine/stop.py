"""Stop strings in a stream: text that might be the start of one is held back until it is known."""

from collections.abc import Sequence

from penstock.errors import SettingError


class StopMatcher:
    """Passes text through up to the first stop string, which is not part of it."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            stops = [stops]
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise SettingError(f"stop={stop!r} is not accepted: give strings of at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self.has_stopped = False

    def push(self, text: str) -> str:
        """Add text; returns what is now known to come before any stop string."""
        if self.has_stopped:
            return ""
        held = self._held + text
        found = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if found:
            self.has_stopped, self._held = True, ""
            return held[: min(found)]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """The text still held back, when no more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that begins, but is not, the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
