"""`penstock serve --ray` as a process, and all processes that it starts."""

import http.client
import ipaddress
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

from tests.server.running import wait_for
from tests.server.test_process import INTERRUPTIBLE, Process

NAME = "tiny"
KEY = "secret"
TIMEOUT_S = 120


class Served(Process):
    def client(self) -> openai.OpenAI:
        return super().client().with_options(api_key=KEY)

    def ask(self, path: str) -> tuple[int, bytes]:
        address = urlsplit(self.url or "")
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def metric(self, name: str) -> dict[str, float]:
        """A metric of each replica."""
        text = self.ask("/metrics")[1].decode()
        found = re.findall(rf'^penstock_{name}{{replica="(\w+)"}} (\S+)$', text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}

    @property
    def health(self) -> Any:
        return json.loads(self.ask("/health")[1])

    def wait_for_replicas(self, number: int) -> None:
        wait_for(lambda: self.health["replicas"] == number, TIMEOUT_S)

    def processes(self, title: str = "") -> dict[int, str]:
        """The command lines of all that it has started, and their children, by process; those with this in it."""
        return {pid: line for pid, line in descendants(self.popen.pid).items() if title in line}


def descendants(root: int) -> dict[int, str]:
    parents, lines = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                status = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(status[1])
                lines[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:  # it has ended
                continue
    found = {root}
    while new := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= new
    return {pid: lines[pid] for pid in found - {root} if pid in lines}


def listening(pids: set[int]) -> set[str]:
    """The addresses on which these processes listen."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    hosts = set()
    for name in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = [raw[start : start + 4][::-1] for start in range(0, len(raw), 4)]
                hosts.add(str(ipaddress.ip_address(b"".join(words))))
    return hosts


@contextmanager
def two_nodes() -> Iterator[dict[str, str]]:
    """A cluster of two nodes with a processor each, by `ray start`: the environment of those who use it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = secrets.token_hex(32)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
        "1"  # as where `penstock.frontends.ray` was not imported
    )
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"]
    start += ["--dashboard-agent-listen-port", "0", "--disable-usage-stats"]
    nodes: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> str:
        """All that a node says until it is up."""
        node = subprocess.Popen(
            [*start, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        nodes.append(node)
        assert node.stdout is not None
        said = ""
        for line in node.stdout:
            said += line
            if "forever until terminated" in line:
                threading.Thread(target=node.stdout.read, daemon=True).start()
                return said
        raise AssertionError(said)

    try:
        said = begin("--head", "--port", str(port), "--include-dashboard", "false")
        found = re.search(r"--address='(\S+)'", said)
        assert found is not None, said
        begin("--address", found[1])
        yield {**environment, "RAY_ADDRESS": found[1]}
    finally:
        for pid in {pid for node in nodes for pid in (node.pid, *descendants(node.pid))}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in nodes:
            node.wait()


@contextmanager
def served(model: Path, *arguments: str, **environment: str) -> Iterator[Served]:
    """A server, from its first answer to its end; whatever it started is killed with it."""
    code = f"{INTERRUPTIBLE}\nfrom penstock.frontends.cli import main\nmain()"
    options = [
        "--threads",
        "1",
        "--dtype",
        "float32",
        "--chunk",
        "64",
        "--cache-tokens",
        "8000",
        "--port",
        "0",
    ]
    server = Served(
        subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--ray", "--model", str(model), *options, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group of processes, as a terminal would make one
            env={**os.environ, "PENSTOCK_API_KEY": KEY, **environment},
        )
    )
    try:
        server.client()  # waits
        yield server
    finally:
        left = server.processes()
        if server.popen.poll() is None:
            server.popen.kill()
            server.popen.wait()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), TIMEOUT_S)
        server.end()


def check_end(server: Served, started: Collection[int]) -> None:
    """A server that was told to end does so well, and nothing is left of these processes."""
    assert started
    assert server.end() == 0
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), TIMEOUT_S)
    own = [line for line in server.said if " pid=" not in line]  # not what actors say
    assert "Traceback" not in "".join(own)


def stream(client: openai.OpenAI, prompt: str, max_tokens: int) -> Any:
    """A stream that has begun."""
    events = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    )
    next(events)
    return events
