"""Listeners that keep what they are told."""

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


class Pausing(Listening):
    """Keeps the service's thread at an event of its request, that of a number or its end, until it is told to go on:
    what is done meanwhile is done in time, however slow the machine."""

    def __init__(self, at_event: int | type[Finished] = 1) -> None:
        super().__init__()
        self._at_event = at_event
        self._has_come, self._goes_on = threading.Event(), threading.Event()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if self._at_event in (len(self.events), type(event)):
            self._has_come.set()
            self._goes_on.wait(PATIENCE_S)

    def wait(self) -> None:
        """Until the service is kept there."""
        assert self._has_come.wait(PATIENCE_S), "it did not come"

    def go_on(self) -> None:
        self._goes_on.set()
