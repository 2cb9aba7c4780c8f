"""What other servers' clients send is taken: unknown names are ignored and told, slips and what changes an answer's
meaning are refused."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from penstock.engine.llm import LLM
from penstock.frontends.server.parts import MAX_IGNORED
from penstock.frontends.server.settings import ServerSettings
from tests.byte_models import byte_backend, model_of_bytes
from tests.server.running import NAME, Running, running

USER = {"role": "user", "content": "hello"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}

# Bodies out of other servers' own tests and clients, and the names in them that have no use here.
IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"cache_prompt": True, "samplers": ["top_k"], "id_slot": 0}, "cache_prompt, samplers, id_slot"),
    ({"service_tier": "priority", "verbosity": "low"}, "service_tier, verbosity"),
    ({"messages": [USER | {"id": "msg_1", "cache_control": {"type": "ephemeral"}}]}, "id, cache_control"),
    ({"typical_p": 0.9, "mirostat": 2, "top_a": 0.1}, "typical_p, mirostat, top_a"),
    ({"a b\n,c": 1}, "a?b??c"),
]


@pytest.mark.parametrize(("fields", "names"), IGNORED, ids=lambda value: str(value)[:40])
def test_what_is_not_known_is_ignored_and_told(
    server: Running, strict: Running, fields: Any, names: str
) -> None:
    plain = server.chat(**GREEDY)
    reply = server.chat(**GREEDY | fields)
    assert (reply.status, reply.headers["x-penstock-ignored"]) == (200, names)
    assert reply.json["choices"] == plain.json["choices"]
    assert "x-penstock-ignored" not in plain.headers
    assert server.chat(stream=True, **fields).headers["x-penstock-ignored"] == names
    assert strict.chat(**fields).error["code"] in ("unknown_parameter", "unsupported_parameter")


def test_it_is_logged_once_and_counted(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    def count() -> float:
        lines = server.ask("GET", "/metrics").body.decode().splitlines()
        return next(
            float(line.split()[1]) for line in lines if line.startswith("penstock_ignored_parameters_total ")
        )

    before = count()
    with caplog.at_level(logging.WARNING, "penstock.server"):
        for _ in range(3):
            server.chat(zorp=1, blip=2)
    assert count() == before + 6
    assert len([record for record in caplog.records if "zorp, blip" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temprature": 1}, "temprature", "temperature"),
        ({"max_token": 1}, "max_token", "max_tokens"),
        (
            {"stream_options": {"include_usages": True}, "stream": True},
            "stream_options.include_usages",
            "include_usage",
        ),
        ({"messages": [USER | {"contents": "x"}]}, "messages[0].contents", "content"),
        ({"best_of": 2}, "best_of", "n"),
        ({"use_beam_search": True}, "use_beam_search", "beam"),
        ({"chat_template": "x"}, "chat_template", "template"),
        ({"documents": [{"text": "x"}]}, "documents", "message"),
        ({"audio": {}}, "audio", "sound"),
        ({"web_search_options": {}}, "web_search_options", "web"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "tags"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "cutting"),
        ({"echo": True}, "echo", "completions"),
        ({"add_special_tokens": True}, "add_special_tokens", "template"),
        ({"topP": 1}, "topP", "top_p"),
        ({"seeds": 1}, "seeds", "seed"),
        ({"tool": []}, "tool", "tools"),
        ({"guided_regex": ""}, "guided_regex", "regular expression"),
        ({"guided_choice": [""]}, "guided_choice", "texts"),
        ({"repeat_penalty": "x"}, "repeat_penalty", "number"),
        ({"tool_choice": {}}, "tool_choice", "required"),
        ({"max_tokens": 4, "n_predict": 5}, "n_predict", "contradicts"),
        ({f"k{n}": 0 for n in range(MAX_IGNORED + 1)}, f"k{MAX_IGNORED}", "not known"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_slips_and_what_changes_the_meaning_are_refused(
    server: Running, fields: Any, param: str, said: str
) -> None:
    reply = server.chat(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert said in reply.error["message"]


def test_names_and_numbers_of_other_servers(server: Running, llm: LLM) -> None:
    sampled = {"temperature": 1.0, "seed": 2**63 - 5, "repetition_penalty": 1.3, "max_tokens": 6}
    expected = server.chat(**sampled).json["choices"]
    other = {
        "temperature": 1.0,
        "seed": -5,
        "repeat_penalty": 1.3,
        "max_tokens": None,
        "n_predict": 6,
        "top_k": -1,
    }
    assert server.chat(**other).json["choices"] == expected
    assert server.chat(seed=-1, temperature=1.0).status == 200
    assert server.chat(model="gpt-99").json["model"] == NAME
    assert server.chat(model=None).status == 200
    assert server.chat(messages=[{"role": "king", "content": "x"}], max_tokens=1).status == 200


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
LENT: dict[str, tuple[str, dict[str, Any]]] = {
    "no grammar": ("/v1/chat/completions", {"grammar": "", "json_schema": {}}),
    "names of other servers": (
        "/v1/chat/completions",
        {"reasoning_format": "none", "parse_tool_calls": True, "add_special_tokens": False},
    ),
    "a tool without a type": (
        "/v1/chat/completions",
        {"tools": [{"function": {"name": "f"}}], "max_tokens": 1},
    ),
    "any of them": (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "any"},
    ),
    "an answer of nothing": (
        "/v1/chat/completions",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None},
                USER,
                {"role": "assistant", "content": []},
                USER,
            ]
        },
    ),
    "a result of nothing": (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": None}]},
    ),
    "biases in pairs": ("/completion", {"prompt": "x", "logit_bias": [[5, -1.5], [6, False]]}),
    "a text as content": ("/v1/embeddings", {"content": "x"}),
}


@pytest.mark.parametrize("name", LENT)
def test_what_clients_of_other_servers_send(server: Running, name: str) -> None:
    path, fields = LENT[name]
    right = {"messages": [USER]} if "chat" in path else {}
    assert (reply := server.ask("POST", path, {**right, "max_tokens": 4, **fields})).status == 200, reply.body


def test_an_answer_is_cut_at_the_room_there_is(server: Running) -> None:
    room = server.service.max_request_tokens
    for most in (10**9, -1):
        usage = server.completion(prompt="x" * (room - 8), max_tokens=most).json["usage"]
        assert usage["total_tokens"] == room if most > 0 else usage["completion_tokens"] == 8


def test_texts_and_ids_in_a_row(server: Running, llm: LLM) -> None:
    ids = llm.tokenize("hello", raw=True)
    mixed: list[Any] = [ids[0], "el", *ids[3:]]
    [alone] = server.completion(prompt="hello", **GREEDY).json["choices"]
    answer = server.completion(prompt=["hello", mixed], **GREEDY).json
    assert [choice["text"] for choice in answer["choices"]] == [alone["text"]] * 2
    assert server.completion(prompt=mixed, **GREEDY).json["choices"][0]["text"] == alone["text"]


def test_the_tokens_that_begin_a_text_may_be_left_away(tmp_path: Path) -> None:
    folder = model_of_bytes("llama", tmp_path / NAME)
    backend, first = byte_backend().from_str(byte_backend().to_str()), "Ā"
    begins = [(first, backend.token_to_id(first))]
    backend.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=begins)
    backend.save(str(folder / "tokenizer.json"))
    with running(LLM(folder, dtype="float32", threads=1), ServerSettings(NAME)) as server:
        for prompt, adds, count in (
            ("abc", None, 4),
            ("abc", True, 4),
            ("abc", False, 3),
            ([1, "bc"], True, 3),
        ):
            reply = server.completion(prompt=prompt, add_special_tokens=adds)
            assert reply.json["usage"]["prompt_tokens"] == count
        reply = server.completion(prompt=["a", "b"], add_special_tokens=False)
        assert reply.json["usage"]["prompt_tokens"] == 2


def test_usage_in_every_chunk(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = server.chat(stream=True, stream_options=options, **GREEDY).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1], last["usage"]["completion_tokens"]) == (0, 6, 6)


def test_paths_with_and_without_a_version(server: Running) -> None:
    body = {"prompt": "hello", "messages": [USER], "content": "hello"}
    for path, field in (
        ("/completions", "prompt"),
        ("/chat/completions", "messages"),
        ("/tokenize", "content"),
    ):
        answers = [server.ask("POST", f"{v}{path}", {field: body[field], **GREEDY}).json for v in ("", "/v1")]
        first, second = (answer.get("choices", answer.get("tokens")) for answer in answers)
        assert first == second
    assert server.ask("GET", "/models").json == server.ask("GET", "/v1/models").json
    [model] = server.ask("GET", "/models").json["data"]
    assert (model["root"], model["max_model_len"]) == (NAME, server.service.max_request_tokens)


def test_what_servers_tell_of_themselves(server: Running) -> None:
    assert server.ask("GET", "/version").json["version"]
    assert server.ask("GET", "/ping").status == server.ask("POST", "/ping").status == 200
    assert server.ask("GET", "/load").json == {"server_load": 0}
    props = server.ask("GET", "/props").json
    assert props["default_generation_settings"]["n_ctx"] == server.service.max_request_tokens
    assert "assistant" in props["chat_template"]
    slots = server.ask("GET", "/slots").json
    assert len(slots) == props["total_slots"]
    assert not any(slot["is_processing"] for slot in slots)
    paths = server.ask("GET", "/openapi.json").json
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models"} <= set(paths["paths"])
    chat = paths["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert "messages" in paths["components"]["schemas"][chat["$ref"].rpartition("/")[2]]["properties"]
    assert server.ask("HEAD", "/").status == 200


NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
OBJECT = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}}, r'\{.*"a".*\}'),
        ({"response_format": {"type": "json_schema", "schema": OBJECT}}, r'\{.*"a".*\}'),
        ({"response_format": {"type": "json_object", "schema": OBJECT}}, r'\{.*"a".*\}'),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "xy"'}}, "xy"),
        ({"structured_outputs": {"json": OBJECT, "disable_any_whitespace": True}}, r'\{.*"a".*\}'),
        ({"structured_outputs": {"regex": "a{3}"}}, "aaa"),
        ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
        ({"structured_outputs": {"grammar": 'start: "z" "z"'}}, "zz"),
        ({"guided_json": json.dumps(OBJECT)}, r'\{.*"a".*\}'),
        ({"guided_regex": "[bc]{4}"}, "[bc]{4}"),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"guided_grammar": 'root ::= "xy" [0-9]'}, "xy[0-9]"),
        ({"grammar": 'root ::= "xy"'}, "xy"),
        ({"json_schema": NUMBER, "max_tokens": 1}, "[0-9]"),
    ],
    ids=lambda value: str(value)[:48],
)
def test_answers_are_held_to_every_form_of_grammar(server: Running, fields: Any, pattern: str) -> None:
    for ask in (server.chat, server.completion):
        reply = ask(**{"max_tokens": 60, "temperature": 1.0, "seed": 3} | fields)
        assert reply.status == 200, reply.body
        [choice] = reply.json["choices"]
        text = choice.get("text", choice.get("message", {}).get("content"))
        assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a", "guided_choice": ["b"]},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"response_format": {"type": "json_object"}, "grammar": 'root ::= "xy"'},
        {"guided_choice": []},
        {"guided_json": "{"},
        {"guided_regex": "(a"},
        {"grammar": "prose"},
        {"response_format": {"type": "grammar"}},
    ],
    ids=str,
)
def test_formats_that_contradict_or_are_none(server: Running, fields: Any) -> None:
    assert server.chat(**fields).status == 400


def test_a_format_that_nothing_holds_to_is_told(server: Running, strict: Running) -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": "regex"}}}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    reply = server.chat(**fields)
    assert (reply.status, reply.headers["x-penstock-ignored"]) == (200, "format.regex")
    reply = strict.chat(**fields)
    assert (reply.status, reply.error["param"]) == (400, "format")
    schema["properties"]["format"]["format"] = "date"  # type: ignore[index]
    assert strict.chat(**fields).status == 200


def test_tokens_and_back(server: Running, llm: LLM) -> None:
    text = "Köln <user>"
    told = server.ask(
        "POST", "/tokenize", {"content": text, "with_pieces": True, "return_token_strs": True}
    ).json
    assert [token["piece"] for token in told["tokens"]] == told["token_strs"]
    assert told["token_strs"][1] == [0xC3]
    ids = [token["id"] for token in told["tokens"]]
    assert server.ask("POST", "/detokenize", {"tokens": ids}).json["content"] == text
    for name in ("add_special", "add_special_tokens"):
        reply = server.ask("POST", "/tokenize", {"prompt": text, name: False})
        assert "x-penstock-ignored" not in reply.headers
    for wrong in ([-1], [10**6], ["a"], 3, [True]):
        assert server.ask("POST", "/detokenize", {"tokens": wrong}).status == 400
    applied = server.ask("POST", "/apply-template", {"messages": [USER]}).json["prompt"]
    assert applied == "<user>hello\n<assistant>"
    assert server.chat(skip_special_tokens=False).status == 200
