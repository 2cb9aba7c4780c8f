"""A conversation, as clients send it to any API: messages, calls and results, tools, and which may be called."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import from_json

from penstock.frontends.server.parts import MAX_NAME, STRICT, Ignored, Part, Unsupported, at_most, wrong

MAX_MESSAGES = 10_000
MAX_TOOLS = 512
_IN_MESSAGES: Unsupported = {
    "function_call": ("calling functions", ()),
    "audio": ("sound", ()),
    "refusal": ("refusals", ()),
    "annotations": ("annotations", ([],)),
}


# What OpenAI's APIs call parts that are text.
_TEXTS = {"text", "input_text", "output_text", "summary_text", "reasoning_text"}


def _role(value: object) -> object:
    if value == "function":
        raise ValueError("messages of functions are OpenAI's old form: use the role tool")
    return "system" if value == "developer" else value  # OpenAI's newer name for it; templates know the older


def text_of(content: object) -> str:
    """A text, or the texts of its parts on lines of their own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("give a text, or a list of parts {'type': 'text', 'text': ...}")
    return "\n".join(map(_text_part, content))


def _text_part(part: object) -> str:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in _TEXTS:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise ValueError(f"parts of type {kind[:40]!r} are not supported: this server takes text only")
    raise ValueError("give parts {'type': 'text', 'text': ...}")


def arguments_of(value: object) -> dict[str, Any]:
    """Those of a call: an object, or its JSON."""
    if isinstance(value, str):
        try:
            value = from_json(value or "{}", allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"they are no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("give a JSON object")
    return value


Name = Annotated[str, Field(pattern=r"^[^\s\"'<>{}\[\]()\\]{1,128}$")]


class CalledFunction(Part):
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(arguments_of)]


class ToolCall(Part):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id or "", "type": "function", "function": function}


class Message(Part):
    unsupported = _IN_MESSAGES
    aliases: ClassVar[Mapping[str, str]] = {"reasoning": "reasoning_content"}

    role: Annotated[str, Field(min_length=1, max_length=MAX_NAME), BeforeValidator(_role)]
    content: Annotated[
        str | None, BeforeValidator(lambda value: None if value == [] else value and text_of(value))
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(fail_fast=True), at_most(MAX_TOOLS)] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise wrong("content", "give a text, or a list of parts {'type': 'text', 'text': ...}")
        return self

    def plain(self) -> dict[str, Any]:
        """What the model's template gets."""
        message: dict[str, Any] = {"role": str(self.role), "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


class Function(Part):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the schema is always kept to

    def plain(self) -> dict[str, Any]:
        """As the model's template knows tools."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": function}


class Tool(Part):
    function: Function
    type: Literal["function"] | None = None


def known_tools(own_kind: str) -> BeforeValidator:
    """Those of types that this server has no use for, such as searching the web, are ignored."""

    def known(value: object, info: ValidationInfo) -> object:
        ignored: Ignored = info.context or STRICT
        if not isinstance(value, list) or ignored.is_strict:
            return value
        kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in value]
        others = [isinstance(kind, str) and kind != own_kind for kind in kinds]
        for kind in compress(kinds, others):
            ignored.add(f"tools.{kind}")
        return [tool for tool, is_other in zip(value, others, strict=True) if not is_other]

    return BeforeValidator(known)


@dataclass(frozen=True)
class Choice:
    """Which tools may be called: none, any, or one at least; all of them, or those of some names."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    is_one: bool = False  # one call, and no more
    given: Any = "auto"  # as the client said it


def _choice(value: Any) -> Choice | None:
    """In the shape of OpenAI's chat, or of its newer API."""
    match value:
        case None:
            return None
        case "none" | "auto" | "required" as mode:
            return Choice(mode, given=mode)
        case "any":  # as Mistral's API calls it
            return Choice("required", given="required")
        case {"type": "function"}:
            return Choice("required", (_chosen(value),), is_one=True, given=value)
        case {"type": "allowed_tools"}:
            match value.get("allowed_tools", value):
                case {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools} if (
                    len(tools) <= MAX_TOOLS
                ):
                    return Choice(mode, tuple(map(_chosen, tools)), given=value)
            raise ValueError("allowed_tools has a mode, 'auto' or 'required', and a list of tools")
    raise ValueError("give 'none', 'auto', 'required', a function, or allowed_tools")


def _chosen(value: object) -> str:
    match value:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise ValueError("a tool is named by {'type': 'function', ...} with its name")


ToolChoice = Annotated[
    Choice | None, PlainValidator(_choice, json_schema_input_type=str | dict[str, Any] | None)
]


@dataclass(frozen=True)
class Conversation:
    """What a template is given, whatever the API: messages, tools as OpenAI's chat has them, and which of these may
    be called."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    choice: Choice = Choice()
    is_parallel: bool = True
    variables: dict[str, Any] = field(default_factory=dict)
    continues: bool = False  # the last message, which is the beginning of the answer
    adds_prompt: bool = True  # the answer's beginning, as the template has it
    more_tools: list[dict[str, Any]] = field(default_factory=list)  # that messages tell of

    def __post_init__(self) -> None:
        names = [tool["function"]["name"] for tool in (*self.tools, *self.more_tools)]
        if len(set(names)) < len(names):
            raise wrong("tools", "tools have names of their own")
        for name in self.choice.names or ():
            if name not in names:
                raise wrong("tool_choice", f"there is no tool {name[:100]!r} among tools")
        if self.choice.mode == "required" and not names:
            raise wrong("tool_choice", "tool_choice 'required' needs tools")


def thinking(effort: str | None, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables of a template that say how much to think; those that are given by name go first."""
    found: dict[str, Any] = {}
    if effort is not None:
        found = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    for name in _FIXED & (variables or {}).keys():
        raise wrong(
            "chat_template_kwargs", f"{name} is not for chat_template_kwargs: it has a place of its own"
        )
    return {**found, **(variables or {})}


_FIXED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]
