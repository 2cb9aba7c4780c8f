"""Whatever a body holds, it is taken or refused soon, and the first thing that is wrong is all that is looked for."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.frontends.server import parts
from penstock.frontends.server.bodies import ChatBody, CompletionBody
from penstock.frontends.server.errors import ApiError
from penstock.frontends.server.parts import MAX_CONTAINERS, has_too_many_containers, parse
from tests.server.running import NAME, Running

MANY = 200_000
USER = {"role": "user", "content": "x"}
CHAT: dict[str, Any] = {"model": NAME, "messages": [USER]}
COMPLETION: dict[str, Any] = {"model": NAME, "prompt": "x"}
HUGE = 10**4299  # the longest that Python writes out

HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "messages that are none": ({"messages": [0] * MANY}, "messages"),
    "a thousand messages that are none": ({"messages": [0] * 1000}, "messages[0]"),
    "messages": ({"messages": [USER] * 20_000}, "messages"),
    "unknown names": ({f"k{n}": 0 for n in range(MANY)}, "k0"),
    "unknown names in a message": (
        {"messages": [USER | {f"k{n}": 0 for n in range(MANY)}]},
        "messages[0].k0",
    ),
    "unknown names further in": (
        {"response_format": {"type": "text", **{f"k{n}": 0 for n in range(MANY)}}},
        "response_format.k0",
    ),
    "parts that are none": ({"messages": [{"role": "user", "content": [0] * MANY}]}, "messages[0].content"),
    "stops": ({"stop": [0] * MANY}, "stop"),
    "biases": ({"logit_bias": {str(n): "x" for n in range(MANY)}}, "logit_bias"),
    "metadata": ({"metadata": {str(n): 0 for n in range(MANY)}}, "metadata"),
}


def takes_less(limit_s: float, work: Callable[[], object]) -> bool:
    """Of the processor's time, at least once in three: now and then all that other tests have left is gone through,
    in search of garbage, and that counts too."""

    def seconds() -> float:
        started = time.thread_time()
        work()
        return time.thread_time() - started

    return any(seconds() < limit_s for _ in range(3))


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_a_hundred_thousand_times_is_told_once(name: str) -> None:
    fields, param = HOSTILE[name]
    raw = json.dumps(CHAT | fields).encode()

    def refuse() -> None:
        with pytest.raises(ApiError) as caught:
            parse(raw, ChatBody)
        assert caught.value.param == param

    assert takes_less(0.5, refuse)
    with pytest.raises(ValidationError) as wrong:
        ChatBody.model_validate(CHAT | fields)
    assert wrong.value.error_count() < 5


@pytest.mark.parametrize(
    ("prompt", "is_taken"),
    [
        ([0] * 2_000_000, True),  # too long for any model, which is said later
        ([0] * 2_000_000 + [True], False),
        ([0] * 2_000_000 + [-1], False),
        ([0] * 1_000_000 + [HUGE], False),
        (["a"] * MANY, False),
        ([[0]] * 20_000, False),
        ([[0] * 1_000_000, [0.5]], False),
    ],
    ids=lambda value: str(value)[:10],
)
def test_long_prompts_are_gone_through_quickly(prompt: list[Any], is_taken: bool) -> None:
    raw = json.dumps(COMPLETION | {"prompt": prompt}).encode()

    def go_through() -> None:
        if is_taken:
            assert parse(raw, CompletionBody).prompt == [prompt]
        else:
            with pytest.raises(ApiError) as caught:
                parse(raw, CompletionBody)
            assert caught.value.param == "prompt"

    assert takes_less(1, go_through)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.sampled_from(['"', "\\", '["{', '\\"[', "[" * 9]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=5),
    max_leaves=20,
)


def num_containers(value: Any) -> int:
    match value:
        case dict():
            return 1 + sum(map(num_containers, value.values()))
        case list():
            return 1 + sum(map(num_containers, value))
    return 0


@given(value=json_values, limit=st.integers(0, 12), is_ascii=st.booleans())
def test_lists_and_objects_are_counted_without_parsing(value: Any, limit: int, is_ascii: bool) -> None:
    raw = json.dumps(value, ensure_ascii=is_ascii).encode(errors="replace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MAX_CONTAINERS", limit)
        assert has_too_many_containers(raw) == (num_containers(value) > limit)


@given(raw=st.text(alphabet='[{"\\x', max_size=40).map(str.encode))
def test_of_anything_that_is_no_json_too(raw: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MAX_CONTAINERS", 3)
        has_too_many_containers(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * (8 << 20),
        b'"' + b'\\"[' * (1 << 20),
        b'"[",' * (1 << 20),
        b'"' + b"\\" * (1 << 20),
        b'x["' * (1 << 20),
    ],
    ids=lambda raw: repr(raw[:8]),
)
def test_counting_takes_time_in_proportion(raw: bytes) -> None:
    assert takes_less(1, lambda: has_too_many_containers(raw))


def test_programs_are_no_lists(server: Running) -> None:
    program = "if (a[0]) { b = {}; }\n" * (MAX_CONTAINERS // 3)
    assert server.ask("POST", "/tokenize", {"content": program}).json["count"] == len(program)
    reply = server.ask("POST", "/tokenize", b'{"content": [' + b"[]," * MAX_CONTAINERS + b"0]}")
    assert (reply.status, reply.error["code"]) == (400, "invalid_value")
    assert str(MAX_CONTAINERS) in reply.error["message"]


@pytest.mark.parametrize(
    "name",
    ["n", "max_tokens", "max_completion_tokens", "top_k", "seed", "temperature", "top_logprobs", "user"],
)
@pytest.mark.parametrize("number", [HUGE, -HUGE, 2**63, 2**31 + 0.5])
def test_numbers_of_any_size_are_named(server: Running, name: str, number: float) -> None:
    reply = server.chat(**{name: number, "max_tokens": 4} if name != "max_tokens" else {name: number})
    if (name, number) == ("temperature", 2**63) or (name, number) == ("temperature", 2**31 + 0.5):
        assert reply.status == 200
    else:
        assert (reply.status, reply.error["param"]) == (400, name)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [HUGE]}, "prompt"),
        ({"prompt": [[2**31]]}, "prompt"),
        ({"logit_bias": {"1": HUGE}}, "logit_bias.1"),
        ({"logit_bias": {str(HUGE): 1}}, "logit_bias"),
        ({"logprobs": HUGE}, "logprobs"),
        ({"echo": HUGE}, "echo"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_and_those_in_other_places(server: Running, fields: dict[str, Any], param: str) -> None:
    reply = server.completion(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_stop_string_has_a_length(server: Running) -> None:
    assert server.completion(stop="x" * 1000).status == 200
    for stop in ("x" * 1001, ["a", "x" * 1001]):
        reply = server.completion(stop=stop)
        assert (reply.status, reply.error["param"]) == (400, "stop")
        assert "1000" in reply.error["message"]
        assert "1001" in reply.error["message"]


def test_more_messages_than_tokens_are_not_rendered(server: Running) -> None:
    reply = server.chat(messages=[USER] * 6500)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["param"] == "messages"
    assert "6500 messages" in reply.error["message"]


def test_a_schema_of_megabytes_is_refused_by_its_size(server: Running) -> None:
    schema = {"enum": list(range(300_000))}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = server.chat(response_format=wanted)
    assert (reply.status, reply.error["param"]) == (400, "response_format")
    assert "bytes" in reply.error["message"]
