"""Who may come in, how each answer is named, and what an error tells whom."""

import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.job import Job
from penstock.engine.llm import LLM
from penstock.engine.service import ServiceConfig
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
from penstock.frontends.server.middleware import tenant_of
from penstock.frontends.server.requests import RequestBuilder, salt_of
from penstock.frontends.server.settings import ServerSettings, is_loopback, resolve_keys
from penstock.plan.policy import ScheduleConfig
from tests.server.running import NAME, Running, running, wait_for

SECRET = "in the cellar"
KEY = "sk-of-the-sluice"
OTHER_KEY = "sk-of-the-weir"
OPEN_PATHS = ("/health",)
CLOSED_PATHS = ("/v1/models", "/v1/models/tiny", "/metrics", "/status", "/nothing", "/pageant")


@pytest.fixture(scope="module")
def locked(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerSettings(NAME, api_keys=(KEY, OTHER_KEY))) as started:
        yield started


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_the_right_key_opens(locked: Running, key: str) -> None:
    assert [model.id for model in locked.client(key).models.list()] == [NAME]
    for scheme in ("Bearer", "bearer"):
        assert locked.ask("GET", "/v1/models", headers={"Authorization": f"{scheme} {key}"}).status == 200


def test_a_key_may_come_in_either_header(locked: Running) -> None:
    for headers in (
        {"X-Api-Key": KEY},
        {"X-Api-Key": KEY, "Authorization": "Bearer none"},
        {"X-Api-Key": "none", "Authorization": f"Bearer {OTHER_KEY}"},
    ):
        assert locked.ask("GET", "/v1/models", headers=headers).status == 200, headers
    for key in ("", KEY[:-1], f"Bearer {KEY}"):
        assert locked.ask("GET", "/v1/models", headers={"X-Api-Key": key}).status == 401


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY},{OTHER_KEY}",
        f"Bearer {KEY}{OTHER_KEY}",
        f"Basic {KEY}",
        KEY,
        "Bearer \xe9",
    ],
)
def test_any_other_does_not(locked: Running, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for path in CLOSED_PATHS:
        reply = locked.ask("GET", path, headers=headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), path
        assert KEY not in reply.body.decode()
    assert locked.ask("POST", "/v1/completions", b"{", headers).status == 401
    reply = locked.ask("POST", "/v1/messages", b"{", headers)
    assert (reply.status, reply.json["type"]) == (401, "error")  # as its clients know errors
    for path in OPEN_PATHS:
        assert locked.ask("GET", path, headers=headers).status == 200


def test_a_key_has_no_more_places_than_it_may(llm: LLM) -> None:
    schedule = ScheduleConfig(max_running=4, max_running_per_key=1)
    settings = ServerSettings(NAME, api_keys=(KEY, OTHER_KEY))
    with running(llm, settings, ServiceConfig(schedule, cache_tokens=20_000)) as server:
        asked: dict[str, Any] = {"model": NAME, "prompt": "x", "max_tokens": 3000, "stream": True}
        streams = [server.client(KEY).completions.create(**asked) for _ in range(3)]
        next(streams[0])
        status = server.service.status()
        assert (status.num_running, status.num_waiting) == (1, 2)
        other = server.client(OTHER_KEY).completions.create(model=NAME, prompt="x", max_tokens=2)
        assert other.choices
        assert server.service.status().num_waiting == 2
        for stream in streams:
            stream.close()


def test_the_client_has_an_exception_for_it(locked: Running) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        locked.client("wrong").models.list()
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1234", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("localhost.evil.example:8000", 400),
        ("192.168.0.7", 400),
        ("", 400),
        ("[::1", 400),
    ],
)
def test_without_a_key_only_this_machines_names_are_answered(server: Running, host: str, status: int) -> None:
    for path in ("/health", "/v1/models"):
        assert server.ask("GET", path, headers={"Host": host}).status == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8000", 200),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
def test_pages_of_other_hosts_may_not_post(server: Running, origin: str, status: int) -> None:
    body = {"model": NAME, "prompt": "x", "max_tokens": 1}
    reply = server.ask("POST", "/v1/completions", body, {"Origin": origin})
    assert reply.status == status
    # Nobody is let in by CORS.
    assert not any(name.startswith("access-control") for name in reply.headers)


PAGE = "https://chat.example:8443"


@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["no key", "a key"])
def test_pages_of_named_origins_may_use_it(llm: LLM, keys: tuple[str, ...]) -> None:
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-api-key",
    }
    body = {"model": NAME, "prompt": "x", "max_tokens": 1}
    with running(llm, ServerSettings(NAME, api_keys=keys, allow_origins=(PAGE,))) as server:
        for origin, is_named in ((PAGE, True), ("https://chat.example", False), ("null", False)):
            names = {PAGE} if is_named else {None}
            before = server.ask("OPTIONS", "/v1/completions", headers={"Origin": origin, **asked})
            assert (before.status == 200) == is_named
            after = server.ask(
                "POST", "/v1/completions", body, {"Origin": origin, "Authorization": f"Bearer {KEY}"}
            )
            assert after.status == (200 if is_named or keys else 403)
            refused = server.ask("POST", "/v1/completions", {}, {"Origin": origin})
            assert refused.status >= 400
            assert {
                reply.headers.get("access-control-allow-origin") for reply in (before, after, refused)
            } == names


@pytest.mark.parametrize(
    "origin", ["*", "chat.example", "https://chat.example/", "https://Chat.example", "", "a b"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(SettingError, match=r"allow_origin=.* is not accepted"):
        ServerSettings(NAME, allow_origins=(PAGE, origin))


def test_head_is_get_without_the_content(server: Running) -> None:
    for path in ("/health", "/", "/v1/models", "/nothing"):
        head, get = server.ask("HEAD", path), server.ask("GET", path)
        assert (head.status, head.body) == (get.status, b"")
        assert head.headers["content-length"] == get.headers["content-length"]
    assert server.ask("HEAD", "/v1/completions").status == 405


def test_upgrades_are_not_done_nor_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    wanted = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    wanted["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    assert server.ask("GET", "/health", headers=wanted).status == 200
    assert not caplog.records


def test_with_a_key_names_do_not_matter(locked: Running) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Host": "models.example", "Origin": "https://other.example"}
    assert locked.ask("POST", "/tokenize", {"content": "x"}, headers).status == 200


@pytest.mark.parametrize("key", ["", " ", "a b", "schlüssel", "a\n", "one,two"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    for keys in ((key,), (KEY, key), (key, KEY)):
        with pytest.raises(SettingError, match="api_key is not accepted") as caught:
            ServerSettings(NAME, api_keys=keys)
        assert len(key) < 3 or key not in str(caught.value)  # the complaint is no place for a secret


def test_keys_come_from_the_option_or_the_environment() -> None:
    environ = {"PENSTOCK_API_KEY": "one,two"}
    assert resolve_keys(None, environ={}) == ()
    assert resolve_keys(None, environ=environ) == ("one", "two")
    assert resolve_keys(["three", "four"], environ=environ) == ("three", "four")
    for text in ("", "one,", ",one", "one,,two", "one, two"):  # nothing is guessed
        with pytest.raises(SettingError, match="api_key is not accepted"):
            ServerSettings(NAME, api_keys=resolve_keys(None, environ={"PENSTOCK_API_KEY": text}))


def test_isolation_without_keys_is_a_contradiction() -> None:
    with pytest.raises(SettingError, match="isolate=True needs api_key or PENSTOCK_API_KEY"):
        ServerSettings(NAME, isolates=True)


def test_no_two_pairs_of_key_and_salt_share() -> None:
    salts = ["", "a", ":", ":a", "a:", tenant_of(KEY), f"{tenant_of(KEY)}:a"]
    tenants = [tenant_of(key) for key in (KEY, OTHER_KEY, KEY + "a", "a")]
    pairs = {salt_of(tenant, salt) for tenant in tenants for salt in salts}
    assert len(pairs) == len(tenants) * len(salts)
    assert not any(KEY in salt or OTHER_KEY in salt for salt in pairs)
    assert salt_of(None, "a") == "a"


def test_what_is_local() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "Localhost.")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.example")))


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

    monkeypatch.setattr(RequestBuilder, "render", fail)
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
