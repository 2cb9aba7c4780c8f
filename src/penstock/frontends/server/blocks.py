"""Answers of APIs that have one answer, made of blocks: thoughts, text, calls."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from penstock.engine.events import PromptProgress
from penstock.frontends.server.responses import Answer
from penstock.frontends.server.turns import CallArguments, CallBegun, Text, Thought, Turn, new_id

Kind = Literal["thought", "text", "call"]
# What ids of blocks begin with, in OpenAI's API.
_PREFIXES: dict[Kind, str] = {"thought": "rs", "text": "msg", "call": "fc"}


@dataclass
class Block:
    index: int
    kind: Kind
    id: str
    text: str = ""  # of a call, its arguments
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True)
class Change:
    """A block opens, has text added, or closes; or more of the prompt was read, or nothing was said for long."""

    what: Literal["open", "add", "close", "wait", "silence"]
    block: Block
    text: str = ""
    is_last: bool = False


def blocks_of(turn: Turn) -> list[Block]:
    """Those of a whole answer. A call that was cut is none."""
    blocks: list[Block] = []

    def add(kind: Kind, text: str, name: str = "", call_id: str = "") -> None:
        blocks.append(Block(len(blocks), kind, new_id(_PREFIXES[kind]), text, name, call_id))

    if turn.thought:
        add("thought", turn.thought)
    if turn.text or not (turn.thought or turn.whole_calls):
        add("text", turn.text)
    for call in turn.whole_calls:
        add("call", call.arguments, call.name, call.id)
    return blocks


class BlockAnswer(Answer):
    """What its `_chunks` are made of: changes of blocks, one after the other."""

    async def _changes(self) -> AsyncIterator[Change]:
        """An answer without text has a block of none."""
        block: Block | None = None
        num_blocks = 0
        nothing = Block(0, "text", new_id(_PREFIXES["text"]))
        async for _, event, pieces in self._parts():
            if isinstance(event, PromptProgress):
                yield Change("wait", nothing)
            for piece in pieces:
                match piece:
                    case Text(""):
                        yield Change("silence", nothing) if block is None else Change("add", block)
                        continue
                    case Thought(text):
                        kind: Kind = "thought"
                    case Text(text):
                        kind = "text"
                    case CallBegun():
                        kind, text = "call", ""
                    case CallArguments(_, text):
                        kind = "call"
                    case _:
                        continue
                if block is None or block.kind != kind or isinstance(piece, CallBegun):
                    if block is not None:
                        yield Change("close", block)
                    block = Block(num_blocks, kind, new_id(_PREFIXES[kind]))
                    num_blocks += 1
                    if isinstance(piece, CallBegun):
                        block.name, block.call_id = piece.name, piece.id
                    yield Change("open", block)
                if text:
                    block.text += text
                    yield Change("add", block, text)
        if block is None:
            block = nothing
            yield Change("open", block)
        yield Change("close", block, is_last=True)

    def _status(self) -> str:
        return "completed" if self._reasons[0] == "stop" else "incomplete"
