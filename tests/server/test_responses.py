"""What goes over the wire in a stream, to the letter; and large answers are written beside the event loop."""

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontends.server import responses
from penstock.frontends.server.responses import ChatLogprobs, to_json, to_json_in_parts
from tests.server.running import Running

GREEDY = {"temperature": 0, "stream": True}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=40,
)


def test_a_chats_chunks(server: Running) -> None:
    reply = server.chat(**GREEDY)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    first, *pieces, last, done = reply.events
    assert done == "[DONE]"
    for chunk in (first, *pieces, last):
        assert list(chunk) == ["id", "object", "created", "model", "system_fingerprint", "choices"]
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["id"] == first["id"]
        assert chunk["id"].startswith("chatcmpl-")
        [choice] = chunk["choices"]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason"}
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert all(set(piece["choices"][0]["delta"]) == {"content"} for piece in pieces)
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}


def test_a_completions_chunks(server: Running) -> None:
    *pieces, last, done = server.completion(**GREEDY).events
    assert done == "[DONE]"
    assert all(chunk["object"] == "text_completion" for chunk in (*pieces, last))
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in pieces)
    assert last["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]


def test_every_choice_has_an_opening_and_an_end(server: Running) -> None:
    *chunks, _ = server.chat(n=3, **GREEDY).events
    openings = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    ends = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert openings == [0, 1, 2]
    assert sorted(ends) == [0, 1, 2]


def test_progress_is_told_where_it_is_asked_for(server: Running) -> None:
    prompt = "x" * 300  # chunks of 64
    events = server.completion(prompt=prompt, return_progress=True, cache_salt="progress", **GREEDY).events
    told = [event["prompt_progress"] for event in events[:-1] if "prompt_progress" in event]
    assert [progress["processed"] for progress in told] == [64, 128, 192, 256, 300]
    assert all(progress["total"] == 300 and progress["cache"] == 0 for progress in told)
    times = [progress["time_ms"] for progress in told]
    assert times == sorted(times)
    assert all(event["choices"][0]["text"] == "" for event in events[:-1] if "prompt_progress" in event)
    assert not any(
        "prompt_progress" in event for event in server.completion(prompt=prompt, **GREEDY).events[:-1]
    )


def test_usage_is_null_until_the_last_chunk(server: Running) -> None:
    *chunks, last, _ = server.chat(stream_options={"include_usage": True}, **GREEDY).events
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    prompt = len("<user>hello\n<assistant>")
    assert last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 4,
        "total_tokens": prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 0},  # less than a block
    }


@given(value=values, size=st.integers(1, 5), depth=st.integers(0, 4))
def test_parts_are_the_whole(value: Any, size: int, depth: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(responses, "_SLICE", size)
        patch.setattr(responses, "_DEPTH", depth)
        assert to_json_in_parts(value) == to_json(value)


def test_no_part_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda *given, **how: noted(dumps(*given, **how)))

    def noted(text: str) -> str:
        sizes.append(len(text))
        return text

    top = [{"token": "x" * 8, "logprob": -1.5, "bytes": [1, 2, 3]}] * 20
    entry = {"token": "x", "logprob": 0.0, "bytes": [1], "top_logprobs": top}
    choice = {
        "index": 0,
        "message": {"content": "x"},
        "logprobs": {"content": [entry] * 4000, "refusal": None},
    }
    whole = to_json_in_parts({"choices": [choice] * 2, "usage": {}})
    assert len(whole) > 8_000_000
    assert max(sizes) < len(whole) / 20
    tokens = to_json_in_parts({"tokens": list(range(100_000)), "count": 100_000})
    assert json.loads(tokens)["tokens"][-1] == 99_999


def test_answers_are_made_and_written_on_a_thread_of_their_own(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    write, dump = ChatLogprobs.write, to_json_in_parts

    def noted_write(self: ChatLogprobs, events: Any) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return write(self, events)

    def noted_dump(content: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return dump(content)

    monkeypatch.setattr(ChatLogprobs, "write", noted_write)
    monkeypatch.setattr(responses, "to_json_in_parts", noted_dump)
    assert server.chat(logprobs=True, top_logprobs=20).status == 200
    assert server.ask("POST", "/tokenize", {"content": "hello"}).status == 200
    assert len(threads) == 3
    assert all(name.startswith("penstock-writer") for name in threads)
