"""Large answers are written beside the event loop, and read as if they had been written at once."""

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontends.server import responses
from penstock.frontends.server.responses import ChatLogprobs, to_json, to_json_in_parts
from tests.server.running import Running

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=40,
)


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
