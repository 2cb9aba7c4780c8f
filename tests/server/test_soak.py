"""A short soak of a model with attention and of a hybrid; and that a soak finds what is broken."""

import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cache import SequenceCache
from penstock.engine.batcher import Batcher
from penstock.engine.events import Event, Finished
from penstock.engine.job import Job
from penstock.engine.llm import LLM
from penstock.engine.status import RequestSummary
from penstock.frontends.server.metrics import Telemetry
from penstock.frontends.server.requests import RequestBuilder
from penstock.models.decoder import Decoder
from tests.server.soak import PHASES, Report, Soak, load_model, prepare, soak
from tests.server.soak_cases import Case, Sizes
from tests.server.soak_clients import Tally

# `make soak` has more of each.
WHOLE = Soak(5.0, sizes=Sizes(prompt=1200, answer=160, num_cases=12), cache_tokens=1472)
# Long enough for a fault to show.
SHORT = Soak(
    1.5,
    num_clients=6,
    num_held=0,
    phases=PHASES[:1],
    max_rounds=1,
    sizes=Sizes(prompt=300, answer=40, num_cases=8),
    rest_s=1.5,
)


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_soak(name: str, tmp_path: Path) -> None:
    llm = load_model(name, tmp_path)
    report = soak(llm, WHOLE, prepare(llm, WHOLE))
    print("\n".join(report.lines()))
    assert report.failures == []
    assert report.unseen == []


@pytest.fixture(scope="module")
def cases(llm: LLM) -> list[Case]:
    return prepare(llm, SHORT)


def check_finds(llm: LLM, cases: list[Case], *wanted: str, how: Soak = SHORT) -> None:
    """A soak tells of these, if not at once then a longer one, of other clients: on a slow machine the first is over
    when it has hardly begun."""
    for trial in range(6):
        longer = replace(how, seconds=how.seconds * 2**trial, seed=how.seed + trial)
        found = "\n".join(soak(llm, longer, cases).failures)
        if all(re.search(what, found) for what in wanted):
            return
    pytest.fail(f"{' and '.join(wanted)} not found in: {found}")


def test_what_is_whole_is_found_whole(llm: LLM, cases: list[Case]) -> None:
    assert soak(llm, replace(SHORT, rest_s=60.0), cases).failures == []


def test_what_was_not_seen_is_told() -> None:
    tally = Tally()
    report = Report(tally, (), 1.0)
    assert {"429s", "preemptions", "answers compared"} < set(report.unseen)
    assert "NOT SEEN: 429s" in [line.strip() for line in report.lines()]
    tally.count("429s")
    assert "429s" not in report.unseen
    assert report.failures == []


def test_a_lost_block_is_found(llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    free = SequenceCache.free
    num_calls = 0

    def leak(self: SequenceCache) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 20 != 1:
            free(self)

    monkeypatch.setattr(SequenceCache, "free", leak)
    check_finds(llm, cases, r"blocks are (still used|held, but)")


def test_a_wrong_answer_is_found(llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Decoder.forward

    def disturb(self: Decoder, batch: Any, caches: Any) -> torch.Tensor | None:
        """As if a row beside others had a little of them in it."""
        logits = forward(self, batch, caches)
        return logits if logits is None or len(logits) < 3 else logits + 0.5 * logits.roll(1, 0)

    monkeypatch.setattr(Decoder, "forward", disturb)
    check_finds(llm, cases, "alone it is")


def test_log_probabilities_that_are_off_are_found(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Job.choose
    monkeypatch.setattr(Job, "choose", lambda self, logits: choose(self, logits * 1.01))
    only = [case for case in cases if case.kind == "logprobs"]
    check_finds(llm, only, "log-probabilities differ")


def test_an_answer_that_never_ends_is_found(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Batcher._tell

    def forget(self: Batcher, job: Job, event: Event) -> None:
        if not isinstance(event, Finished) or event.reason != "stop":
            tell(self, job, event)

    monkeypatch.setattr(Batcher, "_tell", forget)
    how = replace(SHORT, seconds=4.0, limit_s=1.5)
    check_finds(llm, cases, r"a client waited for longer than 1\.5 s", how=how)


def test_a_failure_of_the_server_is_found(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: RequestBuilder, *body: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(RequestBuilder, "render", fail)
    check_finds(llm, cases, "was answered with 500", "an error in the log")


def test_a_request_that_ends_uncounted_is_found(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_end = Telemetry.on_end

    def forget(self: Telemetry, summary: RequestSummary) -> None:
        if summary.outcome != "cancelled":
            on_end(self, summary)

    monkeypatch.setattr(Telemetry, "on_end", forget)
    check_finds(llm, cases, "requests were taken, but")


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("thread", "threads stayed: .*stays"),
        ("file", "files or sockets stayed open"),
        ("memory", "memory grew by"),
    ],
)
def test_what_stays_is_found(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch, what: str, found: str
) -> None:
    is_over = threading.Event()
    kept: list[Any] = []
    leaks: dict[str, Callable[[], Any]] = {
        "thread": lambda: threading.Thread(target=is_over.wait, name="stays", daemon=True).start(),
        "file": lambda: kept.append(os.open(os.devnull, os.O_RDONLY)),
        "memory": lambda: kept.append(torch.ones(1 << 18)),
    }
    free = SequenceCache.free

    def leak(self: SequenceCache) -> None:
        leaks[what]()
        free(self)

    monkeypatch.setattr(SequenceCache, "free", leak)
    try:
        check_finds(llm, cases, found, how=replace(SHORT, max_growth_bytes=8 << 20))
    finally:
        is_over.set()
        for item in kept if what == "file" else ():
            os.close(item)
