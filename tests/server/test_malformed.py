"""Whatever is sent, the server answers, never with its own failure, and goes on."""

import codecs
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.frontends.server.bodies import ChatBody, CompletionBody, TokenizeBody
from tests.server.running import NAME, Reply, Running

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize")
NAMES = sorted(
    {"tools", "role", "type", "text", "schema", "name", "strict"}.union(
        *(body.model_fields for body in (ChatBody, CompletionBody, TokenizeBody))
    )
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [NAME, "user", "text", "json_object", "json_schema", 10**30, -1, 0, 1, 1e308, "\ud800", ""]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(NAMES), values, max_size=8)
# How long it takes to draw says nothing, where other tests run at the same time.
UNCHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def check(server: Running, reply: Reply) -> None:
    assert reply.status < 500, reply.body
    if reply.status != 200:
        assert reply.error["code"]


@settings(max_examples=150, deadline=None, suppress_health_check=UNCHECKED)
@given(path=st.sampled_from(PATHS), body=bodies, is_near=st.booleans())
def test_any_json(server: Running, path: str, body: dict[str, Any], is_near: bool) -> None:
    # Near: right but for what is drawn, so that it gets past the first check.
    right = {"model": NAME, "max_tokens": 2}
    if path.startswith("/v1"):
        right |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    sent = (right | body | {"max_tokens": 2}) if is_near and path != "/tokenize" else body
    check(server, server.ask("POST", path, json.dumps(sent).encode()))


@settings(max_examples=100, deadline=None, suppress_health_check=UNCHECKED)
@given(path=st.sampled_from(PATHS), body=st.binary(max_size=200))
def test_any_bytes(server: Running, path: str, body: bytes) -> None:
    check(server, server.ask("POST", path, body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "x"}',
        b'{"model": "tiny", "prompt": "\xff"}',
        b'\xfe\xff{"model": "tiny", "prompt": "x"}',
        b'{"model": "tiny", "prompt": "x", "repetition_penalty": 1e-308}',
        b'{"model": "tiny", "prompt": "x", "repetition_penalty": 1e308}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_known_trouble_is_a_bad_request(server: Running, body: bytes) -> None:
    reply = server.ask("POST", "/v1/completions", body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


def test_a_byte_order_mark_does_no_harm(server: Running) -> None:
    body = codecs.BOM_UTF8 + b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'
    assert server.ask("POST", "/v1/completions", body).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "Deflate", "identity, gzip"])
def test_compressed_bodies_are_refused(server: Running, encoding: str) -> None:
    reply = server.ask("POST", "/v1/completions", b"\x1f\x8b", {"Content-Encoding": encoding})
    assert (reply.status, reply.error["code"]) == (415, "unsupported_encoding")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(20),
        nested(90),
        {"const": float("1e308")},
        {"pattern": "(" * 50},
        {"enum": []},
        {"type": 3},
        {"a": None},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_strange_schemas_do_no_harm(server: Running, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    check(server, server.chat(response_format=wanted))


def test_the_server_is_well_after_all_that(server: Running) -> None:
    server.wait_until_idle()
    assert server.ask("GET", "/health").status == 200
    assert server.chat().status == 200
