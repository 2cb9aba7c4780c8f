"""Two replicas behind one address: they answer as one server does, and one of them may die."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.plan.grids import BLOCK_TOKENS
from tests.ray.running import KEY, NAME, Served, check_end, listening, served, stream
from tests.server.running import wait_for

REPLICA = "ray::ServeReplica:penstock:Replica"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served(model, "--replicas", "2", "--grace", "5") as started:
        yield started


def test_the_official_client_is_answered(server: Served) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [NAME]
    asked: Any = {"model": NAME, "temperature": 0, "max_tokens": 8}
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "hello"}], **asked)
    whole = client.completions.create(prompt="hello", **asked)
    streamed = client.completions.create(prompt="hello", stream=True, **asked)
    assert chat.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert "".join(event.choices[0].text for event in streamed) == whole.choices[0].text
    answer = client.completions.with_raw_response.create(
        prompt="x", **asked, extra_headers={"x-request-id": "our-own"}
    )
    assert answer.headers.get_list("x-request-id") == ["our-own"]
    assert server.ask("/explain/our-own")[0] == 200
    assert server.ask("/")[0] == server.ask("/status?replica=1")[0] == 200


def test_what_is_wrong_is_told_as_by_one_server(server: Served) -> None:
    client = server.client()
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.post("/nothing", cast_to=object)
    text = server.ask("/metrics")[1].decode()
    for status in ("400", "401", "404"):
        assert f'penstock_refused_requests_total{{status="{status}"}} 1.0' in text


@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/responses", "/messages"])
def test_a_prefix_is_read_by_one_replica_and_once(server: Served, path: str) -> None:
    before = server.metric("prompt_tokens_total")
    prefix = "".join(chr(97 + index * (7 + len(path)) % 26) for index in range(2600)) + path
    num_prompts, most = 20, {"max_output_tokens" if path == "/responses" else "max_tokens": 16}

    def ask(number: int) -> None:
        text = f"{prefix} and question {number}"
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        if path in ("/completions", "/responses"):
            prompt = {"prompt" if path == "/completions" else "input": text}
        server.client().post(path, cast_to=object, body={"model": NAME, **most, **prompt})

    with ThreadPoolExecutor(num_prompts) as threads:
        list(threads.map(ask, range(num_prompts)))
    after = server.metric("prompt_tokens_total")
    read = sorted(after[replica] - before[replica] for replica in after)
    assert read[0] == 0
    assert len(prefix) <= read[1] < len(prefix) + num_prompts * 2 * BLOCK_TOKENS


def test_prompts_that_have_nothing_in_common_are_spread(server: Served) -> None:
    wait_for(lambda: not any(server.metric("requests_running").values()))
    before = server.metric("prompt_tokens_total")
    streams = [stream(server.client(), letter * 300, 2000) for letter in "pqrs"]
    # A step is counted after its tokens are told.
    wait_for(lambda: sum(server.metric("prompt_tokens_total").values()) == sum(before.values()) + 1200)
    after = server.metric("prompt_tokens_total")
    assert [after[replica] - before[replica] for replica in after] == [600, 600]
    for each in streams:
        each.close()


def test_a_client_that_goes_ends_its_request(server: Served) -> None:
    wait_for(lambda: not any(server.metric("requests_running").values()))
    before = sum(server.metric("cancels_total").values())
    stream(server.client(), "x", 5900).close()
    wait_for(lambda: sum(server.metric("cancels_total").values()) == before + 1)
    wait_for(lambda: not any(server.metric("requests_running").values()))


def test_a_replica_that_dies_takes_its_streams_alone_and_is_replaced(server: Served) -> None:
    client = server.client()
    streams = [stream(client, letter * 70, 5000) for letter in "vw"]
    assert set(server.metric("requests_running").values()) == {1.0}
    os.kill(next(iter(server.processes(REPLICA))), signal.SIGKILL)
    ends = []
    for each in streams:
        try:
            *_, last = each
            ends.append(last.choices[0].finish_reason)
        except openai.APIError as error:
            ends.append(error.code)
    assert sorted(ends) == ["length", "replica_lost"]
    assert client.completions.create(model=NAME, prompt="later", max_tokens=2).choices
    server.wait_for_replicas(2)
    assert len(server.metric("prompt_tokens_total")) == 2
    assert client.completions.create(model=NAME, prompt="much later", max_tokens=2).choices


def test_nothing_is_open_to_others_and_nothing_is_sent_home(server: Served) -> None:
    processes = server.processes()
    hosts = listening({server.popen.pid, *processes})
    assert hosts <= {"127.0.0.1", "::ffff:7f00:1", "::1"}
    (raylet,) = (pid for pid, line in processes.items() if "/raylet/raylet " in line)
    environ = dict(
        item.partition("=")[::2] for item in Path(f"/proc/{raylet}/environ").read_text().split("\0")
    )
    assert environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environ["RAY_AUTH_MODE"] == "token"
    assert KEY not in "".join([*processes.values(), *server.said])


def test_it_ends_when_its_answers_have_and_leaves_nothing(server: Served) -> None:
    """The last of this server."""
    running, started = stream(server.client(), "z", 1500), server.processes()
    assert any("/raylet/raylet " in line for line in started.values())
    threading.Timer(0.2, lambda: server.popen.send_signal(signal.SIGTERM)).start()
    *_, last = running
    assert last.choices[0].finish_reason == "length"
    check_end(server, started)


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from penstock.frontends.cli import app

    result = CliRunner().invoke(app, ["serve", "--ray", "--model", str(tmp_path / "no"), "--port", "0"])
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1


def test_a_config_file_names_options_as_the_command_does(model: Path) -> None:
    from penstock.errors import SettingError
    from penstock.frontends.ray import application

    assert application({"model": str(model), "replicas": 2, "stages": 2, "threads": 8})
    with pytest.raises(SettingError, match="num_replicas"):
        application({"model": str(model), "num_replicas": 2})
    with pytest.raises(SettingError, match="a number"):
        application({"model": str(model), "stages": "10.0.0.2:7070", "token_file": "token"})
