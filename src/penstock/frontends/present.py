"""What a person sees on standard error while a request runs."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from penstock.frontends.lines import is_complete, progress_facts
from penstock.home import cache_home
from penstock.plan.progress import Progress

Report = Callable[[int, int], None]


class Display:
    """Shows nothing at all."""

    shows_bars = False

    def note(self, line: str) -> None:
        """A line that stays."""

    def close(self, line: str) -> None:
        """The last line."""
        self.note(line)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Say what is going on while it goes on."""
        yield

    @contextlib.contextmanager
    def warnings(self, name: str) -> Iterator[None]:
        """Show the warnings of this logger meanwhile, in place of those who would otherwise."""
        logger, handler = logging.getLogger(name), _Warnings(self.note)
        before, logger.propagate = logger.propagate, False
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = before

    @contextlib.contextmanager
    def downloads(self) -> Iterator[Report | None]:
        """What to tell how many bytes of a download have come."""
        yield None

    @contextlib.contextmanager
    def reading(self, progress: Progress) -> Iterator[None]:
        """Between the two, `progress` is called."""
        yield

    def progress(self, progress: Progress) -> None:
        """How far the prompt has been read."""

    def cancelling(self) -> None:
        """The request will end before its next step. For a signal handler: only takes note."""


class LineDisplay(Display):
    """Plain lines without control codes, for a log or a pipe."""

    _EVERY_S = 5.0
    _EVERY_FRACTION = 0.1

    def __init__(self) -> None:
        self._shown: Progress | None = None
        self._shown_at = 0.0

    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def downloads(self) -> Iterator[Report | None]:
        is_noted = False

        def report(num_done: int, num_bytes: int) -> None:
            nonlocal is_noted
            if not is_noted:
                self.note(download_line(num_bytes))
            is_noted = True

        yield report

    def progress(self, progress: Progress) -> None:
        now, shown = time.monotonic(), self._shown
        is_due = (
            shown is None
            or is_complete(progress)
            or now - self._shown_at >= self._EVERY_S
            or progress.num_done - shown.num_done >= self._EVERY_FRACTION * progress.num_tokens
        )
        if is_due:
            self._shown, self._shown_at = progress, now
            self.note(f"prefill {progress_facts(progress)}")


class TerminalDisplay(Display):
    """A spinner, then a bar. They are drawn by a thread of rich's and only read what is noted here."""

    shows_bars = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._read: Progress | None = None
        self._read_at = 0.0
        self._is_cancelling = False

    def note(self, line: str) -> None:
        self._console.print(Text(line, style="dim"))

    def close(self, line: str) -> None:
        self._console.print()
        self.note(line)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        with self._console.status(Text(what)):
            yield

    @contextlib.contextmanager
    def downloads(self) -> Iterator[Report | None]:
        status = self._console.status("")
        is_noted = False

        def report(num_done: int, num_bytes: int) -> None:
            nonlocal is_noted
            if not is_noted:
                self.note(download_line(num_bytes))
                status.start()
            is_noted = True
            status.update(Text(f"{num_done / 1e6:.0f} of {num_bytes / 1e6:.0f} MB"))

        try:
            yield report
        finally:
            status.stop()

    @contextlib.contextmanager
    def reading(self, progress: Progress) -> Iterator[None]:
        self._read, self._read_at = progress, time.monotonic()
        width = min(max(self._console.width - 62, 4), 40)
        facts = _Facts(self._facts, table_column=Column(no_wrap=True))
        bar = Bar(
            TextColumn("prefill", table_column=Column(no_wrap=True, min_width=7)),
            BarColumn(width),
            facts,
            console=self._console,
        )
        self._task = bar.add_task("", total=progress.num_tokens, completed=progress.num_done)
        with bar:
            self._bar = bar
            try:
                yield
            finally:
                self._bar = None

    def progress(self, progress: Progress) -> None:
        self._read, self._read_at = progress, time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.num_done)
            if is_complete(progress):
                self._bar.stop()  # text may follow at once
                self._console.print()

    def cancelling(self) -> None:
        self._is_cancelling = True

    def _facts(self) -> str:
        assert self._read is not None
        facts = progress_facts(self._read, time.monotonic() - self._read_at)
        return f"{facts}, stopping after this chunk" if self._is_cancelling else facts


class _Warnings(logging.Handler):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(f"penstock: warning: {record.getMessage()}")


class _Facts(ProgressColumn):
    def __init__(self, facts: Callable[[], str], table_column: Column) -> None:
        super().__init__(table_column)
        self._facts = facts

    def render(self, task: Task) -> Text:
        return Text(self._facts())


def download_line(num_bytes: int) -> str:
    return f"downloading the model, {num_bytes / 1e6:.0f} MB, to be kept in {cache_home()}"


def make_display(quiet: bool = False) -> Display:
    """The display that suits standard error."""
    if quiet or sys.stderr is None:
        return Display()
    console = Console(stderr=True, highlight=False)
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        return LineDisplay()
    return TerminalDisplay(console)
