"""Every answer has a name, errors are counted, and what fails is told to whoever runs the server, not to clients."""

import logging
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.job import Job
from penstock.engine.llm import LLM
from penstock.engine.streams import EventStream
from penstock.errors import (
    CacheFullError,
    ContextLengthError,
    MemoryExhaustedError,
    ModelError,
    PenstockError,
    PromptError,
    RequestFailedError,
    ServiceClosedError,
    SettingError,
)
from penstock.frontends.server.errors import as_api_error, as_failure
from penstock.frontends.server.requests import RequestBuilder
from penstock.frontends.server.settings import ServerSettings
from tests.server.running import NAME, Running, running, wait_for

SECRET = "in the cellar"


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.exc_info is not None]


def test_every_answer_has_a_name_of_its_own(server: Running) -> None:
    replies = [server.ask("GET", "/health"), server.completion(), server.completion(stream=True)]
    replies += [server.ask("GET", "/nothing"), server.completion(n=0), server.ask("GET", "/metrics")]
    replies += [server.ask("GET", "/health", headers={"Host": "evil.example"})]
    names = [reply.headers["x-request-id"] for reply in replies]
    assert len(set(names)) == len(names)
    assert all(names)


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("a-b_C.9:1", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("<a>", False),
        ("\xe9", False),
    ],
)
def test_a_clients_own_name_is_kept_where_it_is_sane(server: Running, given: str, is_kept: bool) -> None:
    named = server.ask("GET", "/nothing", headers={"X-Request-ID": given}).headers["x-request-id"]
    assert (named == given) == is_kept
    assert named


def refusals(server: Running) -> dict[str, float]:
    text = server.ask("GET", "/metrics").body.decode()
    return {
        sample.labels["status"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "penstock_refused_requests_total"
    }


def test_refusals_are_counted_by_their_status(llm: LLM) -> None:
    with running(llm, ServerSettings(NAME, max_body_bytes=2000)) as server:
        assert set(refusals(server).values()) == {0.0}
        server.completion()
        server.completion(stream=True)
        server.completion(n=0)
        server.completion(prompt="x" * 3000)
        server.ask("POST", "/v1/completions", b"{")
        server.ask("POST", "/v1/completions", {}, {"Origin": "https://evil.example"})
        server.ask("GET", "/nothing")
        server.app.state.drain.begin()
        server.ask("GET", "/health")
        server.completion()
        told = {status: count for status, count in refusals(server).items() if count}
    # Whether the server is well is no request that could be refused.
    assert told == {"400": 2, "403": 1, "404": 1, "413": 1, "503": 1}


def test_what_nobody_expected_is_told_once_and_not_to_the_client(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(RequestBuilder, "chat", fail)
    for streams in (False, True):
        caplog.clear()
        body = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "stream": streams}
        reply = server.ask("POST", "/v1/chat/completions", body, {"X-Request-ID": "mine"})
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
        assert SECRET not in reply.body.decode()
        [record] = tracebacks(caplog)
        assert record.name == "penstock.server"
        assert "mine" in record.getMessage()
        assert record.exc_info is not None
        assert SECRET in str(record.exc_info[1])
    monkeypatch.undo()
    assert server.chat().status == 200


def test_nor_in_a_stream_that_has_begun(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventStream.__aiter__

    async def fail(self: EventStream) -> Any:
        async for event in events(self):
            yield event
            raise RuntimeError(SECRET)

    monkeypatch.setattr(EventStream, "__aiter__", fail)
    *_, last = server.completion(stream=True).events
    assert last["error"]["code"] == "internal_error"
    assert SECRET not in last["error"]["message"]
    assert len(tracebacks(caplog)) == 1
    monkeypatch.undo()
    server.wait_until_idle()


def test_numbers_that_are_none_are_the_servers_fault(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def choose(self: Job, logits: Any) -> Any:
        raise ModelError("the model's logits are not numbers")

    with running(llm, ServerSettings(NAME)) as server:
        monkeypatch.setattr(Job, "choose", choose)
        reply = server.completion()
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
        assert "not numbers" in reply.error["message"]
        assert len(tracebacks(caplog)) == 1
        *_, last = server.completion(stream=True).events
        assert last["error"]["type"] == "server_error"
        with pytest.raises(openai.InternalServerError):
            server.client().completions.create(model=NAME, prompt="x")
        wait_for(lambda: not server.service.status().requests)


@pytest.mark.parametrize(
    ("error", "while_made", "on_its_way"),
    [
        (SettingError("top_p=2 is not accepted"), 400, 400),
        (PromptError("empty"), 400, 400),
        (ContextLengthError("long"), 400, 400),
        (MemoryExhaustedError("none left"), 503, 503),
        (ServiceClosedError("closed"), 503, 503),
        (ModelError("no chat template"), 400, 500),
        (CacheFullError("full"), 503, 500),
        (RequestFailedError("broken"), 500, 500),
        (PenstockError("what"), 500, 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_whose_fault_an_error_is(error: PenstockError, while_made: int, on_its_way: int) -> None:
    assert as_api_error(error).status == while_made
    assert as_failure(error).status == on_its_way
