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
from penstock.frontends.server.asks import Asker
from penstock.frontends.server.telemetry import Telemetry
from penstock.models.decoder import Decoder
from tests.server.soak import PHASES, Soak, load_model, prepare, soak
from tests.server.soak_cases import Case, Sizes

SECONDS = 12
# Long enough for a fault to show.
SHORT = Soak(
    1.5,
    num_clients=6,
    phases=PHASES[:1],
    max_rounds=1,
    sizes=Sizes(prompt=300, answer=40, num_cases=8),
    rest_s=1.5,
)


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_soak(name: str, tmp_path: Path) -> None:
    llm, how = load_model(name, tmp_path), Soak(SECONDS, sizes=Sizes(num_cases=16))
    report = soak(llm, how, prepare(llm, how))
    print("\n".join(report.lines()))
    assert report.failures == []
    assert report.unseen == []


@pytest.fixture(scope="module")
def cases(llm: LLM) -> list[Case]:
    return prepare(llm, SHORT)


def failures_of(llm: LLM, cases: list[Case], how: Soak = SHORT) -> str:
    """In lines."""
    return "\n".join(soak(llm, how, cases).failures)


def test_what_is_whole_is_found_whole(llm: LLM, cases: list[Case]) -> None:
    report = soak(llm, replace(SHORT, rest_s=20.0), cases)
    assert report.failures == []
    assert "429s" in report.unseen  # too few clients to fill the queue


def test_a_lost_block_is_found(llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    free = SequenceCache.free
    num_calls = 0

    def leak(self: SequenceCache) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 20:
            free(self)

    monkeypatch.setattr(SequenceCache, "free", leak)
    assert re.search(r"blocks are (still used|held, but)", failures_of(llm, cases))


def test_a_wrong_answer_is_found(llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Decoder.forward

    def disturb(self: Decoder, batch: Any, caches: Any) -> torch.Tensor | None:
        """As if a row beside others had a little of them in it."""
        logits = forward(self, batch, caches)
        return logits if logits is None or len(logits) < 3 else logits + 0.5 * logits.roll(1, 0)

    monkeypatch.setattr(Decoder, "forward", disturb)
    assert "alone it is" in failures_of(llm, cases)


def test_log_probabilities_that_are_off_are_found(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Job.choose
    monkeypatch.setattr(Job, "choose", lambda self, logits: choose(self, logits * 1.01))
    only = [case for case in cases if case.kind == "logprobs"]
    assert "log-probabilities differ" in failures_of(llm, only)


def test_an_answer_that_never_ends_is_found(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Batcher._tell

    def forget(self: Batcher, job: Job, event: Event) -> None:
        if not isinstance(event, Finished) or event.reason != "stop":
            tell(self, job, event)

    monkeypatch.setattr(Batcher, "_tell", forget)
    found = failures_of(llm, cases, replace(SHORT, seconds=4.0, limit_s=1.5))
    assert "a client waited for longer than 1.5 s" in found


def test_a_failure_of_the_server_is_found(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Asker, body: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Asker, "chat", fail)
    found = failures_of(llm, cases)
    assert "was answered with 500" in found
    assert "an error in the log" in found


def test_a_request_that_ends_uncounted_is_found(
    llm: LLM, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_end = Telemetry.on_end

    def forget(self: Telemetry, summary: RequestSummary) -> None:
        if summary.outcome != "cancelled":
            on_end(self, summary)

    monkeypatch.setattr(Telemetry, "on_end", forget)
    assert "requests were taken, but" in failures_of(llm, cases)


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("thread", "threads stayed: stays"),
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
        "memory": lambda: kept.append(torch.ones(1 << 20)),
    }
    free = SequenceCache.free

    def leak(self: SequenceCache) -> None:
        leaks[what]()
        free(self)

    monkeypatch.setattr(SequenceCache, "free", leak)
    try:
        assert found in failures_of(llm, cases)
    finally:
        is_over.set()
        for item in kept if what == "file" else ():
            os.close(item)
