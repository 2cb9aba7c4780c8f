"""Tools and thoughts on chat: whatever a model writes, calls that it makes parse and fit their schemas."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.llm import LLM
from penstock.frontends.server.settings import ServerSettings
from tests.byte_models import byte_backend, model_of_bytes
from tests.engine.test_constraint import conforms, objects, schemas
from tests.models.call_templates import MAIL, TEMPLATES, THINKING, WEATHER, tool
from tests.server.running import NAME, Reply, Running, running
from tests.server.scripted import scripted

USER = {"role": "user", "content": "hello"}
TOOLS = [WEATHER, MAIL]
HERMES = TEMPLATES["hermes"]
FORCED: dict[str, Any] = {"max_tokens": 400, "temperature": 1.0}


def with_template(folder: Path, template: str) -> Path:
    model = model_of_bytes("llama", folder / NAME)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    config = json.loads((model / "config.json").read_text())
    end = byte_backend().token_to_id("Ā")  # the byte 0
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
    return model


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model says what a test tells it to."""
    llm = LLM(with_template(tmp_path_factory.mktemp("told"), HERMES[0]), dtype="float32", threads=1)
    with running(llm, ServerSettings(NAME)) as started:
        yield started


def call_by_force(server: Running, data: st.DataObject, *, is_named: bool) -> str:
    """Calls of random tools by a random model, which have to fit their schemas. Why the answer ended."""
    wanted = [data.draw(objects(schemas())) for _ in range(data.draw(st.integers(1, 3)))]
    tools = [tool(f"f{index}") for index in range(len(wanted))]
    for each, schema in zip(tools, wanted, strict=True):
        each["function"]["parameters"] = schema
    choice = {"type": "function", "function": {"name": "f0"}} if is_named else "required"
    seed = data.draw(st.integers(0, 2**30))
    reply = server.chat(tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=seed, **FORCED)
    assert reply.status == 200, reply.body
    [answer] = reply.json["choices"]
    calls, reason = answer["message"].get("tool_calls", []), str(answer["finish_reason"])
    assert reason == ("tool_calls" if calls else "length")
    assert not answer["message"]["content"]
    for call in calls:
        name = call["function"]["name"]
        assert conforms(json.loads(call["function"]["arguments"]), wanted[int(name[1:])])
        assert name == "f0" or not is_named
    return reason


@pytest.mark.parametrize("is_named", [False, True])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_forced_calls_fit_their_schemas(server: Running, is_named: bool, data: st.DataObject) -> None:
    call_by_force(server, data, is_named=is_named)


def joined(reply: Reply) -> tuple[dict[str, Any], str]:
    """The message that a stream adds up to, and why it ended."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({**call, "function": {**call["function"], "arguments": ""}})
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def test_calls_whole_and_streamed(told: Running) -> None:
    for answer, names in ((HERMES[1], ["weather"]), (f"I look.\n{HERMES[2]}", ["weather", "mail"])):
        with scripted(told.service.llm, answer):
            whole = told.chat(tools=TOOLS, max_tokens=400).json["choices"][0]
            streamed, reason = joined(told.chat(tools=TOOLS, max_tokens=400, stream=True))
        calls = whole["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == names
        assert whole["finish_reason"] == reason == "tool_calls"
        assert (
            (whole["message"]["content"] or "") == streamed["content"] == answer.partition("<tool")[0].strip()
        )
        assert [call["function"] for call in calls] == [call["function"] for call in streamed["tool_calls"]]
        assert len({call["id"] for call in calls}) == len(calls)
        assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Köln", "days": 3}


def test_choices_of_tools(told: Running) -> None:
    with scripted(told.service.llm, "No tool is needed."):
        for choice in ("auto", "none", None):
            [answer] = told.chat(tools=TOOLS, tool_choice=choice, max_tokens=18).json["choices"]
            assert answer["message"]["content"] == "No tool is needed."
    with scripted(told.service.llm, str(HERMES[2])):  # which is held to one call
        [answer] = told.chat(tools=TOOLS, parallel_tool_calls=False, max_tokens=400).json["choices"]
        assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["weather"]
        [answer] = told.chat(tools=TOOLS, tool_choice="none", max_tokens=400).json["choices"]
        assert answer["message"]["content"] == HERMES[2]
        [answer] = told.chat(tools=TOOLS, max_tokens=60).json["choices"]
        assert (answer["finish_reason"], answer["message"].get("tool_calls")) == ("length", None)


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def test_some_of_the_tools_may_be_called(told: Running) -> None:
    """The prompt has all of them, so that the cache knows it."""
    call = {"name": "weather", "arguments": {"city": "K"}}
    plain = told.chat(tools=TOOLS, max_tokens=1).json["usage"]["prompt_tokens"]
    with scripted(told.service.llm, f"<tool_call>\n{json.dumps(call)}"):
        for mode, names in (("auto", ["mail"]), ("required", ["mail"]), ("auto", ["mail", "weather"])):
            allowed = {"mode": mode, "tools": named(*names)}
            choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
            reply = told.chat(tools=TOOLS, tool_choice=choice, max_tokens=400, temperature=1.0, seed=2)
            assert reply.json["usage"]["prompt_tokens"] == plain
            for called in reply.json["choices"][0]["message"].get("tool_calls", []):
                assert called["function"]["name"] in names
            assert reply.json["choices"][0]["message"]["content"] is None or mode == "auto"
    with scripted(told.service.llm, "Hello there."):
        choice = {"type": "allowed_tools", "mode": "required", "tools": named("mail")}
        reply = told.chat(tools=TOOLS, tool_choice=choice, max_tokens=400, seed=2)
        assert not reply.json["choices"][0]["message"]["content"]
    refused: list[Any] = [
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "mode": "none", "tools": named("mail")},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
        {"type": "allowed_tools", "mode": "auto", "tools": named("nothing")},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
        {"type": "custom", "custom": {"name": "mail"}},
        {"type": "function"},
        5,
    ]
    for wrong in refused:
        reply = told.chat(tools=TOOLS, tool_choice=wrong)
        assert (reply.status, reply.error["param"]) == (400, "tool_choice"), reply.body


def test_a_chat_s_tokens_are_those_that_it_is_charged_for(told: Running) -> None:
    several: list[dict[str, Any]] = [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"messages": [USER, {"role": "assistant", "content": "Once"}], "continue_final_message": True},
        {"add_generation_prompt": False},
    ]
    for fields in several:
        asked = {"messages": [USER], **fields}
        count = told.ask("POST", "/tokenize", asked).json["count"]
        assert count == told.chat(max_tokens=1, **asked).json["usage"]["prompt_tokens"]
    reply = told.ask("POST", "/tokenize", {"messages": [USER], "tools": [WEATHER, WEATHER]})
    assert reply.error["param"] == "tools"


def test_results_go_back_in_messages(told: Running) -> None:
    with scripted(told.service.llm, HERMES[1]):
        first = told.chat(tools=TOOLS, max_tokens=400)
    message = first.json["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain " * 40}
    second = told.chat(tools=TOOLS, messages=[USER, message, result], max_tokens=1).json
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.9 * first.json["usage"]["prompt_tokens"] - 64
    rendered = told.service.llm.tokenizer.decode(
        told.ask("POST", "/tokenize", {"messages": [USER, message, result]}).json["tokens"]
    )
    assert HERMES[1] in rendered
    assert "rain rain" in rendered


def test_a_template_without_tools_is_told_of_them(server: Running) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "mail", "arguments": '{"text": "x"}'}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sent"},
    ]
    plain = server.chat(messages=[USER], max_tokens=1).json["usage"]["prompt_tokens"]
    with_tools = server.chat(messages=[USER], tools=TOOLS, max_tokens=1).json["usage"]["prompt_tokens"]
    assert with_tools > plain + 300
    assert server.chat(messages=history, tools=TOOLS, max_tokens=1).status == 200
    text = server.service.llm.tokenizer.decode(
        server.ask("POST", "/tokenize", {"messages": history}).json["tokens"]
    )
    assert '<tool_call>\n{"name": "mail", "arguments": {"text": "x"}}\n</tool_call>' in text
    assert "<tool_response>\nsent\n</tool_response>" in text


def bomb(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def tools_with(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


BAD: dict[str, dict[str, Any]] = {
    "no such tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
    "required of none": {"tool_choice": "required"},
    "two of a name": {"tools": [WEATHER, WEATHER]},
    "a name with a mark": {"tools": [{"type": "function", "function": {"name": "a<b"}}]},
    "no name": {"tools": [{"type": "function", "function": {}}]},
    "thousands": {"tools": [tool(f"f{index}") for index in range(3000)]},
    "deep": {"tools": tools_with(bomb(180)), "tool_choice": "required"},
    "deeper": {"tools": tools_with(bomb(900)), "tool_choice": "required"},
    "loop": {"tools": tools_with({"$ref": "#"}), "tool_choice": "required", "max_tokens": 100},
    "large": {"tools": tools_with({"enum": ["x" * 100_000]}), "tool_choice": "required"},
    "wide": {
        "tools": tools_with({"properties": {f"k{n}": {} for n in range(2000)}}),
        "tool_choice": "required",
    },
    "arguments": {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        ]
    },
    "arguments that are a list": {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
        ]
    },
    "variables": {"chat_template_kwargs": {"messages": []}},
    "nothing to continue": {
        "messages": [USER, {"role": "assistant", "content": ""}],
        "continue_final_message": True,
    },
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_about_tools_is_said(server: Running, name: str) -> None:
    reply = server.chat(**BAD[name])
    assert reply.status == 400, reply.body
    assert reply.error["message"]


@pytest.mark.parametrize("schema", [{"type": "array"}, {"type": "string"}, {"const": 5}], ids=str)
def test_arguments_that_are_no_object_are_refused(told: Running, schema: Any) -> None:
    reply = told.chat(tools=tools_with(schema), tool_choice="required", max_tokens=60)
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert "start:" not in reply.error["message"]  # rules that the client never saw
    assert (
        told.chat(tools=tools_with(schema), max_tokens=2).headers["x-penstock-ignored"] == "tools.parameters"
    )


def test_arguments_that_may_be_more_are_an_object(told: Running) -> None:
    schema = {"anyOf": [{"enum": [{"a": 1}]}, {"type": "integer"}]}
    reply = told.chat(tools=tools_with(schema), tool_choice="required", max_tokens=200)
    (call,) = reply.json["choices"][0]["message"]["tool_calls"][:1]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}


def test_a_schema_that_cannot_be_held_to_is_told(told: Running) -> None:
    many = [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(10)]
    reply = told.chat(tools=tools_with({"properties": {"a": {"allOf": many}}}), max_tokens=2)
    assert (reply.status, reply.headers["x-penstock-ignored"]) == (200, "tools.parameters")
    reply = told.chat(tools=[{"type": "web_search"}, *TOOLS], max_tokens=2)
    assert (reply.status, reply.headers["x-penstock-ignored"]) == (200, "tools.web_search")


def test_thoughts(tmp_path: Path) -> None:
    llm = LLM(with_template(tmp_path, THINKING), dtype="float32", threads=1)
    with running(llm, ServerSettings(NAME)) as server, scripted(llm, "so be it\n</think>\n\nYes."):
        reply = server.chat(max_tokens=40).json
        message = reply["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"][:4]) == ("so be it", "Yes.")
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("so be it\n</think>")
        streamed, _ = joined(server.chat(max_tokens=40, stream=True))
        assert (streamed["reasoning_content"], streamed["content"][:4]) == ("so be it", "Yes.")
        for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            message = server.chat(max_tokens=8, **off).json["choices"][0]["message"]
            assert message["content"] == "so be it"[:8]
        forced = server.chat(response_format={"type": "json_object"}, max_tokens=40, seed=1).json
        assert forced["choices"][0]["message"]["content"].startswith("{")


def test_an_answer_goes_on_where_its_message_ends_and_not_behind(told: Running) -> None:
    """What the template writes behind a message may read the same."""
    for begun in ("n", "a <|end", "<|end|> e  "):
        body = {"messages": [USER, {"role": "assistant", "content": begun}], "continue_final_message": True}
        prompt = told.ask("POST", "/apply-template", body).json["prompt"]
        assert prompt.endswith(f"<|assistant|>{begun.rstrip()}"), prompt
    body = {"messages": [USER, {"role": "assistant", "content": " \n"}], "continue_final_message": True}
    assert told.chat(**body).error["param"] == "continue_final_message"
    assert told.ask("POST", "/v1/messages", {**body, "max_tokens": 1}).status == 200


def test_a_call_that_was_cut_leaves_no_text(told: Running) -> None:
    with scripted(told.service.llm, f"I look.\n{HERMES[1]}"):
        for most in (25, 60):
            [answer] = told.chat(tools=TOOLS, max_tokens=most).json["choices"]
            assert (answer["message"]["content"], answer["finish_reason"]) == ("I look.", "length")
            streamed, _ = joined(told.chat(tools=TOOLS, max_tokens=most, stream=True))
            assert streamed["content"] == "I look."


def test_an_answer_goes_on_from_its_beginning(server: Running, llm: LLM) -> None:
    begun = {"role": "assistant", "content": "Once upon"}
    reply = server.chat(messages=[USER, begun], continue_final_message=True, temperature=0, max_tokens=8)
    prompt = "<user>hello\n<assistant>Once upon"
    assert reply.json["choices"][0]["message"]["content"] == llm.generate(prompt, raw=True, max_tokens=8).text
