"""A server in a thread of the test's process, and plain HTTP to it."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import openai
import uvicorn
from fastapi import FastAPI

from penstock.engine.llm import LLM
from penstock.engine.service import Service, ServiceConfig
from penstock.frontends.server.app import create_app
from penstock.frontends.server.lifecycle import make_config
from penstock.frontends.server.metrics import Telemetry
from penstock.frontends.server.settings import ServerSettings

NAME = "tiny"
TIMEOUT_S = 60


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @cached_property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer, which has OpenAI's shape."""
        assert set(self.json) == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        return error

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events, parsed; `[DONE]` as it is."""
        *blocks, rest = self.body.decode().split("\n\n")
        assert rest == ""
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        data = [block.removeprefix("data: ") for block in blocks]
        return [item if item == "[DONE]" else json.loads(item) for item in data]


@dataclass(frozen=True)
class Running:
    port: int
    service: Service
    app: FastAPI
    key: str | None = None  # that `ask` sends where it is given no headers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """A body that is no bytes is sent as JSON."""
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            if headers is None and self.key is not None:
                headers = {"Authorization": f"Bearer {self.key}"}
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, names, response.read())
        finally:
            connection.close()

    def chat(self, **fields: Any) -> Reply:
        body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        return self.ask("POST", "/v1/chat/completions", body | fields)

    def completion(self, **fields: Any) -> Reply:
        return self.ask(
            "POST", "/v1/completions", {"model": NAME, "prompt": "hello", "max_tokens": 4} | fields
        )

    def wait_until_idle(self) -> None:
        wait_for(lambda: not self.service.status().requests)
        self.service.check_integrity()


def wait_for(is_so: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


@contextmanager
def running(llm: LLM, settings: ServerSettings, config: ServiceConfig | None = None) -> Iterator[Running]:
    telemetry = Telemetry()
    with (
        Service(llm, config or ServiceConfig(cache_tokens=20_000), observers=[telemetry]) as service,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        app = create_app(service, settings, telemetry)
        server = uvicorn.Server(make_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield Running(listener.getsockname()[1], service, app)
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)
