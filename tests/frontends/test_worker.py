"""`penstock worker` says what is wrong in one line, listens at one address, and ends when it is told to."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.engine.stages.control import connect, new_token
from penstock.errors import StageRefusedError
from penstock.frontends.cli import app
from penstock.frontends.exits import MISTAKE


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(new_token())
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("listen", "token", "mode", "told"),
    [
        ("nowhere", None, 0o600, "--listen 'nowhere'"),
        ("127.0.0.1:{taken}", None, 0o600, "in use"),
        ("192.0.2.1:0", None, 0o600, "--listen '192.0.2.1:0'"),
        ("127.0.0.1:0", b"", 0o600, "it is empty"),
        ("127.0.0.1:0", b"secret", 0o600, "weak"),
        ("127.0.0.1:0", None, 0o644, "chmod 600"),
        ("127.0.0.1:0", ..., 0o600, "No such file"),
    ],
)
def test_what_cannot_work_is_one_line(
    token_file: Path, listen: str, token: object, mode: int, told: str
) -> None:
    if isinstance(token, bytes):
        token_file.write_bytes(token)
    token_file.chmod(mode)
    if token is ...:
        token_file.unlink()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = listen.format(taken=taken.getsockname()[1])
        result = CliRunner().invoke(app, ["worker", "--listen", address, "--token-file", str(token_file)])
    assert result.exit_code == MISTAKE
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_it_waits_for_drivers_and_ends_when_told_to(token_file: Path) -> None:
    command = [sys.executable, "-m", "penstock", "worker", "--listen", "127.0.0.1:0"]
    command += ["--token-file", str(token_file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("waiting for a driver at ")
        address = line.split()[-1]
        with pytest.raises(StageRefusedError, match="token"):
            connect(address, new_token(), timeout_s=10)
        for _ in range(2):
            connect(address, token_file.read_bytes(), timeout_s=10).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()
    assert not os.path.exists(f"/proc/{process.pid}")


def test_stages_answer_as_one_process_and_all_of_them_end_well(token_file: Path, tiny_model: Path) -> None:
    """Those of torchrun, of which the last answers, and those that are started here."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    prompt = "one after the other " * 20

    def start(*more: str, **environment: str) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-m",
            "penstock",
            "generate",
            "--model",
            str(tiny_model),
            "--raw",
            "--json",
        ]
        command += ["--prompt", prompt, "--max-tokens", "8", "--chunk", "64", "--threads", "1", *more]
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    staged = ["--stages", "2", "--token-file", str(token_file)]
    with start(*staged, **ranks, RANK="0") as worker, start(*staged, **ranks, RANK="1") as last:
        with start("--stages", "2") as local, start() as alone:
            answers = [
                json.loads(process.communicate(timeout=60)[0])["text"] for process in (last, local, alone)
            ]
        assert len(set(answers)) == 1
        assert [process.wait(10) for process in (worker, last, local, alone)] == [0] * 4
