"""Anthropic's API: `/v1/messages`, and the tokens that one would have."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from penstock.engine.events import TokenGenerated
from penstock.frontends.server.blocks import Block, BlockAnswer, blocks_of
from penstock.frontends.server.bodies import BlockBody, ResponseFormat
from penstock.frontends.server.conversation import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Choice,
    Conversation,
    Function,
    Name,
    known_tools,
    text_of,
    thinking,
)
from penstock.frontends.server.errors import ApiError
from penstock.frontends.server.parts import MAX_ENTRIES, Part, at_most, wrong
from penstock.models.text.literals import read_json

# A block that Claude Code begins with, which may differ from request to request and would spoil the prefix.
_BILLING = "x-anthropic-billing-header"


class _Tool(Part):
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None  # the schema is always kept to
    cache_control: dict[str, Any] | None = None  # what was read is in the cache
    defer_loading: bool | None = None  # the model is told of it where a result refers to it

    def plain(self) -> dict[str, Any]:
        return Function(name=self.name, description=self.description, parameters=self.input_schema).plain()


class _Choice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> Choice:
        match self.type:
            case "tool":
                return Choice("required", (self.name or "",), is_one=True)
            case "any":
                return Choice("required")
        return Choice(self.type)


class _Message(Part):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], at_most(MAX_ENTRIES)]

    def plain(self, tell: Callable[[str], str]) -> list[dict[str, Any]]:
        """A message for each result of a tool, then one for the rest. `tell` is what a result says of a tool that it
        refers to."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results: list[dict[str, Any]] = []
        texts: list[str] = []
        message: dict[str, Any] = {"role": self.role}
        for block in self.content:
            match block:
                case {"type": "text", "text": str(text)}:
                    texts.append(text)
                case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(given)}:
                    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
                    message.setdefault("tool_calls", []).append(call)
                case {"type": "tool_result", "tool_use_id": str(call_id)}:
                    content = block.get("content") or ("error" if block.get("is_error") else "")
                    if isinstance(content, list):
                        content = [_told(part, tell) for part in content]
                    results.append({"role": "tool", "tool_call_id": call_id, "content": text_of(content)})
                case {"type": "thinking", "thinking": str(text)}:
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
                case {"type": "redacted_thinking"}:
                    pass
                case {"type": str(kind)}:
                    raise wrong(
                        "content", f"blocks of type {kind[:40]!r} are not supported, or not as this one is"
                    )
                case _:
                    raise wrong("content", "give blocks with a type, such as {'type': 'text', 'text': ...}")
        if texts or not results:
            results.append({**message, "content": "\n".join(texts)})
        return results


def _told(part: Any, tell: Callable[[str], str]) -> Any:
    match part:
        case {"type": "tool_reference", "tool_name": str(name)}:
            return {"type": "text", "text": tell(name)}
    return part


class _Thinking(Part):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class _OutputConfig(Part):
    effort: str | None = None
    format: ResponseFormat | None = None


def _system(value: object) -> object:
    """A text, also of a list of blocks."""
    if not isinstance(value, list):
        return value
    texts = (text_of([block]) for block in value)
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


class MessagesBody(BlockBody):
    prompt_param = "messages"
    own_names: ClassVar[dict[str, str]] = {"stop_sequences": "stop"}

    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]
    system: Annotated[str | None, BeforeValidator(_system)] = None
    tools: Annotated[list[_Tool] | None, known_tools("custom"), at_most(MAX_TOOLS)] = None
    tool_choice: _Choice | None = None
    cache_control: dict[str, Any] | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: ResponseFormat | None = None  # an older name

    def given_format(self) -> ResponseFormat | None:
        return (
            (self.output_config and self.output_config.format) or self.output_format or self.response_format
        )

    def conversation(self) -> Conversation:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        hidden = {tool.name: tool.plain() for tool in self.tools or () if tool.defer_loading}
        later: list[dict[str, Any]] = []

        def tell(name: str) -> str:
            """Where it is first referred to: the prompt's beginning, which the cache knows, stays as it was."""
            if name not in hidden:
                return name
            later.append(hidden.pop(name))
            return json.dumps(later[-1]["function"], ensure_ascii=False)

        for message in (plain for each in self.messages for plain in each.plain(tell)):
            # Templates know one system message, the first.
            is_late = message["role"] == "system" and messages
            messages.append({**message, "role": "user"} if is_late else message)
        choice, last = self.tool_choice, messages[-1]
        effort = self.output_config.effort if self.output_config is not None else None
        if self.thinking is not None:
            effort = "none" if self.thinking.type == "disabled" else effort
        continues = last["role"] == "assistant" and "tool_calls" not in last and bool(last["content"].strip())
        return Conversation(
            messages,
            [tool.plain() for tool in self.tools or () if not tool.defer_loading],
            Choice() if choice is None else choice.choice(),
            choice is None or not choice.disable_parallel_tool_use,
            thinking(effort, None),
            continues,
            not continues,
            later,
        )


class MessagesAnswer(BlockAnswer):
    prefix = "msg_"

    def _content(self, tokens: list[list[TokenGenerated]]) -> dict[str, Any]:
        content = [self._block(block) for block in blocks_of(self._turns[0])]
        return {**self._message(), "content": content, **self._stop(), "usage": self._usage()}

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        is_begun = False
        async for change in self._changes():
            block = change.block
            if not is_begun:
                is_begun = True
                stop = {"stop_reason": None, "stop_sequence": None}
                message = {**self._message(), "content": [], **stop, "usage": self._usage()}
                yield {"type": "message_start", "message": message}
            if change.what in ("wait", "silence"):
                yield {"type": "ping"}
            elif change.what == "open":
                yield {
                    "type": "content_block_start",
                    "index": block.index,
                    "content_block": self._block(block),
                }
            elif change.what == "add":
                yield {
                    "type": "content_block_delta",
                    "index": block.index,
                    "delta": _delta(block, change.text),
                }
            else:
                yield {"type": "content_block_stop", "index": block.index}
        yield {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _error(self, error: ApiError) -> dict[str, Any]:
        return {"type": "error", **error.content}

    def _message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model_name}

    def _block(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case "thought":
                return {"type": "thinking", "thinking": block.text, "signature": ""}
            case "text":
                return {"type": "text", "text": block.text, "citations": None}
        given = read_json(block.text) if block.text else {}
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}

    def _stop(self) -> dict[str, Any]:
        end = self._ends[0]
        stop = None if end is None or self._calls(0) else end.stop
        reason = "stop_sequence" if stop else "end_turn"
        if self._calls(0):
            reason = "tool_use"
        elif self._reasons[0] == "length":
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        cached = self._num_prompt_cached
        return {
            "input_tokens": self._prepared.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._num_answer,
        }


def _delta(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case "thought":
            return {"type": "thinking_delta", "thinking": text}
        case "text":
            return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}
