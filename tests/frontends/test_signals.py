"""The first Ctrl-C cancels, the second interrupts, and afterwards all is as before."""

import signal
import threading
from collections.abc import Iterator

import pytest

from penstock.frontends.answer import on_interrupt
from penstock.frontends.exits import INTERRUPTED, run_main


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A runner in the background may have the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_first_cancels_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    calls: list[int] = []

    def interrupt_twice() -> None:
        with on_interrupt(lambda: calls.append(1)):
            signal.raise_signal(signal.SIGINT)
            assert calls == [1]
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert calls == [1]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_that_an_import_takes_for_another_error_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("half a module") from None

    with pytest.raises(SystemExit) as ended:
        run_main(command)
    assert ended.value.code == INTERRUPTED
    assert capsys.readouterr().err == "penstock: interrupted\n"


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with on_interrupt(lambda: pytest.fail("cancelled")):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_runs_without_it() -> None:
    ran: list[bool] = []

    def body() -> None:
        with on_interrupt(lambda: None):
            ran.append(True)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert ran == [True]
