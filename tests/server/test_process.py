"""`penstock serve` as a process: how it starts, what it says, how it ends."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.server.running import NAME, wait_for

TIMEOUT_S = 120
Start = Callable[..., "Process"]


class Process:
    """A server, once it listens."""

    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self.popen = popen
        self.said: list[str] = []
        self.url: str | None = None
        assert popen.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(popen.stderr,), daemon=True)
        self._reader.start()

    def _read(self, lines: Any) -> None:
        for line in lines:
            self.said.append(line)
            found = re.search(r" at (http://\S+)/v1$", line)
            if found:
                self.url = found[1]

    def client(self) -> openai.OpenAI:
        wait_for(lambda: self.url is not None or self.popen.poll() is not None, TIMEOUT_S)
        assert self.url is not None, "".join(self.said)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def get(self, path: str) -> tuple[int, Any]:
        """The status, and what is said in JSON."""
        address = urlsplit(self.url or "")
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.load(response)
        finally:
            connection.close()

    def wait_for_drain(self) -> None:
        """Until a signal has been heard."""
        wait_for(lambda: self.get("/health") == (503, {"status": "draining"}), TIMEOUT_S)

    def wait_for_line(self, line: str) -> None:
        wait_for(lambda: line in self.said or self.popen.poll() is not None, TIMEOUT_S)
        assert line in self.said, "".join(self.said)

    def end(self) -> int:
        status = self.popen.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return status


# A runner in the background may have it ignored, and children inherit that.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
# Each step after the first few waits a moment (if) or does not end (while), as long as there is a file.
WAITING_STEPS = """
import os, time
from penstock.engine.step import StepRunner
launch = StepRunner.launch
num_steps = 0
def held(runner, step):
    global num_steps
    num_steps += 1
    {how} num_steps > 3 and os.path.exists({file!r}):
        time.sleep(0.05)
    return launch(runner, step)
StepRunner.launch = held
"""


@dataclass(frozen=True)
class Hold:
    """Holds back a server that is told of it, so that nothing ends before it is to."""

    file: Path

    @property
    def all(self) -> str:
        return WAITING_STEPS.format(how="while", file=str(self.file))

    @property
    def each(self) -> str:
        return WAITING_STEPS.format(how="if", file=str(self.file))

    def end(self) -> None:
        self.file.unlink()


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    (tmp_path / "hold").touch()
    return Hold(tmp_path / "hold")


@pytest.fixture
def start(model_folder: Path) -> Iterator[Start]:
    started: list[Process] = []

    def run(*arguments: str, before: str = "", **environment: str) -> Process:
        """`before` is a program that runs first, in the same process."""
        code = f"{INTERRUPTIBLE}\n{before}\nfrom penstock.frontends.cli import main\nmain()"
        command = [sys.executable, "-c", code, "serve", "--model", str(model_folder), "--port", "0"]
        popen = subprocess.Popen(
            [*command, "--threads", "1", "--cache-tokens", "8000", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        started.append(Process(popen))
        return started[-1]

    yield run
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.end()


def begin_stream(client: openai.OpenAI, max_tokens: int) -> Any:
    stream = client.completions.create(
        model=NAME, prompt="x", max_tokens=max_tokens, temperature=0, stream=True
    )
    next(stream)
    return stream


def test_it_says_what_it_serves_and_drains_on_sigterm(start: Start, hold: Hold) -> None:
    process = start("--chunk", "100", "--policy", "decode_priority", "--grace", "600", before=hold.all)
    client = process.client()
    stream = begin_stream(client, 400)
    status, told = process.get("/health")
    assert (status, told["status"]) == (200, "ok")
    process.popen.send_signal(signal.SIGTERM)
    # What runs goes on to its end; nobody new comes in.
    process.wait_for_drain()
    with pytest.raises(openai.InternalServerError) as late:
        client.completions.create(model=NAME, prompt="late")
    assert late.value.code == "service_unavailable"
    hold.end()
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert process.end() == 0  # which does not wait to the end of the grace
    said = "".join(process.said)
    assert f"serves {NAME} at http://127.0.0.1:" in said
    assert "chunk 100 (requested 100: set by --chunk)" in said
    assert "policy decode-priority" in said
    assert "cache 8000 tokens" in said
    assert "prefixes are shared between all requests" in said
    assert "folder" not in said
    assert "warning" not in said
    assert "Traceback" not in said


def test_after_the_grace_the_rest_is_cancelled(start: Start, hold: Hold) -> None:
    process = start("--grace", "0.2", before=hold.each)
    stream = begin_stream(process.client(), 5900)
    process.popen.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="shutting down"):
        for _ in stream:
            pass
    assert process.end() == 0
    assert "Traceback" not in "".join(process.said)


# A step that takes longer than anybody would wait.
LONG_STEP = """
import sys, time
from penstock.engine.step import StepRunner
from penstock.frontends.server import lifecycle
lifecycle._LAST_STEP_S = 0.5
launch = StepRunner.launch
num_steps = 0
def slow(runner, step):
    global num_steps
    num_steps += 1
    if num_steps > 3:
        print("a long step", file=sys.stderr, flush=True)
        time.sleep(600)
    return launch(runner, step)
StepRunner.launch = slow
"""


@pytest.mark.parametrize("streams", [True, False])
def test_a_step_longer_than_the_grace_is_given_up(start: Start, streams: bool) -> None:
    process = start("--grace", "0.5", before=LONG_STEP)
    client = process.client()

    def end_it() -> None:
        process.wait_for_line("a long step\n")
        process.popen.send_signal(signal.SIGTERM)

    threading.Thread(target=end_it, daemon=True).start()
    # Still told what was promised, and nobody waits for the step.
    with pytest.raises(openai.APIError, match="shutting down"):
        for _ in client.completions.create(model=NAME, prompt="x", stream=streams):
            pass
    assert process.end() == 0
    said = "".join(process.said)
    assert "Traceback" not in said
    assert said.endswith("penstock: the model was in the middle of a step, which was given up\n")


FAILURE = """
from penstock.frontends.server.requests import RequestBuilder
def fail(*_):
    raise RuntimeError("in the cellar")
RequestBuilder.render = fail
"""


def test_a_failure_is_told_on_standard_error_once(start: Start) -> None:
    process = start(before=FAILURE)
    client = process.client()
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}])
    assert "cellar" not in str(caught.value)
    assert client.completions.create(model=NAME, prompt="x", max_tokens=1).choices
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
    said = "".join(process.said)
    assert said.count("Traceback") == said.count("RuntimeError: in the cellar") == 1
    assert "penstock.server: request " in said


def test_a_second_interrupt_ends_it_at_once(start: Start, hold: Hold) -> None:
    process = start("--grace", "600", before=hold.all)
    stream = begin_stream(process.client(), 5900)
    process.popen.send_signal(signal.SIGINT)
    process.wait_for_drain()
    assert process.popen.poll() is None
    process.popen.send_signal(signal.SIGINT)
    assert process.end() == 130
    stream.close()
    assert "Traceback" not in "".join(process.said)


def test_open_to_others_without_a_key_is_warned_of(start: Start) -> None:
    process = start("--host", "0.0.0.0")
    process.client()
    wait_for(lambda: "warning" in "".join(process.said))
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0


def test_the_key_comes_from_the_environment(start: Start) -> None:
    process = start("--host", "0.0.0.0", "--served-name", "org/other", PENSTOCK_API_KEY="secret")
    client = process.client()
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert [model.id for model in client.with_options(api_key="secret").models.list()] == ["org/other"]
    assert client.with_options(api_key="secret").models.retrieve("org/other").id == "org/other"
    assert "warning" not in "".join(process.said)
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
    assert "secret" not in "".join(process.said)


def test_what_was_read_is_there_after_a_restart(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    options = ("--cache-dir", str(folder), "--cache-size", "64MiB", "--isolate", "--api-key", "ours")
    for is_first in (True, False):
        # What is not on disk when the server is told to end is written before it does.
        process = start(*options, "--api-key", "theirs")
        client = process.client().with_options(api_key="ours")
        for key, finds in (("ours", not is_first), ("theirs", not is_first), ("theirs", True)):
            asked = client.with_options(api_key=key)
            answer = asked.completions.create(model=NAME, prompt="x" * 500, max_tokens=1)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert ((answer.usage.prompt_tokens_details.cached_tokens or 0) > 0) == finds
        process.popen.send_signal(signal.SIGTERM)
        assert process.end() == 0
        said = "".join(process.said)
        assert "prefixes are isolated: shared only between requests with the same API key" in said
        assert f"folder {folder}, up to 64.0 MiB, now " in said
        assert ("now 0 B" in said) == is_first
        assert "warning" not in said
        assert not any(f" {key}" in said for key in ("ours", "theirs"))


def test_a_folder_that_cannot_be_used_is_a_warning(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = start("--cache-dir", str(tmp_path / "file" / "kept"))
    assert process.client().completions.create(model=NAME, prompt="x" * 500, max_tokens=1).choices
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
    said = "".join(process.said)
    assert said.count("penstock: warning: ") == 1
    assert "cannot be used: nothing is kept there" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "fair"], "--policy 'fair' is not accepted"),
        (["--chunk", "x"], "--chunk 'x' is not accepted"),
        (["--max-running", "0"], "--max-running 0 is not accepted"),
        (["--step-tokens", "3"], "--step-tokens 3 is not accepted with --max-running 16"),
        (["--cache-tokens", "0"], "--cache-tokens 0 is not accepted"),
        (["--max-body-bytes", "1"], "--max-body-bytes 1 is not accepted"),
        (["--max-prompt-tokens", "0"], "--max-prompt-tokens 0 is not accepted"),
        (["--grace", "-1"], "--grace -1.0 is not accepted"),
        (["--grace", "nan"], "--grace nan is not accepted"),
        (["--api-key", ""], "--api-key is not accepted"),
        (["--api-key", "one", "--api-key", "a b"], "--api-key is not accepted"),
        (["--max-running-per-key", "2"], "--max-running-per-key 2 needs --api-key or PENSTOCK_API_KEY"),
        (["--max-connections", "0"], "--max-connections 0 is not accepted"),
        (["--replicas", "2"], "--replicas 2 needs --ray"),
        (["--stalled", "0"], "--stalled 0.0 is not accepted"),
        (["--allow-origin", "*"], "--allow-origin '*' is not accepted"),
        (["--isolate"], "--isolate needs --api-key or PENSTOCK_API_KEY"),
        (["--cache-dir", ""], "--cache-dir '' is not accepted"),
        (["--cache-dir", "x", "--cache-size", "10GB"], "--cache-size '10GB' is not accepted"),
        (["--cache-size", "1GiB"], "--cache-size '1GiB' needs --cache-dir or PENSTOCK_CACHE_DIR"),
        (["--no-reuse", "--cache-dir", "x"], "--no-reuse contradicts --cache-dir"),
        (["--no-reuse", "--api-key", "x", "--isolate"], "--no-reuse contradicts --isolate"),
        (["--served-name", " "], "--served-name ' ' is not accepted"),
        (["--host", "no.such.host.invalid"], "--host 'no.such.host.invalid' is not accepted"),
    ],
    ids=str,
)
def test_a_bad_option_is_one_line(model_folder: Path, arguments: list[str], said: str, capfd: Any) -> None:
    from typer.testing import CliRunner

    from penstock.frontends.cli import app

    result = CliRunner().invoke(app, ["serve", "--model", str(model_folder), "--port", "0", *arguments])
    assert result.exit_code == 2, result.output
    *_, line = result.stderr.splitlines()
    assert said in line
    assert line.startswith("penstock: ")


def test_without_ray_the_command_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from penstock.frontends import serve
    from penstock.frontends.cli import app

    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve", "--ray", "--replicas", "2"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "pip install 'penstock[ray]'" in result.stderr


def test_a_port_in_use_is_known_before_the_model_is_read(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from penstock.frontends.cli import app

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", "--model", str(tmp_path / "nothing"), "--port", port])
    assert result.exit_code == 2
    assert f"--port {port} is not accepted on 127.0.0.1" in result.stderr


@pytest.mark.parametrize("name", ["no", "x" * 3000], ids=len)
def test_a_model_that_is_not_there_is_status_3(tmp_path: Path, name: str) -> None:
    from typer.testing import CliRunner

    from penstock.frontends.cli import app

    result = CliRunner().invoke(app, ["serve", "--model", str(tmp_path / name), "--port", "0"])
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
