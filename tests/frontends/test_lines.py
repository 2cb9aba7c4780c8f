"""What people are told reads well at every size."""

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.engine.events import Generation, MemoryReport, PrefillReport, Timings, Usage
from penstock.frontends.display import (
    LineDisplay,
    TerminalDisplay,
    cached_line,
    closing_line,
    format_rate,
    format_seconds,
    progress_facts,
)
from penstock.plan import STATE_GRID, resolve_chunk_size
from penstock.plan.progress import PrefillClock, Progress

HALF = Progress(num_done=1024, num_tokens=4311, chunks_done=2, num_chunks=9, elapsed_s=1.3, eta_s=4.4)
WHOLE = Progress(num_done=4311, num_tokens=4311, chunks_done=9, num_chunks=9, elapsed_s=5.5, eta_s=0.0)
RESULT = Generation(
    text="Yes.",
    token_ids=(1, 2, 3),
    finish_reason="stop",
    usage=Usage(4311, 3),
    timings=Timings(1.0, 5.5, 5.5, 0.1, 783.8, 25.04),
    prefill=PrefillReport("default", 512, "default", "default", 0, 9, True),
    memory=MemoryReport(100, 100, 700 * 2**20),
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.0, "59 min 59 s"),
        (3599.9, "1 h 0 min"),
        (7384.0, "2 h 3 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rates() -> None:
    assert [format_rate(rate) for rate in (0.04, 9.96, 99.6, 1234.5)] == [
        "0.0 tok/s",
        "10.0 tok/s",
        "100 tok/s",
        "1234 tok/s",
    ]


def test_progress() -> None:
    assert progress_facts(PrefillClock(4311, 9).progress()) == "0/4311 tokens, chunk 0/9"
    assert progress_facts(HALF) == "1024/4311 tokens, 788 tok/s, chunk 2/9, ETA 4 s"
    assert progress_facts(HALF, since_s=60) == "1024/4311 tokens, 788 tok/s, chunk 2/9, ETA 0 s"
    assert progress_facts(WHOLE) == "4311/4311 tokens, 784 tok/s, chunk 9/9, 5.5 s"


def test_what_was_in_the_cache_is_told_and_took_no_time() -> None:
    clock = PrefillClock(20_000, 15)
    clock.skip(12_800)
    assert progress_facts(clock.progress()) == "12800/20000 tokens, chunk 0/15"
    clock.record(12_800, 13_312, 1.0)
    assert progress_facts(clock.progress()).startswith("13312/20000 tokens, 512 tok/s, chunk 1/15, ETA ")
    said = "12,800 of 20,000 tokens were in the cache: reading goes on from there"
    assert cached_line(clock.progress()) == said
    all_read = replace(WHOLE, num_cached=4000)
    assert closing_line(RESULT, all_read).startswith(
        "4311 prompt tokens, 4000 of them cached, 3 answer tokens, "
    )


def test_a_bar_begins_with_what_was_in_the_cache() -> None:
    clock = PrefillClock(100, 4)
    clock.skip(64)
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    display = TerminalDisplay(console)
    with display.reading(clock.progress()):
        pass
    assert isinstance(console.file, io.StringIO)
    assert "64/100 tokens, chunk 0/4" in console.file.getvalue()
    [drawn] = re.findall("[━╸]+", console.file.getvalue().splitlines()[0])[:1]
    assert len(drawn) == pytest.approx(0.64 * 38, abs=1)


def test_closing_line() -> None:
    assert closing_line(RESULT, WHOLE) == (
        "4311 prompt tokens, 3 answer tokens, first token after 5.5 s, prefill 784 tok/s, decode 25.0 tok/s, "
        "chunk 512 (default), peak memory 700.0 MiB"
    )
    short = replace(RESULT, usage=Usage(1, 1))
    assert closing_line(short, WHOLE).startswith("1 prompt token, 1 answer token, first token")
    cut = replace(RESULT, finish_reason="length")
    assert "3 answer tokens (the limit)" in closing_line(cut, WHOLE)
    cancelled = replace(
        RESULT, finish_reason="cancelled", timings=replace(RESULT.timings, decode_tokens_per_s=None)
    )
    assert "cancelled after 3 answer tokens, first token" in closing_line(cancelled, WHOLE)
    early = closing_line(cancelled, HALF)
    assert early.startswith("cancelled after 1024 of 4311 prompt tokens, prefill ")
    assert "first token" not in early
    assert "decode" not in early


def test_a_chunk_that_was_rounded_is_explained() -> None:
    setting = resolve_chunk_size("100", environ={}, grid=STATE_GRID)
    prefill = replace(RESULT.prefill, requested="100", effective=setting.effective, reason=setting.reason)
    line = closing_line(replace(RESULT, prefill=prefill), WHOLE)
    assert f"chunk 128 ({setting.reason}), peak memory" in line
    assert "rounded up from 100 to 128" in line


@pytest.mark.parametrize("num_chunks", [1, 9, 100, 5000])
def test_lines_come_about_every_tenth(
    num_chunks: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LineDisplay, "_EVERY_S", math.inf)
    display, clock = LineDisplay(), PrefillClock(num_chunks * 7, num_chunks)
    for index in range(num_chunks):
        clock.record(index * 7, (index + 1) * 7, 0.001)
        display.progress(clock.progress())
    lines = capsys.readouterr().err.splitlines()
    assert min(num_chunks, 10) <= len(lines) <= min(num_chunks, 12)
    assert f"chunk {num_chunks}/{num_chunks}" in lines[-1]


def test_a_second_prompt_is_told_of_as_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a chat: what was said of the turn before is not this one's."""
    screen = io.StringIO()
    terminal, lines = TerminalDisplay(Console(file=screen, force_terminal=True, width=120)), LineDisplay()
    for display in (terminal, lines):
        with display.reading(HALF):
            display.progress(WHOLE)
        display.cancelling()
        with display.reading(HALF):
            display.progress(HALF)
    assert "stopping" not in screen.getvalue()
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["4311/4311", "1024/4311"]
    assert "peak" not in closing_line(RESULT, WHOLE, is_brief=True)
