"""Responses and Messages: every answer and event is what the official clients' own models say, and a conversation
with tools goes round."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.engine.llm import LLM
from penstock.frontends.server import responses
from penstock.frontends.server.settings import ServerSettings
from tests.models.call_templates import MAIL, TEMPLATES, THINKING, WEATHER
from tests.server.running import NAME, Reply, Running, running
from tests.server.scripted import scripted
from tests.server.test_tools import with_template

if os.environ.get("CI"):
    import anthropic
else:
    anthropic = pytest.importorskip("anthropic")

CALL = TEMPLATES["hermes"][1]
SAID = f"I look.\n{CALL}"
ARGUMENTS = {"city": "Köln", "days": 3}
OPENAI_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in (WEATHER, MAIL)]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in (WEATHER, MAIL)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Its model knows tools and says what a test tells it to."""
    folder = with_template(tmp_path_factory.mktemp("apis"), TEMPLATES["hermes"][0])
    with running(LLM(folder, dtype="float32", threads=1), ServerSettings(NAME)) as started:
        yield started


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = with_template(tmp_path_factory.mktemp("thinking"), THINKING)
    with running(LLM(folder, dtype="float32", threads=1), ServerSettings(NAME)) as started:
        yield started


def named_events(reply: Reply) -> list[dict[str, Any]]:
    """The data of events, each of the name that it says."""
    events = []
    for block in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_responses_are_what_the_client_s_models_say(server: Running, thinking: Running) -> None:
    asked = {"input": "hello", "instructions": "Be brief.", "tools": OPENAI_TOOLS, "max_output_tokens": 400}
    for on, said, kinds in (
        (server, SAID, ["message", "function_call"]),
        (server, "Rain.", ["message"]),
        (thinking, "so be it\n</think>\n\nYes.", ["reasoning", "message"]),
    ):
        with scripted(on.service.llm, said):
            whole = on.ask("POST", "/v1/responses", asked)
            stream = on.ask("POST", "/responses", {**asked, "stream": True})
        assert whole.status == 200, whole.body
        response = Response.model_validate(whole.json, strict=True)
        assert [item.type for item in response.output] == kinds
        assert response.usage is not None
        assert response.usage.input_tokens + response.usage.output_tokens == response.usage.total_tokens
        events = named_events(stream)
        for event in events:
            TypeAdapter(ResponseStreamEvent).validate_python(event, strict=True)
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        last = events[-1]["response"]
        assert (events[0]["type"], last["status"]) == ("response.created", "completed")
        for one, other in zip(last["output"], whole.json["output"], strict=True):
            differ = {"id", "call_id"}
            assert {k: v for k, v in one.items() if k not in differ} == {
                k: v for k, v in other.items() if k not in differ
            }


def test_chats_are_what_the_client_s_models_say(server: Running, thinking: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}], "tools": [WEATHER, MAIL], "max_tokens": 400}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for on, said, reason in (
        (server, SAID, "tool_calls"),
        (server, "Rain.", "stop"),
        (thinking, "so be it\n</think>\n\nYes.", "stop"),
    ):
        for more in ({}, {"logprobs": True, "top_logprobs": 2, "n": 2}):
            with scripted(on.service.llm, said):
                whole = on.ask("POST", "/v1/chat/completions", {**asked, **more})
                stream = on.ask("POST", "/v1/chat/completions", {**asked, **more, **options})
            completion = ChatCompletion.model_validate(whole.json, strict=True)
            assert {choice.finish_reason for choice in completion.choices} == {reason}
            *events, done = stream.body.decode().removesuffix("\n\n").split("\n\n")
            assert done == "data: [DONE]"
            for event in events:
                chunk = ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True)
            assert chunk.usage is not None
            assert completion.usage is not None
            assert chunk.usage.total_tokens == completion.usage.total_tokens


def test_a_loop_by_openai_s_responses(server: Running) -> None:
    client = server.client()
    items: list[Any] = [{"role": "user", "content": "How is the weather? " * 80}]
    with (
        scripted(server.service.llm, SAID),
        client.responses.stream(model=NAME, input=items, tools=OPENAI_TOOLS, max_output_tokens=400) as stream,
    ):
        first = stream.get_final_response()
    call = first.output[-1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == ARGUMENTS
    assert first.output_text == "I look."
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    with scripted(server.service.llm, "It rains."):
        second = client.responses.create(model=NAME, input=items, tools=OPENAI_TOOLS, max_output_tokens=50)
    assert second.output_text == "It rains."
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= 0.9 * second.usage.input_tokens
    with scripted(server.service.llm, SAID):
        cut = client.responses.create(model=NAME, input=items, tools=OPENAI_TOOLS, max_output_tokens=20)
    assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )


def test_a_choice_of_tools_is_told_as_it_was_given(server: Running) -> None:
    mail = {"type": "function", "name": "mail"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [mail]}
    for choice in ("auto", "required", mail, allowed):
        asked = {"input": "hello", "tools": OPENAI_TOOLS, "tool_choice": choice, "max_output_tokens": 300}
        with scripted(server.service.llm, str(TEMPLATES["hermes"][2])):
            reply = server.ask("POST", "/v1/responses", asked)
        assert reply.json["tool_choice"] == choice
        Response.model_validate(reply.json, strict=True)
        if isinstance(choice, dict):
            calls = [item for item in reply.json["output"] if item["type"] == "function_call"]
            assert {call["name"] for call in calls} <= {"mail"}


def test_what_was_cut_is_not_called_complete(server: Running, thinking: Running) -> None:
    asked = {"input": "hello", "tools": OPENAI_TOOLS, "max_output_tokens": 60}
    with scripted(server.service.llm, SAID):
        whole = server.ask("POST", "/v1/responses", asked).json["output"]
        events = named_events(server.ask("POST", "/v1/responses", {**asked, "stream": True}))
    assert [item["status"] for item in whole] == ["incomplete"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["completed", "incomplete"]
    assert events[-1]["response"]["output"] == done
    with scripted(
        thinking.service.llm, "so be it"
    ):  # and of thoughts alone there is no text, streamed or not
        whole = thinking.ask("POST", "/v1/responses", {**asked, "max_output_tokens": 5}).json["output"]
        message = thinking.ask(
            "POST", "/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
        )
    assert [item["type"] for item in whole] == ["reasoning"]
    assert [block["type"] for block in message.json["content"]] == ["thinking"]


def test_what_takes_long_is_no_silence(
    tmp_path: Path, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt, and a call in a format whose calls are told only when they are whole."""
    monkeypatch.setattr(responses, "SILENT_S", 0.0)
    template, call, _ = TEMPLATES["gemma4"]
    long = "x" * 3000
    llm = LLM(with_template(tmp_path, template), dtype="float32", threads=1)
    asked: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [{"role": "user", "content": long}], "tools": [WEATHER]},
        "responses": {"input": long, "tools": OPENAI_TOOLS[:1], "cache_salt": "1"},
        "messages": {"messages": [{"role": "user", "content": long}], "tools": ANTHROPIC_TOOLS[:1]},
    }
    with running(llm, ServerSettings(NAME)) as gemma, scripted(llm, call):
        for path, body in asked.items():
            limit = {"max_output_tokens" if path == "responses" else "max_tokens": 300, "stream": True}
            reply = gemma.ask("POST", f"/v1/{path}", body | limit)
            assert reply.body.count(b"data: ") > len(call) / 2
            assert b"K\\\\u00f6ln" in reply.body
            if path == "messages":
                for event in named_events(reply):
                    if event["type"] != "ping":
                        TypeAdapter(anthropic.types.RawMessageStreamEvent).validate_python(event, strict=True)
            elif path == "responses":
                for event in named_events(reply):
                    TypeAdapter(ResponseStreamEvent).validate_python(event, strict=True)
                assert [item["type"] for item in event["response"]["output"]] == ["function_call"]
                assert reply.body.count(b"event: response.in_progress") > 3


def test_tools_of_a_namespace_have_its_name_before_theirs(server: Running) -> None:
    """As Codex has those of its MCP servers."""
    space = {
        "type": "namespace",
        "name": "post",
        "description": "",
        "tools": [OPENAI_TOOLS[1], {"type": "custom"}],
    }
    asked: dict[str, Any] = {"tools": [OPENAI_TOOLS[0], space], "max_output_tokens": 300}
    user = {"role": "user", "content": "x"}
    call = {"name": "post__mail", "arguments": {"text": "x", "urgent": True}}
    with scripted(server.service.llm, f"<tool_call>\n{json.dumps(call)}\n</tool_call>"):
        whole = server.ask("POST", "/v1/responses", {**asked, "input": [user]})
        events = named_events(server.ask("POST", "/v1/responses", {**asked, "input": [user], "stream": True}))
    [item] = whole.json["output"]
    assert (item["name"], item["namespace"], whole.headers["x-penstock-ignored"]) == (
        "mail",
        "post",
        "tools.custom",
    )
    Response.model_validate(whole.json, strict=True)
    [streamed] = events[-1]["response"]["output"]
    assert (streamed["name"], streamed["namespace"]) == ("mail", "post")
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event, strict=True)
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "sent"}
    second = server.ask("POST", "/v1/responses", {**asked, "input": [user, item, result]}).json["usage"]
    assert second["input_tokens_details"]["cached_tokens"] > whole.json["usage"]["input_tokens"] - 64


def test_a_response_tells_what_it_was_asked_for(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given, told in (
        (
            {"type": "json_schema", "name": "x", "schema": schema},
            {"name": "x", "schema": schema, "strict": True},
        ),
        ({"type": "json_object"}, {}),
        ({"type": "text"}, {}),
    ):
        asked = {"input": "x", "max_output_tokens": 2, "text": {"format": given}, "metadata": {"a": 5}}
        reply = server.ask("POST", "/v1/responses", asked).json
        assert reply["text"]["format"] == {"type": given["type"], **told}
        assert Response.model_validate(reply, strict=True).metadata == {"a": "5"}


def test_thoughts_that_were_told_in_any_way(server: Running) -> None:
    text = {"type": "reasoning_text", "text": "a"}
    for content, status in (([text], 200), ("a", 200), (5, 200), (None, 200), ([5], 400)):
        item = {"type": "reasoning", "id": "x", "summary": [], "content": content}
        asked = {"input": [{"role": "user", "content": "x"}, item], "max_output_tokens": 2}
        assert server.ask("POST", "/v1/responses", asked).status == status


@pytest.mark.parametrize(
    "fields",
    [
        {"input": []},
        {"input": [{"type": "item_reference", "id": "a"}]},
        {"input": [{"type": "function_call", "name": "f", "call_id": "a", "arguments": "{"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tool_choice": {"type": "function", "name": "nothing"}},
        {"text": {"format": {"type": "json_schema"}}},
    ],
    ids=str,
)
def test_what_responses_refuse(server: Running, fields: Any) -> None:
    reply = server.ask("POST", "/v1/responses", {"input": "hello", "max_output_tokens": 2, **fields})
    assert reply.status == 400, reply.body
    assert reply.error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("responses", {"n": 2}, "n"),
        ("messages", {"n": 2}, "n"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("messages", {"stop_sequences": [1]}, "stop_sequences[0]"),
        ("responses", {"input": 5}, "input"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ("messages", {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content"),
        ("messages", {"system": [{"type": "image"}]}, "system"),
    ],
    ids=str,
)
def test_what_is_wrong_is_called_as_the_client_calls_it(
    server: Running, path: str, fields: Any, param: str
) -> None:
    body = {"input": "x"} if path == "responses" else {"messages": [{"role": "user", "content": "x"}]}
    reply = server.ask("POST", f"/v1/{path}", {**body, **fields})
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.body


def test_an_answer_that_is_one_has_no_more_beside_it(server: Running) -> None:
    fields = {
        "n": 1,
        "max_tokens": 2,
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "return_progress": True,
    }
    for path, body in (
        ("responses", {"input": "x"}),
        ("messages", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        reply = server.ask("POST", f"/v1/{path}", {**body, **fields})
        told = reply.headers["x-penstock-ignored"]
        assert (reply.status, told) == (200, "prompt_logprobs, return_token_ids, return_progress")


def test_what_responses_ignore_or_hold_to(server: Running) -> None:
    reply = server.ask(
        "POST",
        "/v1/responses",
        {
            "input": "hi",
            "max_output_tokens": 2,
            "include": ["x"],
            "client_metadata": {},
            "tools": [{"type": "web_search"}],
        },
    )
    assert (reply.status, reply.headers["x-penstock-ignored"]) == (
        200,
        "include, client_metadata, tools.web_search",
    )
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    reply = server.ask("POST", "/v1/responses", {"input": "hi", "text": wanted, "max_output_tokens": 90})
    assert json.loads(reply.json["output"][0]["content"][0]["text"])["a"] in (True, False)


def test_messages_are_what_the_client_s_models_say(server: Running, thinking: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}], "tools": ANTHROPIC_TOOLS, "max_tokens": 400}
    for on, said, kinds in (
        (server, SAID, ["text", "tool_use"]),
        (server, "Rain.", ["text"]),
        (thinking, "so be it\n</think>\n\nYes.", ["thinking", "text"]),
    ):
        with scripted(on.service.llm, said):
            whole = on.ask("POST", "/v1/messages?beta=true", asked)
            stream = on.ask("POST", "/v1/messages", {**asked, "stream": True})
        assert whole.status == 200, whole.body
        message = anthropic.types.Message.model_validate(whole.json, strict=True)
        assert [block.type for block in message.content] == kinds
        events = named_events(stream)
        for event in events:
            if event["type"] != "ping":
                TypeAdapter(anthropic.types.RawMessageStreamEvent).validate_python(event, strict=True)
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")


def test_a_loop_by_anthropic_s_messages(server: Running) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "Be brief. " * 120, "cache_control": {"type": "ephemeral"}},
    ]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "How is the weather?"}]}]
    asked: dict[str, Any] = {
        "model": "claude-x",
        "system": system,
        "tools": ANTHROPIC_TOOLS,
        "max_tokens": 400,
    }
    counted = client.messages.count_tokens(
        model="claude-x", system=system, tools=ANTHROPIC_TOOLS, messages=messages
    )
    with scripted(server.service.llm, SAID), client.messages.stream(messages=messages, **asked) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    assert first.content[0].text == "I look."
    assert first.content[1].input == ARGUMENTS
    usage = first.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    result = {
        "type": "tool_result",
        "tool_use_id": first.content[1].id,
        "content": [{"type": "text", "text": "rain"}],
    }
    messages += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    with scripted(server.service.llm, "It rains."):
        second = client.messages.create(messages=messages, **asked)
        stopped = client.messages.create(messages=messages, stop_sequences=["snows", "rains"], **asked)
    assert (second.content[0].text, second.stop_reason) == ("It rains.", "end_turn")
    read, cached = second.usage.input_tokens, second.usage.cache_read_input_tokens
    assert cached >= 0.9 * (read + cached)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "rains")
    with scripted(server.service.llm, " upon a time"):
        begun = [*messages[:1], {"role": "assistant", "content": "Once"}]
        goes_on = client.messages.create(model="x", messages=begun, max_tokens=5)
    assert (goes_on.content[0].text.strip(), goes_on.stop_reason) == ("upon", "max_tokens")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"tool_choice": {"type": "tool", "name": "nothing"}},
        {"tool_choice": {"type": "any"}},
        {"max_tokens": 0},
    ],
    ids=str,
)
def test_what_messages_refuse(server: Running, fields: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}
    reply = server.ask("POST", "/v1/messages", body)
    assert (reply.status, reply.json["type"]) == (400, "error")
    assert reply.json["error"]["type"] == "invalid_request_error"


def test_a_tool_that_comes_later_leaves_the_prompt_s_beginning_alone(server: Running) -> None:
    search = {"name": "search", "description": "look " * 50, "input_schema": {"type": "object"}}
    mail = {**ANTHROPIC_TOOLS[1], "defer_loading": True}
    asked: dict[str, Any] = {"tools": [mail, search], "messages": [{"role": "user", "content": "find it"}]}
    called = {"type": "tool_use", "id": "a", "name": "search", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "mail"}] * 2
    result = {"type": "tool_result", "tool_use_id": "a", "content": found}
    history = [{"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    later = {**asked, "messages": [*asked["messages"], *history]}
    force = {"tool_choice": {"type": "tool", "name": "mail"}, "max_tokens": 60}

    def count(body: dict[str, Any]) -> int:
        return int(server.ask("POST", "/v1/messages/count_tokens", body).json["input_tokens"])

    assert count(asked) == count({**asked, "tools": [search]})
    assert count(later) > count({**later, "tools": [search]}) + len(json.dumps(mail["input_schema"]))
    assert server.ask("POST", "/v1/messages", {**asked, **force}).status == 400
    server.ask("POST", "/v1/messages", {**asked, "max_tokens": 1})
    reply = server.ask("POST", "/v1/messages", {**later, **force})
    assert reply.json["usage"]["cache_read_input_tokens"] >= count(asked) - 64
    assert count(asked | {"messages": asked["messages"] + history[:1]}) < count(later)
    twice = server.ask("POST", "/v1/messages", {**asked, "tools": [mail, search, search], "max_tokens": 1})
    assert twice.json["error"]["param"] == "tools"


def test_tools_of_anthropic_s_own_are_told(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    own = {"type": "bash_20250124", "name": "bash"}
    custom = {"type": "custom", "name": "f", "input_schema": {"type": "object"}}
    cached = {"cache_control": {"type": "ephemeral"}}
    reply = server.ask("POST", "/v1/messages", {**body, "tools": [own, {**custom, **cached}], **cached})
    assert (reply.status, reply.headers["x-penstock-ignored"]) == (200, "tools.bash_20250124")


def test_a_schema_of_an_answer_by_either_name(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    wanted = {"type": "json_schema", "schema": {"type": "boolean"}}
    for fields in ({"output_format": wanted}, {"output_config": {"format": wanted}}):
        reply = server.ask("POST", "/v1/messages", {**body, **fields})
        assert reply.json["content"][0]["text"] in ("true", "false"), reply.body


def test_any_of_the_tools(server: Running) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    forced = client.messages.create(
        model="x",
        messages=[{"role": "user", "content": "x"}],
        tools=[{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=200,
    )
    assert [block.type for block in forced.content] == ["tool_use"]


def test_a_call_that_is_no_json_is_no_failure(server: Running) -> None:
    many = [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(10)]  # too complex to be held to
    schema = {"type": "object", "properties": {"a": {"allOf": many}}}
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
    with scripted(server.service.llm, """<tool_call>\n{"name": "f", "arguments": {'a': 1}}\n</tool_call>"""):
        reply = server.ask(
            "POST", "/v1/messages", {**asked, "tools": [{"name": "f", "input_schema": schema}]}
        )
    assert (reply.status, reply.headers["x-penstock-ignored"]) == (200, "tools.parameters")
    assert [block["type"] for block in reply.json["content"]] == ["text"]
    number = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}}}
    with scripted(server.service.llm, '<tool_call>\n{"name": "f", "arguments": {"a": -1e999}}\n</tool_call>'):
        reply = server.ask("POST", "/v1/messages", {**asked, "tools": [number]})
    assert reply.json["content"][0]["input"] == {"a": -sys.float_info.max}


def test_errors_are_the_clients_own(server: Running) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="x", messages=[{"role": "user", "content": "x" * 9000}], max_tokens=2)
    with pytest.raises(openai.BadRequestError):
        server.client().responses.create(model="x", input="x" * 9000)
