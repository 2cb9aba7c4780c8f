"""Stop strings: the stream is the text before the first of them, however it was cut."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.sampler import StopMatcher
from penstock.errors import SettingError

TEXT = st.text("ab.", max_size=30)


@given(text=TEXT, stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3), data=st.data())
def test_stream_equals_cut_text(text: str, stops: list[str], data: st.DataObject) -> None:
    """Pieces come a character at a time or longer; the first end of a stop string decides."""
    matcher = StopMatcher(stops)
    out, position, seen = "", 0, ""
    while position < len(text) and not matcher.found:
        size = data.draw(st.integers(1, 5))
        seen += text[position : position + size]
        out += matcher.push(text[position : position + size])
        position += size
        # What was given out is never taken back, and what is held back could still begin a stop string.
        assert seen.startswith(out)
        held = seen[len(out) :]
        assert matcher.found or any(stop.startswith(held) for stop in stops) or not held
    out += matcher.finish()
    assert (matcher.found is not None) == any(stop in seen for stop in stops)
    if matcher.found:
        assert seen[len(out) :].startswith(matcher.found)
        assert out == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    else:
        assert out == text


@pytest.mark.parametrize("stop", [[""], [1], [None]])
def test_bad_stops(stop: Any) -> None:
    with pytest.raises(SettingError, match="stop="):
        StopMatcher(stop)


def test_a_single_string_is_one_stop() -> None:
    matcher = StopMatcher("ab")
    assert matcher.push("xxabyy") == "xx"
    assert matcher.found == "ab"
