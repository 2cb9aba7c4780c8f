"""A stage that dies, hangs or is cut off costs time, and nothing else: every answer arrives, with the same tokens."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.batcher import MOST_LOSSES
from penstock.engine.events import Event, Failed, Finished, GenerationRequest, TokenGenerated
from penstock.engine.fingerprint import processor_features
from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.engine.stages import joining, worker
from penstock.engine.stages.control import Listener, new_token
from penstock.engine.stages.header import HeaderError, HeaderLimits, read_header
from penstock.engine.stages.link import Link
from penstock.engine.stages.pipeline import Pipeline
from penstock.engine.stages.workers import LocalWorker, run_worker
from penstock.engine.status import ServiceStatus
from penstock.errors import StageFailedError, StageRefusedError
from penstock.frontends.server.metrics import Telemetry
from penstock.frontends.server.settings import ServerSettings
from penstock.layers.forward_batch import ForwardBatch
from penstock.plan import ScheduleConfig
from tests.engine.stages.test_workers import wait_until_gone
from tests.engine.stages.threads import ThreadWorker, workers_as_threads
from tests.engine.test_stages import FAMILIES, folder_of
from tests.oracle import random_prompt
from tests.server.running import running

BEGIN = random_prompt(128, vocab_size=256)
REQUESTS = [
    GenerationRequest((*BEGIN, *random_prompt(num, vocab_size=256, seed=num)), 24, ignore_eos=True)
    for num in (40, 3, 64, 100)
]
STAGE_TIMEOUT_S = 1.5


CONFIG = ServiceConfig(ScheduleConfig(chunk_size=64, grid=64), cache_tokens=64 * 48, strict=True)


def staged(family: str = "llama", stages: int | str = 3, **settings: Any) -> LLM:
    given = {"dtype": "bfloat16", "chunk": 64, "device": "cpu", "stage_timeout": STAGE_TIMEOUT_S, **settings}
    return LLM(folder_of(family), stages=stages, **given)


@contextmanager
def serving(family: str = "llama", stages: int | str = 3, **settings: Any) -> Iterator[Service]:
    with staged(family, stages, **settings) as llm, Service(llm, CONFIG) as service:
        yield service


class Asked:
    """Requests at once, and their tokens."""

    def __init__(self, service: Service, requests: Sequence[GenerationRequest] = REQUESTS) -> None:
        self.events: list[list[Event]] = [[] for _ in requests]
        self.num_tokens = 0
        self._over = threading.Semaphore(0)
        self.names = [
            service.submit(request, partial(self._listen, events))
            for request, events in zip(requests, self.events, strict=True)
        ]

    def _listen(self, events: list[Event], event: Event) -> None:
        events.append(event)
        self.num_tokens += isinstance(event, TokenGenerated)
        if isinstance(event, Finished | Failed):
            self._over.release()

    def wait(self) -> None:
        for _ in self.events:
            assert self._over.acquire(timeout=120), "an answer does not arrive"

    def tokens(self) -> list[list[int]]:
        """To their ends, which are well."""
        self.wait()
        assert all(isinstance(events[-1], Finished) for events in self.events)
        return [[each.token for each in events if isinstance(each, TokenGenerated)] for events in self.events]


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def undisturbed(family: str) -> list[list[int]]:
    with serving(family, 1) as service:
        return Asked(service).tokens()


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_same_whenever_a_worker_goes(family: str) -> None:
    expected, chosen = undisturbed(family), random.Random(family)
    with workers_as_threads(), serving(family) as service:
        assert service.llm.stages is not None
        for _ in range(3):
            asked, when = Asked(service), chosen.randrange(90)
            wait_for(lambda asked=asked, when=when: asked.num_tokens >= when)  # type: ignore[misc]
            place = service.llm.stages.places[chosen.randrange(2)]
            assert isinstance(place, ThreadWorker)
            place.kill()
            assert asked.tokens() == expected
            service.check_integrity()
        restarts = sum(stage.num_restarts for stage in service.status().stages)
        assert restarts == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_are_cancelled_in_flight_leave_the_others_as_they_are(family: str) -> None:
    expected = undisturbed(family)
    long = [replace(request, max_tokens=700) for request in REQUESTS[2:]]
    with workers_as_threads(), serving(family) as service:
        for when in (0, 1, 30, 90):
            asked = Asked(service, [*REQUESTS[:2], *long])
            wait_for(lambda asked=asked, when=when: asked.num_tokens >= when)  # type: ignore[misc]
            for name in asked.names[2:]:
                service.cancel(name)
            found = asked.tokens()
            assert found[:2] == expected[:2]
            for tokens, whole in zip(found[2:], expected[2:], strict=True):
                assert tokens[: len(whole)] == whole[: len(tokens)]
                assert len(tokens) < 700
            service.check_integrity()


def test_a_worker_that_goes_while_nothing_runs_is_replaced_at_once() -> None:
    with workers_as_threads(), serving() as service:
        place = service.llm.stages.places[1]  # type: ignore[union-attr]
        assert isinstance(place, ThreadWorker)
        place.kill()
        wait_for(lambda: service.status().stages[1].num_restarts == 1 and service.missing is None)


def test_a_request_that_a_stage_is_lost_with_again_and_again_ends_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker takes a step for none of its driver's, and ends: the request at fault is tried a few times."""
    num_refused = 0

    def refuse(data: bytearray, limits: HeaderLimits) -> ForwardBatch:
        nonlocal num_refused
        batch = read_header(data, limits)
        if batch.end_position > 250:
            num_refused += 1
            raise HeaderError("as the test wants it")
        return batch

    monkeypatch.setattr(worker, "read_header", refuse)
    long = GenerationRequest((*BEGIN, *random_prompt(200, vocab_size=256)), 4, ignore_eos=True)
    with workers_as_threads():
        with serving(stages=2) as service:
            asked = Asked(service, [REQUESTS[1], long])
            asked.wait()
            short, failed = (events[-1] for events in asked.events)
            assert isinstance(short, Finished)
            assert isinstance(failed, Failed)
            assert isinstance(failed.error, StageFailedError)
            assert "as the test wants it" in failed.error.reason
            assert MOST_LOSSES <= num_refused <= 3 * MOST_LOSSES  # of each loss, some steps in flight
            assert isinstance(service.run(REQUESTS[1])[-1], Finished)
            service.check_integrity()
        with staged(stages=2) as llm, pytest.raises(StageFailedError):
            llm.generate(long.token_ids, max_tokens=4)


def test_a_worker_that_comes_back_as_another_is_refused_until_it_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = undisturbed("llama")
    with workers_as_threads(), serving() as service:
        asked, place = Asked(service), service.llm.stages.places[0]  # type: ignore[union-attr]
        assert isinstance(place, ThreadWorker)
        monkeypatch.setattr(joining, "weights_state", lambda _: "others")
        place.kill()
        wait_for(lambda: isinstance(service.missing, StageRefusedError))
        time.sleep(1.2)  # it is tried again
        assert isinstance(service.missing, StageRefusedError)
        monkeypatch.undo()
        assert asked.tokens() == expected


@pytest.mark.parametrize("hop", [0, 1])
def test_a_link_that_falls_silent_is_noticed_though_both_ends_hear_the_driver(
    hop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, senders, made = undisturbed("llama"), [], Link.__init__

    def remember(self: Link, *arguments: Any, sends: bool, **settings: Any) -> None:
        made(self, *arguments, sends=sends, **settings)
        if sends:
            senders.append(self)

    monkeypatch.setattr(Link, "__init__", remember)
    with workers_as_threads(), serving() as service:
        stages = service.llm.stages
        assert stages is not None
        asked, began, generation = Asked(service), time.monotonic(), stages.generation
        monkeypatch.setattr(senders[hop], "send", lambda *_: None)  # nothing goes over it any more
        monkeypatch.setattr(senders[hop]._beats, "_send", lambda *_: None)
        wait_for(lambda: stages.lost is not None or stages.generation > generation)
        assert time.monotonic() - began < STAGE_TIMEOUT_S + 1
        assert asked.tokens() == expected
        restarts = [stage.num_restarts for stage in service.status().stages]
        assert (restarts[0], restarts[-1]) == (0, 0)  # they were there all the time


def processes(service: Service) -> list[LocalWorker]:
    assert service.llm.stages is not None
    return [place for place in service.llm.stages.places if isinstance(place, LocalWorker)]


def test_processes_that_are_killed_or_stopped_are_replaced(tmp_path: Path) -> None:
    expected, chosen = undisturbed("llama"), random.Random(1)
    with serving(stages=3, threads=1) as service:
        pids = []
        for how in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            asked, when = Asked(service), chosen.randrange(60)
            wait_for(lambda asked=asked, when=when: asked.num_tokens >= when)  # type: ignore[misc]
            pid = chosen.choice(processes(service)).pid
            assert pid is not None
            pids.append(pid)
            began = time.monotonic()
            os.kill(pid, how)
            wait_for(lambda: service.missing is not None)
            assert time.monotonic() - began < STAGE_TIMEOUT_S + 1
            assert asked.tokens() == expected
            service.check_integrity()
        pids += [place.pid for place in processes(service) if place.pid is not None]
    for pid in pids:
        wait_until_gone(pid)


def test_health_and_metrics_name_the_stage_that_is_missing(tmp_path: Path) -> None:
    token, token_file = new_token(), tmp_path / "token"
    token_file.write_bytes(token)
    token_file.chmod(0o600)
    listener = Listener("127.0.0.1:0", token)
    address = str(listener.address)

    def serve(listener: Listener) -> None:
        threading.Thread(target=run_worker, args=(listener,), daemon=True).start()

    serve(listener)
    with (
        staged(stages=address, token_file=token_file) as llm,
        running(llm, ServerSettings("tiny"), CONFIG) as server,
    ):
        service = server.service
        expected = Asked(service).tokens()
        assert server.ask("GET", "/health").json["status"] == "ok"
        listener.close()  # nobody takes its place
        assert service.llm.stages is not None
        service.llm.stages._peers[0].control.close()
        service.llm.stages._lose(service.llm.stages._peers[0].control._lost())
        wait_for(lambda: service.missing is not None and "refused" in service.missing.reason)
        reply = server.ask("GET", "/health")
        assert reply.status == 503
        assert reply.json["status"] == "waiting"
        assert (reply.json["missing"]["stage"], reply.json["missing"]["address"]) == (0, address)
        asked = Asked(service)  # it waits
        status = server.ask("GET", "/status").json
        assert address in status["missing"]
        assert [stage["trouble"] is None for stage in status["stages"]] == [False, True]
        assert 'penstock_stage_up{stage="0"} 0.0' in server.ask("GET", "/metrics").body.decode()
        serve(Listener(address, token))
        assert asked.tokens() == expected
        assert server.ask("GET", "/health").status == 200
        metrics = server.ask("GET", "/metrics").body.decode()
        assert 'penstock_stage_up{stage="0"} 1.0' in metrics
        assert 'penstock_stage_restarts_total{stage="0"} 1.0' in metrics
        steps = server.ask("GET", "/status").json["steps"]
        assert all(len(step["stages"]) == 2 for step in steps)
        assert any(seconds for seconds in steps[0]["stages"])


def test_without_stages_there_are_no_metrics_of_them() -> None:
    with serving(stages=1) as service:
        status: ServiceStatus = service.status()
        assert status.stages == ()
        assert b"penstock_stage" not in Telemetry().render(status)


def test_a_service_that_waits_for_a_stage_can_be_closed() -> None:
    with pytest.MonkeyPatch.context() as patch, workers_as_threads(), serving() as service:
        asked = Asked(service)
        place = service.llm.stages.places[0]  # type: ignore[union-attr]
        assert isinstance(place, ThreadWorker)

        def refuse(self: Pipeline, stage: int) -> None:
            raise StageRefusedError(stage, "host", "as the test wants it")

        patch.setattr(Pipeline, "reopen", refuse)
        place.kill()
        wait_for(lambda: isinstance(service.missing, StageRefusedError))
        began = time.monotonic()
        service.close()
        assert time.monotonic() - began < 5
        assert all(isinstance(events[-1], Finished) for events in asked.events)


def test_workers_that_differ_are_refused_by_name_or_their_results_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features, mine = processor_features, threading.current_thread()

    def other_elsewhere() -> dict[str, str]:
        is_worker = threading.current_thread().name.startswith("Thread-")
        return features() | ({"ONEDNN_MAX_CPU_ISA": "AVX2"} if is_worker else {})

    assert not mine.name.startswith("Thread-")
    monkeypatch.setattr(joining, "processor_features", other_elsewhere)
    settings = {"dtype": "bfloat16", "device": "cpu", "stages": 2}
    with workers_as_threads():
        with pytest.raises(StageRefusedError, match=r"stage 0 .* other processor .*--mixed"):
            LLM(folder_of("llama"), **settings)  # type: ignore[arg-type]
        with LLM(folder_of("llama"), mixed=True, **settings) as llm:  # type: ignore[arg-type]
            assert not llm.generate(BEGIN, max_tokens=2).prefill.same_bits
        monkeypatch.undo()
    with workers_as_threads(), LLM(folder_of("llama"), **settings) as llm:  # type: ignore[arg-type]
        assert llm.generate(BEGIN, max_tokens=2).prefill.same_bits == llm.probe.same_bits


def test_nothing_is_left_of_a_driver_that_is_killed() -> None:
    code = f"""
        import time
        from penstock.engine.llm import LLM
        llm = LLM({str(folder_of("llama"))!r}, stages=3, device="cpu", dtype="bfloat16", threads=1)
        print(*(place.pid for place in llm.stages.places), flush=True)
        for _ in range(1000):
            llm.generate(list(range(200)), max_tokens=50, ignore_eos=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        time.sleep(0.5)  # in the middle of steps
        driver.kill()
    assert len(pids) == 2
    for pid in pids:
        wait_until_gone(pid)
