"""Two machines whose link goes down, as namespaces of one: it is noticed in time, and answers are the same."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.namespaces import Joined, NamespaceError, enter_namespace, joined_namespaces
from penstock.engine.stages.control import new_token
from tests.engine.stages.test_recovery import STAGE_TIMEOUT_S, Asked, serving, undisturbed, wait_for


@pytest.fixture
def joined() -> Iterator[Joined]:
    try:
        with joined_namespaces(1_000_000_000) as joined:
            yield joined
    except NamespaceError as error:
        pytest.skip(f"no network namespaces here: {error}")


@contextmanager
def worker(joined: Joined, token_file: Path) -> Iterator[str]:
    """`penstock worker` in the second namespace; its address."""
    address = f"{joined.addresses[1]}:7070"
    command = ["ip", "netns", "exec", joined.names[1], sys.executable, "-m", "penstock", "worker"]
    command += ["--listen", address, "--token-file", str(token_file), "--threads", "1", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "waiting for a driver" in process.stderr.readline()
            yield address
        finally:
            process.kill()


def test_a_link_that_goes_down_is_noticed_in_time_and_answers_go_on_when_it_is_back(
    joined: Joined, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_bytes(new_token())
    expected = undisturbed("llama")

    def drive(address: str) -> None:
        enter_namespace(joined.names[0])  # this thread, and those that it starts
        with serving(stages=address, token_file=token_file, threads=1) as service:
            for end, when in ((0, 0), (1, 30)):
                asked = Asked(service)
                wait_for(lambda asked=asked, when=when: asked.num_tokens >= when)  # type: ignore[misc]
                joined.turn(end, "down")
                began = time.monotonic()
                wait_for(lambda: service.missing is not None)
                assert time.monotonic() - began < STAGE_TIMEOUT_S + 1
                joined.turn(end, "up")
                assert asked.tokens() == expected
                service.check_integrity()
            assert service.status().stages[0].num_restarts == 2

    with worker(joined, token_file) as address, ThreadPoolExecutor(1) as thread:
        thread.submit(drive, address).result()
