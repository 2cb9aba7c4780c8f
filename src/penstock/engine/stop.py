"""Stop strings in a stream: text that might be the start of one is held back until it is known."""

from collections.abc import Sequence

from penstock.errors import SettingError


class StopMatcher:
    """Passes text through up to the first stop string, which is not part of it. A character costs the same however
    long the strings are."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            stops = [stops]
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise SettingError("stop", stop, "strings of at least one character")
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""
        self.has_stopped = False

    def push(self, text: str) -> str:
        """Add text; returns what is now known to come before any stop string."""
        if self.has_stopped:
            return ""
        known, self._held = self._held + text, ""
        starts = [start for search in self._searches if (start := search.push(text)) is not None]
        if starts:
            self.has_stopped = True
            return known[: len(known) - len(text) + min(starts)]
        num_held = max((search.num_matched for search in self._searches), default=0)
        self._held = known[len(known) - num_held :]
        return known[: len(known) - num_held]

    def finish(self) -> str:
        """The text still held back, when no more will come."""
        held, self._held = self._held, ""
        return held


class _Search:
    """One string in a text that comes in pieces, as Knuth, Morris and Pratt look for it."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        # For each beginning of the string, the length of the longest shorter one that it ends with.
        self._shorter = [0]
        for index in range(1, len(wanted)):
            self._shorter.append(self._extend(self._shorter[index - 1], wanted[index]))
        self.num_matched = 0  # the text so far ends with so many of the string's first characters

    def push(self, text: str) -> int | None:
        """Where in this piece the string begins, below 0 if that is before it, once it has come to its end."""
        for index, character in enumerate(text):
            self.num_matched = self._extend(self.num_matched, character)
            if self.num_matched == len(self._wanted):
                return index + 1 - len(self._wanted)
        return None

    def _extend(self, num_matched: int, character: str) -> int:
        while num_matched and self._wanted[num_matched] != character:
            num_matched = self._shorter[num_matched - 1]
        return num_matched + (self._wanted[num_matched] == character)
