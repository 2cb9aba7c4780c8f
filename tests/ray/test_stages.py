"""Two stages, each an actor on a node of its own: they answer as one process does, and one of them may die."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from penstock.engine.llm import LLM
from tests.ray.running import NAME, Served, check_end, descendants, served, stream, two_nodes

WORKER = "ray::StageWorker"
OURS = (WORKER, "ray::ServeReplica", "ray::ProxyActor")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with two_nodes() as environment, served(model, "--stages", "2", "--grace", "5", **environment) as started:
        yield started


def actors() -> dict[int, str]:
    """Those of our own, on both nodes."""
    return {pid: line for pid, line in descendants(os.getpid()).items() if line.startswith(OURS)}


def test_the_answer_is_that_of_one_process(server: Served, model: Path) -> None:
    prompt = "stages " * 100
    alone = LLM(model, dtype="float32", chunk=64, threads=1).generate(
        prompt, raw=True, max_tokens=40, ignore_eos=True
    )
    asked = server.client().completions.create(
        model=NAME, prompt=prompt, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
    )
    assert asked.choices[0].text == alone.text
    (worker,) = (pid for pid, line in actors().items() if line.startswith(WORKER))
    (replica,) = (pid for pid, line in actors().items() if "penstock:Replica" in line)
    assert parent(worker) != parent(replica)  # the nodes


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_worker_that_dies_is_started_again(server: Served) -> None:
    client = server.client()
    running = stream(client, "w" * 70, 3000)
    (worker,) = (pid for pid, line in actors().items() if line.startswith(WORKER))
    os.kill(worker, signal.SIGKILL)
    try:  # it goes on, or says what has happened
        *_, last = running
        end = last.choices[0].finish_reason
    except openai.APIError as error:
        end = error.code
    assert end in ("length", "internal_error", "replica_lost")
    server.wait_for_replicas(1)
    assert client.completions.create(model=NAME, prompt="later", max_tokens=2).choices
    (again,) = (pid for pid, line in actors().items() if line.startswith(WORKER))
    assert again != worker


def test_an_interrupt_ends_it_and_leaves_the_cluster_as_it_was(server: Served) -> None:
    """The last of this server."""
    started = actors()
    os.killpg(server.popen.pid, signal.SIGINT)  # as a terminal does
    check_end(server, started)
    with pytest.raises(openai.APIConnectionError):
        server.client().models.list()
