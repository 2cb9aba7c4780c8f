"""JSON on its way out, whatever text is in it."""

import json
from collections.abc import Iterator
from typing import Any

from starlette.responses import JSONResponse

# A list of more items is written so many at a time; what is nested deeper than so is written at once.
_SLICE = 256
_DEPTH = 4


def to_json(content: Any) -> bytes:
    # A name that a client sent may hold half of a surrogate pair, which UTF-8 cannot.
    return _text(content).encode(errors="replace")


def to_json_in_parts(content: Any) -> bytes:
    """The same, for content that may be large, on a thread of its own: other threads get their turns in between."""
    return b"".join(part.encode(errors="replace") for part in _parts(content, _DEPTH))


class JsonAnswer(JSONResponse):
    def render(self, content: Any) -> bytes:
        return to_json(content)


def _text(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _parts(content: Any, depth: int) -> Iterator[str]:
    # An answer, its choices, a choice, its log-probabilities, a list with an item for each token.
    if isinstance(content, dict) and depth and content:
        opening = "{"
        for name, value in content.items():
            yield f"{opening}{_text(name)}:"
            yield from _parts(value, depth - 1)
            opening = ","
        yield "}"
    elif isinstance(content, list) and len(content) > _SLICE:
        opening = "["
        for start in range(0, len(content), _SLICE):
            yield opening + _text(content[start : start + _SLICE])[1:-1]
            opening = ","
        yield "]"
    elif isinstance(content, list) and depth and content:
        opening = "["
        for item in content:
            yield opening
            yield from _parts(item, depth - 1)
            opening = ","
        yield "]"
    else:
        yield _text(content)
