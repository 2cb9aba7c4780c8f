"""The messages of a chat, as a client sends them."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from penstock.frontends.server.parts import Part
from penstock.frontends.server.unsupported import IN_MESSAGES

Role = Literal["system", "user", "assistant"]


def _role(value: object) -> object:
    if value in ("tool", "function"):
        raise ValueError("messages of tools and functions are not supported")
    return "system" if value == "developer" else value  # OpenAI's newer name for it; templates know the older


def _text(content: object) -> str:
    """A text, or the texts of its parts on lines of their own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("give a text, or a list of parts {'type': 'text', 'text': ...}")
    return "\n".join(_part(part) for part in content)


def _part(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text), **rest} if not rest:
            return text
        case {"type": str(kind)} if kind != "text":
            raise ValueError(f"parts of type {kind[:40]!r} are not supported: this server takes text only")
    raise ValueError("give parts {'type': 'text', 'text': ...}")


class Message(Part):
    unsupported = IN_MESSAGES

    role: Annotated[Role, BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """What the model's template gets."""
        message = {"role": str(self.role), "content": self.content}
        return message if self.name is None else {**message, "name": self.name}
