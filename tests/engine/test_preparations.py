"""A service prepares for requests while it has none, and is never kept from one by that."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.engine.events import Finished, GenerationRequest
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.plan.policy import ScheduleConfig
from tests.byte_models import model_of_bytes
from tests.engine.listening import PATIENCE_S
from tests.oracle import random_prompt

REQUEST = GenerationRequest(random_prompt(20), 3)
CONFIG = ServiceConfig(ScheduleConfig(chunk_size=64, max_running=2), 1024)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("models") / "llama"
    return LLM(model_of_bytes("llama", folder), dtype="float32", chunk=64)


class Pieces:
    """Preparations in some pieces, each of which takes until it is allowed to end."""

    def __init__(self, num_pieces: int, *, fails: bool = False) -> None:
        self.allowed = threading.Semaphore(0)
        self.begun, self.ended = threading.Semaphore(0), threading.Event()
        self.num_done = 0
        self.asked: list[object] = []
        self._num_pieces, self._fails = num_pieces, fails

    def __call__(self, *asked: object) -> Iterator[None]:
        self.asked += asked
        for _ in range(self._num_pieces):
            self.begun.release()
            assert self.allowed.acquire(timeout=PATIENCE_S)
            if self._fails:
                raise RuntimeError("no plan could be made")
            self.num_done += 1
            yield
        self.ended.set()


def wait_until(is_so: Callable[[], bool]) -> None:
    gives_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < gives_up_s, "it did not come"
        time.sleep(0.001)


def serving(llm: LLM, pieces: Pieces, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(llm.model.kernels, "preparations", pieces)
    return Service(llm, CONFIG)


def test_all_is_prepared_while_nothing_is_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Pieces(3)
    with serving(llm, pieces, monkeypatch):
        pieces.allowed.release(3)
        assert pieces.ended.wait(PATIENCE_S)
    assert pieces.num_done == 3
    num_rows, num_heads, kv, _ = pieces.asked
    assert (num_rows, num_heads) == (64, llm.model.config.num_heads)
    assert len(kv.keys) == 1024  # type: ignore[attr-defined]


def test_a_request_waits_for_one_piece_at_most(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Pieces(100)
    with serving(llm, pieces, monkeypatch) as service:
        assert pieces.begun.acquire(timeout=PATIENCE_S)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(service.run(REQUEST)))
        asking.start()
        wait_until(lambda: bool(service.status().requests))
        pieces.allowed.release(1)
        asking.join(PATIENCE_S)
        assert isinstance(answers[0][-1], Finished)
        assert pieces.num_done == 1
        pieces.allowed.release(100)


def test_what_cannot_be_prepared_keeps_nobody_from_an_answer(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = Pieces(3, fails=True)
    pieces.allowed.release(3)
    with serving(llm, pieces, monkeypatch) as service:
        assert pieces.begun.acquire(timeout=PATIENCE_S)
        assert isinstance(service.run(REQUEST)[-1], Finished)
        assert isinstance(service.run(REQUEST)[-1], Finished)
        assert service.is_healthy
    assert caplog.text.count("preparing for requests failed") == 1
    assert pieces.num_done == 0


def test_a_service_closes_before_all_is_prepared(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Pieces(100)
    service = serving(llm, pieces, monkeypatch)
    assert pieces.begun.acquire(timeout=PATIENCE_S)
    closing = threading.Thread(target=service.close)
    closing.start()
    wait_until(lambda: service.is_closing)
    pieces.allowed.release(1)
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert pieces.num_done == 1
