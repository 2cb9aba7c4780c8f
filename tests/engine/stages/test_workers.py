"""Workers start, are divided and pinned, are waited for, and none outlives its driver."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import machine
from penstock.engine.stages.control import Listener, connect, new_token
from penstock.engine.stages.workers import (
    ListeningWorker,
    LocalWorker,
    Ranks,
    StageShare,
    WorkerPlace,
    divide_machine,
    run_worker,
)
from penstock.errors import SettingError, StageLostError

ECHO = "tests.engine.stages.peers:echo"
TIMES = {"timeout_s": 30.0, "stage_timeout_s": 2.0}
TOKEN = new_token()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def is_running(pid: int) -> bool:
    """Whether there is such a process, zombies aside."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is left behind"
        time.sleep(0.02)


@pytest.fixture
def local() -> Iterator[LocalWorker]:
    place = LocalWorker(StageShare(1, frozenset(list(os.sched_getaffinity(0))[:1])), serve=ECHO)
    yield place
    place.close()


@pytest.fixture
def listening() -> Iterator[Listener]:
    with Listener("127.0.0.1:0", TOKEN) as listener:
        threading.Thread(target=run_worker, args=(listener,), kwargs={"serve": ECHO}, daemon=True).start()
        yield listener


def test_a_local_worker_has_its_threads_and_processors_and_shows_no_secret(local: LocalWorker) -> None:
    control = local.open(0, **TIMES)
    hello = control.receive(30).about
    assert hello["pid"] == local.pid
    assert (hello["threads"], len(hello["processors"])) == ("1", 1)
    assert "token" not in Path(f"/proc/{local.pid}/cmdline").read_text()
    control.send("step", {"step": 1}, b"abc")
    assert control.receive(5).data == b"abc"
    control.send("stop")
    assert control.wait_closed(5)
    wait_until_gone(hello["pid"])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_local_worker_that_dies_or_hangs_is_noticed_and_replaced(
    local: LocalWorker, how: signal.Signals
) -> None:
    control = local.open(0, **TIMES)
    first = control.receive(30).about["pid"]
    began = time.monotonic()
    os.kill(first, how)
    with pytest.raises(StageLostError) as lost:
        control.receive(10)
    assert lost.value.stage == 0
    assert time.monotonic() - began < TIMES["stage_timeout_s"] + 1
    control = local.open(0, **TIMES)
    assert control.receive(30).about["pid"] != first
    wait_until_gone(first)


def test_a_failure_is_told_with_its_reason(local: LocalWorker) -> None:
    control = local.open(0, **TIMES)
    control.receive(30)
    control.send("fail")
    message = control.receive(5)
    assert (message.kind, message.about["kind"]) == ("failed", "RuntimeError")


@pytest.mark.parametrize("state", ["idle", "hanging", "stopped"])
def test_no_worker_outlives_a_driver_that_is_killed(state: str) -> None:
    code = f"""
        import time
        from penstock.engine.stages.workers import LocalWorker, StageShare
        control = LocalWorker(StageShare(1), serve={ECHO!r}).open(0, timeout_s=30, stage_timeout_s=30)
        print(control.receive(30).about["pid"], flush=True)
        control.send("hang") if {state!r} == "hanging" else None
        time.sleep(600)
    """
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    with driver:
        pid = int(driver.stdout.readline())
        if state == "stopped":
            os.kill(pid, signal.SIGSTOP)
        driver.kill()
    wait_until_gone(pid)


def test_workers_end_with_the_place(local: LocalWorker) -> None:
    pid = local.open(0, **TIMES).receive(30).about["pid"]
    local.close()
    assert not is_running(pid)


def test_a_listening_worker_serves_one_driver_after_the_other(listening: Listener) -> None:
    for kind in ("fail", "stop", "close"):
        place: WorkerPlace = ListeningWorker(str(listening.address), TOKEN)
        control = place.open(1, **TIMES)
        assert control.receive(30).kind == "hello"
        if kind != "close":
            control.send(kind)
            assert control.wait_closed(5)
        place.close()


def test_an_address_may_be_asked_for_at_each_connection(listening: Listener) -> None:
    addresses = iter([f"127.0.0.1:{free_port()}", str(listening.address)])
    place = ListeningWorker(lambda: next(addresses), TOKEN)
    with pytest.raises(StageLostError):
        place.open(1, timeout_s=0.2, stage_timeout_s=2)
    assert place.open(1, **TIMES).receive(30).kind == "hello"
    place.close()


@pytest.mark.parametrize(
    ("num_stages", "threads", "cores", "expected"),
    [
        # As many threads as the container's share of time is worth, on cores of their own.
        (2, "share of 2", [{0}, {1}, {2}, {3}], [(1, {0}), (1, {1})]),
        (2, None, [{0}, {1}], [(1, {0}), (1, {1})]),
        (2, None, [{0, 4}, {1, 5}, {2, 6}, {3, 7}], [(2, {0, 1, 4, 5}), (2, {2, 3, 6, 7})]),
        (2, 2, [{0}, {1}, {2}, {3}], [(1, {0}), (1, {1})]),
        (2, None, [{0}, {1}, {2}], [(1, {0}), (1, {1})]),
        (4, None, [{0}, {1}], [(1, None)] * 4),
        (2, 8, [{0}, {1}], [(4, None)] * 2),
    ],
)
def test_stages_have_equal_threads_and_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
    num_stages: int,
    threads: int | str | None,
    cores: list[set[int]],
    expected: list[tuple[int, set[int] | None]],
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: [frozenset(core) for core in cores])
    num_usable, threads = (2, None) if isinstance(threads, str) else (len(cores), threads)
    monkeypatch.setattr(machine, "usable_cores", lambda: num_usable)
    assert [(share.threads, share.processors) for share in divide_machine(num_stages, threads)] == expected


def ranks(**changed: str) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **changed}


def test_ranks_are_those_of_the_environment() -> None:
    worker, driver = Ranks.find(ranks()), Ranks.find(ranks(RANK="1"))
    assert worker is not None
    assert driver is not None
    assert (worker.drives, driver.drives) == (False, True)
    assert Ranks.find({}) is None
    assert Ranks.find(ranks(WORLD_SIZE="1")) is None


@pytest.mark.parametrize(
    "changed", [{"RANK": "2"}, {"RANK": "-1"}, {"WORLD_SIZE": "two"}, {"MASTER_PORT": "x"}]
)
def test_ranks_that_cannot_be_are_refused(changed: dict[str, str]) -> None:
    with pytest.raises(SettingError):
        Ranks.find(ranks(**changed))


def test_ranks_find_each_other_by_the_store() -> None:
    port = str(free_port())
    worker, driver = Ranks.find(ranks(MASTER_PORT=port)), Ranks.find(ranks(MASTER_PORT=port, RANK="1"))
    assert worker is not None
    assert driver is not None
    with worker.listen(TOKEN) as listener:
        (place,) = driver.workers(TOKEN)
        control = place.open(0, **TIMES)
        listener.accept(5).send("hello")
        assert control.receive(5).kind == "hello"
        place.close()
    with pytest.raises(StageLostError):
        connect(listener.address, TOKEN, timeout_s=0.2)
