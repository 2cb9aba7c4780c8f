"""JSON on its way out, whatever text is in it."""

import json
from typing import Any

from starlette.responses import JSONResponse


def to_json(content: Any) -> bytes:
    # A name that a client sent may hold half of a surrogate pair, which UTF-8 cannot.
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")


class JsonAnswer(JSONResponse):
    def render(self, content: Any) -> bytes:
        return to_json(content)
