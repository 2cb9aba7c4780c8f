"""From what a client knows its request by to the engine's names of it."""

import threading
from collections.abc import Sequence
from typing import Final

from penstock.engine.batcher import ENDED_EXPLAINED
from penstock.engine.service import Service
from penstock.plan.step import RequestId


class AnswerNames:
    """The requests of answers, by the answer's `id` and by its `x-request-id`, for as long as the engine can explain
    them. Any thread may ask."""

    def __init__(self, service: Service) -> None:
        self._service = service
        # More answers than the engine can know of are not kept, but for some that are looked through when there are
        # twice as many.
        schedule = service.schedule
        self._most: Final = schedule.max_running + schedule.max_waiting + ENDED_EXPLAINED
        self._lock = threading.Lock()
        self._answers: dict[str, tuple[RequestId, ...]] = {}
        # Apart: a client picks these itself, and is not to take an answer's name away.
        self._headers: dict[str, tuple[RequestId, ...]] = {}

    def add(self, ids: Sequence[RequestId], *, answer: str, header: str) -> None:
        with self._lock:
            for names, name in ((self._answers, answer), (self._headers, header)):
                names.pop(name, None)  # the last of a name counts
                names[name] = tuple(ids)
                if len(names) >= 2 * self._most:
                    self._forget(names)

    def find(self, name: str) -> tuple[RequestId, ...]:
        """The requests of an answer, in the order of its choices, or one by the engine's own name; nothing where the
        name is not known."""
        is_own = self._service.explain(name) is not None
        with self._lock:
            return self._answers.get(name) or ((name,) if is_own else self._headers.get(name, ()))

    def _forget(self, names: dict[str, tuple[RequestId, ...]]) -> None:
        for name, ids in tuple(names.items()):
            if all(self._service.explain(request_id) is None for request_id in ids):
                del names[name]
