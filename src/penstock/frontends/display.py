"""What a person sees: progress and notes on standard error, facts as lines, tables."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from penstock.frontends.exits import say
from penstock.home import cache_home
from penstock.plan import format_bytes
from penstock.plan.progress import Progress
from penstock.tables import make_table, table_lines

if TYPE_CHECKING:  # torch comes with these, and a message on the screen should not wait for that
    from penstock.engine.events import ChunkRecord, Generation
    from penstock.engine.llm import LLM

Report = Callable[[int, int], None]


class Display:
    """Shows nothing at all."""

    shows_bars = False
    is_brief = False  # a chat: bars go when they are full, and little is said of an answer

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
        """Show what this logger says meanwhile, in place of those who would otherwise show its warnings."""
        logger, handler = logging.getLogger(name), _Warnings(self.note)
        before = logger.propagate, logger.level
        logger.propagate = False
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = before[0]
            logger.setLevel(before[1])

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
        say(line)

    @contextlib.contextmanager
    def downloads(self) -> Iterator[Report | None]:
        yield _note_once(self)

    @contextlib.contextmanager
    def reading(self, progress: Progress) -> Iterator[None]:
        self._shown = None
        yield

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
        status, note = self._console.status(""), _note_once(self)

        def report(num_done: int, num_bytes: int) -> None:
            note(num_done, num_bytes)
            status.start()
            status.update(Text(f"{num_done / 1e6:.0f} of {num_bytes / 1e6:.0f} MB"))

        try:
            yield report
        finally:
            status.stop()

    @contextlib.contextmanager
    def reading(self, progress: Progress) -> Iterator[None]:
        self._read, self._read_at, self._is_cancelling = progress, time.monotonic(), False
        width = min(max(self._console.width - 62, 4), 40)
        facts = _Facts(self._facts, table_column=Column(no_wrap=True))
        bar = Bar(
            TextColumn("prefill", table_column=Column(no_wrap=True, min_width=7)),
            BarColumn(width),
            facts,
            console=self._console,
            transient=self.is_brief,
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
        super().__init__()
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        kind = "penstock: warning: " if record.levelno >= logging.WARNING else ""
        self._note(f"{kind}{record.getMessage()}")


class _Facts(ProgressColumn):
    def __init__(self, facts: Callable[[], str], table_column: Column) -> None:
        super().__init__(table_column)
        self._facts = facts

    def render(self, task: Task) -> Text:
        return Text(self._facts())


def _note_once(display: Display) -> Report:
    """Tells of a download when it begins."""
    is_noted = False

    def report(num_done: int, num_bytes: int) -> None:
        nonlocal is_noted
        if not is_noted:
            display.note(f"downloading the model, {num_bytes / 1e6:.0f} MB, to be kept in {cache_home()}")
        is_noted = True

    return report


def make_display(quiet: bool = False) -> Display:
    """The display that suits standard error."""
    if quiet or sys.stderr is None:
        return Display()
    console = Console(stderr=True, highlight=False)
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        return LineDisplay()
    return TerminalDisplay(console)


def format_seconds(seconds: float) -> str:
    """0.8 s, 12 s, 1 min 5 s, 2 h 3 min."""
    return f"{seconds:.1f} s" if seconds < 9.95 else format_whole_seconds(seconds)


def format_whole_seconds(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f} tok/s" if tokens_per_s >= 99.5 else f"{tokens_per_s:.1f} tok/s"


def progress_facts(progress: Progress, since_s: float = 0.0) -> str:
    """How far the prompt was read, `since_s` seconds ago, and how long the rest will take from now."""
    facts = [f"{progress.num_done}/{progress.num_tokens} tokens"]
    if progress.chunks_done:
        facts.append(format_rate(progress.tokens_per_s))
    facts.append(f"chunk {progress.chunks_done}/{progress.num_chunks}")
    if is_complete(progress):
        facts.append(format_seconds(progress.elapsed_s))
    elif progress.eta_s is not None:
        facts.append(f"ETA {format_whole_seconds(max(progress.eta_s - since_s, 0.0))}")
    return ", ".join(facts)


def cached_line(progress: Progress) -> str:
    """How much of a prompt need not be read."""
    return f"{progress.num_cached:,} of {progress.num_tokens:,} tokens were in the cache: reading goes on from there"


def device_line(llm: "LLM") -> str:
    """Where a model runs, what it computes in, and how its weights lie there, where that was chosen."""
    dtype = str(llm.model.dtype).removeprefix("torch.")
    weights = f"; weights {llm.weights.reason}" if llm.weights.reason else ""
    activations = llm.settings.activations
    rounded = f"; activations {activations.effective} ({activations.reason})" if activations.reason else ""
    device = f"device {llm.device.name} ({llm.device.reason})"
    return f"{device}, {llm.model.kernels.name} kernels, {dtype}{weights}{rounded}"


def is_complete(progress: Progress) -> bool:
    return progress.num_done == progress.num_tokens


def closing_line(result: "Generation", progress: Progress, *, is_brief: bool = False) -> str:
    """What a finished or cancelled request did, and at what cost."""
    timings, prefill = result.timings, result.prefill
    facts = []
    if is_complete(progress):
        cached = f", {progress.num_cached} of them cached" if progress.num_cached else ""
        facts += [_count(result.usage.prompt_tokens, "prompt token") + cached, _answer(result)]
        if timings.time_to_first_token_s is not None:
            facts += [f"first token after {format_seconds(timings.time_to_first_token_s)}"]
    else:
        facts += [f"cancelled after {progress.num_done} of {progress.num_tokens} prompt tokens"]
    if progress.chunks_done and not is_brief:
        facts.append(f"prefill {format_rate(timings.prefill_tokens_per_s)}")
    if timings.decode_tokens_per_s is not None:
        facts.append(f"decode {format_rate(timings.decode_tokens_per_s)}")
    if not is_brief:
        facts.append(f"chunk {prefill.effective} ({prefill.reason})")
        facts.append(f"peak memory {format_bytes(result.memory.peak_resident_bytes)}")
    return ", ".join(facts)


def _answer(result: "Generation") -> str:
    count = _count(result.usage.completion_tokens, "answer token")
    if result.finish_reason == "cancelled":
        return f"cancelled after {count}"
    return f"{count} (the limit)" if result.finish_reason == "length" else count


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_EXPLAIN_TITLES = (
    "chunk",
    "tokens",
    "past",
    "decodes",
    "set by",
    "predicted",
    "measured",
    "memory",
    "measured",
    "",
)


def explain_lines(records: Sequence["ChunkRecord"]) -> list[str]:
    """The chunks of a prompt as a table: how long each was, why, what was expected of it and what came. A dash is for
    what was not known; memory that was measured has a column where any was."""
    rows = [
        (
            str(index),
            str(len(record)),
            str(record.past),
            str(record.num_decodes),
            record.rule,
            _milliseconds(record.predicted_s),
            _milliseconds(record.measured_s),
            _bytes(record.predicted_bytes),
            _bytes(record.measured_bytes),
            record.because,
        )
        for index, record in enumerate(records, 1)
    ]
    has_memory = any(record.measured_bytes is not None for record in records)
    shown = [row if has_memory else (*row[:-2], row[-1]) for row in (_EXPLAIN_TITLES, *rows)]
    return table_lines(make_table(shown[0], shown[1:], left={4, len(shown[0]) - 1}))


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.1f} ms" if seconds < 0.0995 else f"{1000 * seconds:.0f} ms"


def _bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)
