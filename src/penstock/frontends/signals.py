"""Ctrl-C while a request runs."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def on_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `cancel`, which must only take note; the second raises KeyboardInterrupt; after
    that the system's own handling applies. What was in force before is restored at the end."""
    before = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and before is not None
    if not is_ours or before is signal.SIG_IGN:  # a background job is not to be interrupted
        yield
        return
    is_cancelled = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_cancelled
        if is_cancelled:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        is_cancelled = True
        cancel()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
