"""OpenAI's newer API: `/v1/responses`, without a memory of its own: each request has the whole conversation."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from penstock.engine.events import JsonFormat, TokenGenerated
from penstock.frontends.server.blocks import Block, BlockAnswer, blocks_of
from penstock.frontends.server.bodies import BlockBody, ResponseFormat
from penstock.frontends.server.conversation import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Choice,
    Conversation,
    Function,
    ToolChoice,
    arguments_of,
    known_tools,
    text_of,
    thinking,
)
from penstock.frontends.server.errors import ApiError
from penstock.frontends.server.parts import Part, Unsupported, at_most, wrong


class _Tool(Function):
    type: Literal["function"]
    namespace: str | None = None

    def plain(self) -> dict[str, Any]:
        tool = super().plain()
        tool["function"]["name"] = _called(self.namespace, self.name)
        return tool

    def told(self) -> dict[str, Any]:
        """As an answer tells of it."""
        tool = {"type": "function", **self.plain()["function"], "strict": True, "name": self.name}
        return tool | ({"namespace": self.namespace} if self.namespace else {})


def _called(namespace: object, name: str) -> str:
    """What the model calls a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def _flat(value: object) -> object:
    """Tools without the namespaces that they are in, which their names tell."""
    if not isinstance(value, list):
        return value
    tools: list[Any] = []
    for each in value:
        match each:
            case {"type": "namespace", "name": str(space), "tools": list(inner)}:
                tools += [{**tool, "namespace": space} if isinstance(tool, dict) else tool for tool in inner]
            case _:
                tools.append(each)
    return tools


class _Reasoning(Part):
    effort: str | None = None


class _Text(Part):
    format: ResponseFormat | None = None


_REFUSED: Unsupported = {
    "previous_response_id": ("conversations of its own: send the whole input", ()),
    "conversation": ("conversations of its own: send the whole input", ()),
    "background": ("answers in the background", (False,)),
    "prompt": ("prompts of its own", ()),
}


class ResponsesBody(BlockBody):
    prompt_param = "input"
    unsupported: ClassVar[Unsupported] = {**BlockBody.unsupported, **_REFUSED}
    own_names: ClassVar[dict[str, str]] = {"max_output_tokens": "max_tokens"}

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1), at_most(MAX_MESSAGES)]
    instructions: str | None = None
    tools: Annotated[
        list[_Tool] | None, known_tools("function"), at_most(MAX_TOOLS), BeforeValidator(_flat)
    ] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None

    def given_format(self) -> ResponseFormat | None:
        return (self.text and self.text.format) or self.response_format

    def conversation(self) -> Conversation:
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for item in items:
            _add(item, messages)
        if not messages:
            raise wrong("input", "give a message at least")
        return Conversation(
            messages,
            [tool.plain() for tool in self.tools or ()],
            self.tool_choice or Choice(),
            self.parallel_tool_calls is not False,
            thinking(None if self.reasoning is None else self.reasoning.effort, None),
        )

    def about(self) -> dict[str, Any]:
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_tokens,
            "metadata": {key: str(value) for key, value in (self.metadata or {}).items()},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": self._told_format()},
            "tool_choice": (self.tool_choice or Choice()).given,
            "tools": [tool.told() for tool in self.tools or ()],
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }

    def _told_format(self) -> dict[str, Any]:
        given = self.given_format()
        match given and given.answer_format():
            case JsonFormat(None):
                return {"type": "json_object"}
            case JsonFormat(schema):
                name = (given and given.name) or ""
                return {"type": "json_schema", "name": name, "schema": schema, "strict": True}
        return {"type": "text"}


def _add(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """An item of the input, as a message or a part of the last one."""

    def assistant() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    match item:
        case {"type": "function_call", "name": str(name), "call_id": str(call_id), "arguments": given}:
            function = {"name": _called(item.get("namespace"), name), "arguments": arguments_of(given)}
            call = {"id": call_id, "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text_of(output or " ")})
        case {"type": "reasoning"}:
            lists = [item[name] for name in ("content", "summary") if isinstance(item.get(name), list)]
            if parts := [part for each in lists for part in each]:
                told = {"role": "assistant", "content": "", "reasoning_content": text_of(parts)}
                messages.append(told)
        case {"role": str(role), "content": content} if item.get("type", "message") == "message":
            text = text_of(content)
            if (
                role == "assistant"
                and messages
                and messages[-1]["role"] == role
                and not messages[-1]["content"]
            ):
                messages[-1]["content"] = text
            else:
                messages.append({"role": "system" if role == "developer" else role, "content": text})
        case _:
            kind = str(item.get("type", "message"))[:40]
            raise wrong("input", f"items of type {kind!r} are not supported, or not as this one is")


class ResponsesAnswer(BlockAnswer):
    prefix = "resp_"

    def _content(self, tokens: list[list[TokenGenerated]]) -> dict[str, Any]:
        *whole, last = blocks_of(self._turns[0])
        items = [*(self._item(block, "completed") for block in whole), self._item(last, self._status())]
        return self._response(self._status(), items)

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        number = 0

        def event(kind: str, /, **more: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number - 1, **more}

        yield event("created", response=self._response("in_progress", []))
        yield event("in_progress", response=self._response("in_progress", []))
        items: list[dict[str, Any]] = []
        async for change in self._changes():
            block = change.block
            place = {"item_id": block.id, "output_index": block.index}
            part = {**place, "content_index": 0}
            if change.what == "silence":
                yield event("in_progress", response=self._response("in_progress", []))
            elif change.what == "open":
                yield event(
                    "output_item.added", output_index=block.index, item=self._item(block, "in_progress")
                )
                if block.kind != "call":
                    yield event("content_part.added", **part, part=_part(block))
            elif change.what == "add":
                more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
                where = place if block.kind == "call" else part
                yield event(f"{_NAMES[block.kind]}.delta", **where, delta=change.text, **more)
            elif change.what == "close":
                if block.kind == "call":
                    done = {**place, "arguments": block.text, "name": self._names(block)["name"]}
                else:
                    done = {**part, "text": block.text, **({"logprobs": []} if block.kind == "text" else {})}
                yield event(f"{_NAMES[block.kind]}.done", **done)
                if block.kind != "call":
                    yield event("content_part.done", **part, part=_part(block))
                items.append(self._item(block, self._status() if change.is_last else "completed"))
                yield event("output_item.done", output_index=block.index, item=items[-1])
        yield event(self._status(), response=self._response(self._status(), items))

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        return _item(block, status) | (self._names(block) if block.kind == "call" else {})

    def _names(self, block: Block) -> dict[str, Any]:
        """A called tool's name and namespace, as the client has them."""
        for tool in self._prepared.about["tools"]:
            if _called(tool.get("namespace"), tool["name"]) == block.name:
                return {name: tool[name] for name in ("name", "namespace") if name in tool}
        return {"name": block.name}

    def _error(self, error: ApiError) -> dict[str, Any]:
        said = error.content["error"]
        return {
            "type": "error",
            "sequence_number": 0,
            **{name: said[name] for name in ("code", "message", "param")},
        }

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self._model_name,
            "output": items,
            **self._prepared.about,
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt = self._prepared.num_prompt_tokens
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_prompt_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_answer,
            "output_tokens_details": {"reasoning_tokens": self._num_thought},
            "total_tokens": num_prompt + self._num_answer,
        }


_NAMES = {"thought": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block, status: str) -> dict[str, Any]:
    """As it is when it opens, and when it is done."""
    parts = [] if status == "in_progress" else [_part(block)]
    match block.kind:
        case "thought":
            return {"type": "reasoning", "id": block.id, "summary": [], "content": parts}
        case "text":
            return {
                "type": "message",
                "id": block.id,
                "role": "assistant",
                "status": status,
                "content": parts,
            }
    call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
    return {"type": "function_call", "id": block.id, **call, "status": status}
