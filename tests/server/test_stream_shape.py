"""What goes over the wire in a stream, to the letter."""

from tests.server.running import Running

GREEDY = {"temperature": 0, "stream": True}


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
