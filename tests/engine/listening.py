"""A listener that keeps what it is told."""

import threading

from penstock.engine.events import Event, Failed, Finished, TokenGenerated

PATIENCE_S = 60.0


class Listening:
    """Keeps the events of a request, and tells when it has ended."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._is_over = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self._is_over.set()

    @property
    def end(self) -> Event:
        assert self._is_over.wait(PATIENCE_S), "it did not end"
        return self.events[-1]

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, TokenGenerated)]
