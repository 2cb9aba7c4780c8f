"""What is refused, and how: OpenAI's shape, a status, a code, and the parameter that is wrong."""

from dataclasses import asdict
from typing import Any

import openai
import pytest

from penstock.engine.llm import LLM
from penstock.engine.service import ServiceConfig
from penstock.frontends.server.bodies import ChatBody, CompletionBody, GenerationBody
from penstock.frontends.server.settings import ServerSettings
from penstock.plan.policy import ScheduleConfig
from tests.server.running import NAME, Running, running, wait_for

USER: Any = [{"role": "user", "content": "hello"}]

REFUSED = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2.5}, "top_k"),
    ({"min_p": 1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": -(2**70)}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"256": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"return_progress": True}, "return_progress"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"user": 3}, "user"),
    ({"cache_salt": 3}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    for reply in (server.chat(**fields), server.completion(**fields)):
        assert reply.status == 400
        assert reply.error["type"] == "invalid_request_error"
        assert reply.error["param"] == param
        assert reply.error["code"] in ("invalid_value", "invalid_type")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
    ids=str,
)
def test_a_bad_chat_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    reply = server.chat(**fields)
    assert reply.status == 400
    assert reply.error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", 1.5]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 300}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_completion_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    reply = server.completion(**fields)
    assert reply.status == 400
    assert reply.error["param"] == param


def test_a_bad_schema_is_refused(server: Running) -> None:
    for schema in ({"type": "nonsense"}, {"$ref": "#/nowhere"}):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        reply = server.chat(response_format=wanted)
        assert reply.status == 400, schema
        assert reply.error["param"] == "response_format"


def test_an_unknown_parameter_is_named(server: Running, strict: Running) -> None:
    for either in (server, strict):
        reply = either.chat(temprature=1)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (
            400,
            "unknown_parameter",
            "temprature",
        )
    reply = strict.completion(messages=USER)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "unknown_parameter", "messages")


def test_a_missing_parameter_is_named(server: Running, strict: Running) -> None:
    assert strict.chat(model=None).error["code"] == "missing_required_parameter"
    for path, name in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        reply = server.ask("POST", path, {"model": NAME})
        assert (reply.status, reply.error["param"]) == (400, name)
        assert reply.error["code"] == "missing_required_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"modalities": ["text", "audio"]},
        {"verbosity": "low"},
        {"service_tier": "priority"},
        {"web_search_options": {}},
    ],
    ids=str,
)
def test_what_is_not_supported_is_said(strict: Running, fields: dict[str, Any]) -> None:
    [name] = fields
    reply = strict.chat(**fields)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "unsupported_parameter", name)
    assert "not supported" in reply.error["message"]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"function_call": {"name": "a"}}, "unsupported_parameter"),
        ({"audio": {"id": "a"}}, "unsupported_parameter"),
        ({"temprature": 1}, "unknown_parameter"),
    ],
    ids=str,
)
def test_what_is_wrong_in_a_message_says_in_which(strict: Running, more: dict[str, Any], code: str) -> None:
    [name] = more
    wrong = {"role": "assistant", "content": "x"} | more
    reply = strict.chat(messages=[*USER, *USER, wrong, *USER])
    assert (reply.status, reply.error["code"]) == (400, code)
    assert reply.error["param"] == f"messages[2].{name}"
    assert f"messages[2].{name}" in reply.error["message"]


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_null_is_the_same_as_nothing(server: Running, kind: type[GenerationBody]) -> None:
    needed = {"model", "messages", "prompt"}
    nulls = {name: None for name in kind.model_fields if name not in needed} | {"max_tokens": 4}
    reply = server.chat(**nulls) if kind is ChatBody else server.completion(**nulls)
    assert reply.status == 200


def test_what_asks_for_nothing_is_accepted(server: Running) -> None:
    nothing = {
        "tools": [],
        "tool_choice": None,
        "audio": None,
        "modalities": ["text"],
        "seed": None,
        "n": None,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "verbosity": "medium",
        "reasoning_effort": "none",
        "prompt_cache_key": "a",
        "prompt_cache_retention": "24h",
        "safety_identifier": "b",
    }
    assert server.chat(**nothing).status == 200
    echoed = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    assert server.chat(messages=[*USER, echoed, *USER]).status == 200
    assert server.completion(best_of=1, echo=False, suffix=None).status == 200


def test_the_clients_exceptions(strict: Running) -> None:
    client = strict.client()
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=NAME, messages=USER, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-99", messages=USER)
    assert missing.value.code == "model_not_found"
    assert "gpt-99" in missing.value.message
    assert NAME in missing.value.message


def test_a_long_prompt_says_both_numbers(server: Running, strict: Running) -> None:
    limit = server.service.max_request_tokens
    for reply, asked in (
        (server.completion(prompt="x" * 7001), 7001),
        (strict.completion(prompt="x" * 5000, max_tokens=2000), 7000),
        (strict.chat(max_completion_tokens=10**9, max_tokens=None), 10**9 + len("<user>hello\n<assistant>")),
    ):
        assert reply.status == 400
        assert reply.error["code"] == "context_length_exceeded"
        assert str(asked) in reply.error["message"]
        assert str(limit) in reply.error["message"]


def test_the_servers_own_limit_of_a_prompt(llm: LLM) -> None:
    with running(llm, ServerSettings(NAME, max_prompt_tokens=10)) as server:
        assert server.completion(prompt="x" * 10).status == 200
        reply = server.completion(prompt="x" * 11)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "11" in reply.error["message"]
        assert "10" in reply.error["message"]


def test_wrong_paths_and_methods(server: Running) -> None:
    for method, path, status, code in (
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/images/generations", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/tiny", 405, "method_not_allowed"),
        ("GET", "/" + "a" * 50_000, 404, "not_found"),
    ):
        reply = server.ask(method, path)
        assert (reply.status, reply.error["code"]) == (status, code), path
        assert len(reply.body) < 1000


def test_a_full_queue_says_when_to_try_again(llm: LLM) -> None:
    schedule = ScheduleConfig(chunk_size=64, max_running=1, max_waiting=1)
    with running(llm, ServerSettings(NAME), ServiceConfig(schedule, 8000)) as server:
        client = server.client()
        long: dict[str, Any] = {"model": NAME, "prompt": "x", "max_tokens": 5000, "stream": True}
        with client.completions.create(**long) as first:
            next(first)
            wait_for(lambda: server.service.status().num_running == 1)
            with client.completions.create(**long):
                wait_for(lambda: len(server.service.status().requests) == 2)
                with pytest.raises(openai.RateLimitError) as caught:
                    client.completions.create(model=NAME, prompt="y")
                assert caught.value.code == "queue_full"
                assert int(caught.value.response.headers["retry-after"]) > 0
        server.wait_until_idle()
        assert client.completions.create(model=NAME, prompt="y", max_tokens=1).choices
        # Never possible is another thing than not possible now.
        with pytest.raises(openai.BadRequestError) as never:
            client.completions.create(model=NAME, prompt="y", n=3)
        assert never.value.param == "n"


def test_a_service_that_closes_is_unavailable(llm: LLM) -> None:
    with running(llm, ServerSettings(NAME)) as server:
        kernels = asdict(llm.kernels)
        assert server.ask("GET", "/health").json == {"status": "ok", "kernels": kernels}
        assert b"\npenstock_kernels{" in server.ask("GET", "/metrics").body
        server.app.state.drain.begin()
        assert server.ask("GET", "/health").status == 503
        server.service.close()
        reply = server.chat()
        assert (reply.status, reply.error["code"]) == (503, "service_unavailable")
        with pytest.raises(openai.InternalServerError):
            server.client().chat.completions.create(model=NAME, messages=USER)


def test_an_error_in_a_stream_is_its_last_event(llm: LLM) -> None:
    with running(llm, ServerSettings(NAME)) as server:
        stream = server.client().completions.create(model=NAME, prompt="x", max_tokens=5000, stream=True)
        next(stream)
        server.service.drain(0)
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in stream:
                pass
        reply = server.completion(stream=True)
        assert reply.status == 503
