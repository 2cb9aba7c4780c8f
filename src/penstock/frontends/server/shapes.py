"""The two shapes of an answer: a completion's and a chat's, whole and in chunks."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock import __version__

FINGERPRINT = f"penstock-{__version__}"
Logprobs = Mapping[str, Any] | None


class Shape(Protocol):
    """The parts of an answer that differ between the endpoints. A choice is an object in `choices`."""

    prefix: str
    whole_name: str
    chunk_name: str

    def whole(self, index: int, text: str, logprobs: Logprobs, reason: str) -> dict[str, Any]: ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first chunk, where it has one before its text."""

    def piece(self, index: int, text: str, logprobs: Logprobs) -> dict[str, Any]: ...

    def pause(self, index: int) -> dict[str, Any]:
        """A chunk without text, while the prompt is read."""

    def closing(self, index: int, reason: str) -> dict[str, Any]: ...


class ChatShape:
    prefix = "chatcmpl"
    whole_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def whole(self, index: int, text: str, logprobs: Logprobs, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, index: int, text: str, logprobs: Logprobs) -> dict[str, Any]:
        return self._chunk(index, {"content": text}, logprobs)

    def pause(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {})

    def closing(self, index: int, reason: str) -> dict[str, Any]:
        return self._chunk(index, {}, reason=reason)

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Logprobs = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class CompletionShape:
    prefix = "cmpl"
    whole_name = "text_completion"
    chunk_name = "text_completion"

    def whole(self, index: int, text: str, logprobs: Logprobs, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, index: int, text: str, logprobs: Logprobs) -> dict[str, Any]:
        return self.whole(index, text, logprobs, None)

    def pause(self, index: int) -> dict[str, Any]:
        return self.whole(index, "", None, None)

    def closing(self, index: int, reason: str) -> dict[str, Any]:
        return self.whole(index, "", None, reason)


@dataclass(frozen=True)
class Envelope:
    """What all chunks of an answer share. `name` is what its id ends with."""

    shape: Shape
    model_name: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return f"{self.shape.prefix}-{self.name}"

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.shape.whole_name), "choices": choices, "usage": usage}

    def chunk(self, *choices: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {**self._head(self.shape.chunk_name), "choices": choices, **more}

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model_name,
            "system_fingerprint": FINGERPRINT,
        }


def usage(num_prompt: int, num_answer: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
