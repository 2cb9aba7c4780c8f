"""Who may come in."""

from collections.abc import Iterator

import openai
import pytest

from penstock.engine.llm import LLM
from penstock.errors import SettingError
from penstock.frontends.server.middleware import tenant_of
from penstock.frontends.server.requests import salt_of
from penstock.frontends.server.settings import ServerSettings, is_loopback, resolve_keys
from tests.server.running import NAME, Running, running

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
    for path in OPEN_PATHS:
        assert locked.ask("GET", path, headers=headers).status == 200


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
