"""Answers: from the engine's events to an API's format, whole or as server-sent events, and to JSON. OpenAI's chat
and completions are here; other APIs have files of their own."""

import asyncio
import codecs
import json
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest
from typing import Any, ClassVar

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock import __version__
from penstock.engine.events import (
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptProgress,
    PromptScored,
    TokenGenerated,
)
from penstock.engine.sampler import RankedToken, TokenLogprobs
from penstock.engine.service import Service
from penstock.engine.streams import EventStream
from penstock.frontends.server.errors import ApiError, as_failure, cancelled, internal
from penstock.frontends.server.lifecycle import disconnected, run_unless
from penstock.frontends.server.requests import PreparedRequest
from penstock.frontends.server.turns import (
    CallArguments,
    CallBegun,
    CallEnded,
    Piece,
    Text,
    Thought,
    Turn,
)
from penstock.models.text.tokenizer import TokenPieces
from penstock.plan.progress import Progress

FINGERPRINT = f"penstock-{__version__}"
# What stands for a probability of 0, since JSON has no infinity.
LEAST_LOGPROB = -9999.0
# While a long prompt is read, or a call written that is told when it is whole, something is sent so often: clients
# give up on silence.
SILENT_S = 10.0
# The live page is one origin's: nothing inline, nothing from elsewhere, in nobody's frame.
SAFE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
# Of what changes from moment to moment.
LIVE_HEADERS = {**SAFE_HEADERS, "Cache-Control": "no-store"}
# A list of more items is written so many at a time; what is nested deeper than so is written at once.
_SLICE = 256
_DEPTH = 4

Logprobs = Mapping[str, Any] | None


def to_json(content: Any) -> bytes:
    # A name that a client sent may hold half of a surrogate pair, which UTF-8 cannot.
    return _text(content).encode(errors="replace")


def to_json_in_parts(content: Any) -> bytes:
    """The same, for content that may be large, on a thread of its own: other threads get their turns in between."""
    return b"".join(part.encode(errors="replace") for part in _parts(content, _DEPTH))


def _text(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _parts(content: Any, depth: int) -> Iterator[str]:
    # An answer, its choices, a choice, its log-probabilities, a list with an item for each token.
    if isinstance(content, list) and len(content) > _SLICE:
        slices = (content[start : start + _SLICE] for start in range(0, len(content), _SLICE))
        yield from _joined("[", ([_text(items)[1:-1]] for items in slices), "]")
    elif isinstance(content, list) and depth and content:
        yield from _joined("[", (_parts(item, depth - 1) for item in content), "]")
    elif isinstance(content, dict) and depth and content:
        items = content.items()
        yield from _joined(
            "{", (chain([f"{_text(name)}:"], _parts(value, depth - 1)) for name, value in items), "}"
        )
    else:
        yield _text(content)


def _joined(opening: str, items: Iterable[Iterable[str]], closing: str) -> Iterator[str]:
    for item in items:
        yield opening
        yield from item
        opening = ","
    yield closing


# Of Anthropic's API.
_MESSAGES = ("/v1/messages", "/messages")


class JsonResponse(JSONResponse):
    """JSON, whatever text is in it."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_response(error: ApiError, path: str) -> Response:
    """In OpenAI's shape; to Anthropic's clients it says that it is one."""
    content = {"type": "error", **error.content} if path.startswith(_MESSAGES) else error.content
    return JsonResponse(content, status_code=error.status, headers=error.headers)


class ResponseWriter:
    """Writes large answers beside the event loop, on a thread that no body keeps busy."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-writer")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def write(self, make: Callable[[], Any]) -> Response:
        """What `make` returns, as JSON. It is called on the thread, too."""

        def work() -> bytes:
            return to_json_in_parts(make())

        data = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return Response(data, media_type="application/json")


class EventStreamResponse(StreamingResponse):
    """Server-sent events, until they end or the client disconnects; `at_end` is called in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], at_end: Callable[[], None]) -> None:
        # A proxy is not to wait for more before it passes an event on.
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_unless(self.stream_response(send), disconnected(receive))
        except ApiError:  # nobody is there
            pass
        finally:
            self._at_end()


class ChatLogprobs:
    """Log-probabilities of one choice of a chat."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces

    def write(self, events: Sequence[TokenGenerated]) -> dict[str, Any]:
        """Of tokens that all have them."""
        return {"content": [self._entry(event) for event in events], "refusal": None}

    def _entry(self, event: TokenGenerated) -> dict[str, Any]:
        assert event.logprobs is not None
        top = [self._token(ranked) for ranked in event.logprobs.most_likely]
        return {**self._token(RankedToken(event.token, event.logprobs.logprob)), "top_logprobs": top}

    def _token(self, ranked: RankedToken) -> dict[str, Any]:
        piece = self._pieces.of(ranked.token, skip_special=False)
        logprob = max(ranked.logprob, LEAST_LOGPROB)
        return {"token": _token_text(piece), "logprob": logprob, "bytes": list(piece)}


class CompletionLogprobs:
    """Log-probabilities of one choice of a completion, written in order, all at once or a few at a time.
    `text_offset` counts the characters of the choice's text that come before a token."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0
        self._at_start = True

    def write(self, events: Sequence[TokenGenerated]) -> dict[str, Any]:
        offsets, tokens = list[int](), list[str]()
        chosen, top = list[float | None](), list[dict[str, float] | None]()
        for event in events:
            offsets.append(self._advance(event.token))
            tokens.append(self._name(event.token))
            if event.logprobs is None:  # nothing comes before it
                chosen.append(None)
                top.append(None)
                continue
            chosen.append(max(event.logprobs.logprob, LEAST_LOGPROB))
            # The chosen token is always among them. Of several that read alike, the likeliest counts.
            ranked: dict[str, float] = {}
            for other in (*event.logprobs.most_likely, RankedToken(event.token, event.logprobs.logprob)):
                ranked.setdefault(self._name(other.token), max(other.logprob, LEAST_LOGPROB))
            top.append(ranked)
        return {"text_offset": offsets, "tokens": tokens, "token_logprobs": chosen, "top_logprobs": top}

    def _advance(self, token: int) -> int:
        offset, piece = self._offset, self._pieces.of(token)
        if self._at_start and piece:
            piece = piece.removeprefix(self._pieces.leading)
            self._at_start = False
        self._offset += len(self._decoder.decode(piece))
        return offset

    def _name(self, token: int) -> str:
        return _token_text(self._pieces.of(token, skip_special=False))


def token_piece(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are a part of a character, as llama.cpp tells them."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _token_text(piece: bytes) -> str:
    """A token's text, or its bytes where they are a part of a character: `bytes:\\xe2\\x82`."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Answer:
    """The answer to one HTTP request, made from the events of its requests: each text is taken apart by a parser, and
    what an API calls the parts is a subclass's. The token that ends a text is not among its log-probabilities."""

    prefix: ClassVar[str]  # of its id

    def __init__(
        self, prepared: PreparedRequest, events: EventStream, model_name: str, service: Service
    ) -> None:
        # The id ends as that of its first request does, by which the live page knows it.
        self.id = self.prefix + events.ids[0].rpartition("-")[2]
        self._prepared = prepared
        self._events = events
        self._model_name = model_name
        self._created = int(time.time())
        self._pieces = service.llm.tokenizer.pieces
        self._text_of = service.llm.tokenizer.decode
        self._eos_ids = service.llm.eos_ids
        self._parsers = [prepared.parser() for _ in prepared.requests]
        self._turns = [Turn() for _ in prepared.requests]
        self._reasons: list[FinishReason] = ["stop"] * len(prepared.requests)
        self._num_answer = 0  # tokens of all choices
        self._num_thought = 0  # of them, tokens of thoughts
        self._num_cached = [0] * len(prepared.requests)
        self._scores: list[list[TokenLogprobs | None]] = [[] for _ in prepared.requests]  # of prompts
        self._ends: list[Finished | None] = [None] * len(prepared.requests)

    async def whole(self, writer: ResponseWriter) -> Response:
        tokens: list[list[TokenGenerated]] = [[] for _ in self._turns]
        async for index, event, _ in self._parts():
            if isinstance(event, TokenGenerated) and (event.logprobs is not None or self._prepared.tells_ids):
                tokens[index].append(event)
        return await writer.write(lambda: self._content(tokens))

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events. If something goes wrong on the way, the last one is the error."""
        try:
            async for chunk in self._chunks():
                yield self._sent(chunk)
        except ApiError as error:
            yield self._sent(self._error(error))
        except Exception as error:
            yield self._sent(self._error(internal(error)))
        else:
            if end := self._end():
                yield end

    @abstractmethod
    def _content(self, tokens: list[list[TokenGenerated]]) -> dict[str, Any]:
        """The whole answer, when all have ended. `tokens` are those with log-probabilities, by choice, or all where
        their ids are to be told."""

    def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The data of a stream's events, made of `_parts`, where the answer may be one."""
        raise NotImplementedError

    def _sent(self, chunk: dict[str, Any]) -> bytes:
        """An event, which says its own name where it has one."""
        name = f"event: {chunk['type']}\n".encode()
        return name + sent(to_json(chunk))

    def _error(self, error: ApiError) -> dict[str, Any]:
        return error.content

    def _end(self) -> bytes:
        """What follows the last chunk."""
        return b""

    async def _parts(self) -> AsyncIterator[tuple[int, Event, list[Piece]]]:
        """Each event with the index of its choice, and the parts of the answer that are known by it. Where none has
        been for long, there is one of no text."""
        told_at = time.monotonic()
        async for index, event in self._events:
            parser, pieces = self._parsers[index], list[Piece]()
            match event:
                case PromptProgress():
                    self._num_cached[index] = event.progress.num_cached
                case PromptScored():
                    self._scores[index] += event.logprobs
                case TokenGenerated():
                    self._num_answer += 1
                    self._num_thought += parser.is_thinking
                    pieces = parser.push(event.text)
                case Finished():
                    if event.reason == "cancelled":
                        raise cancelled()
                    is_cut = event.reason == "length" or event.stop is not None
                    pieces = parser.push(event.text) + parser.finish(is_cut=is_cut)
                    self._num_cached[index] = event.usage.cached_tokens
                    self._reasons[index] = event.reason
                    self._ends[index] = event
                case Failed():
                    raise as_failure(event.error)
            if pieces or time.monotonic() - told_at > SILENT_S:
                pieces, told_at = pieces or [Text("")], time.monotonic()
            for piece in pieces:
                self._turns[index].add(piece)
            yield index, event, pieces

    def _calls(self, index: int) -> bool:
        """Whether a choice ended with calls of tools."""
        return self._reasons[index] == "stop" and bool(self._turns[index].whole_calls)

    def _is_end(self, index: int, event: TokenGenerated) -> bool:
        request = self._prepared.requests[index]
        is_end = event.token in self._eos_ids and not request.ignore_eos
        return (is_end or event.token in request.sampling.stop_token_ids) and not request.includes_stop

    def _prompt(self, index: int) -> list[TokenGenerated]:
        """The prompt's tokens, as if they had been generated."""
        tokens, scores = self._prepared.requests[index].token_ids, self._scores[index]
        return [TokenGenerated(token, "", score) for token, score in zip_longest(tokens, scores)]

    @property
    def _num_prompt_cached(self) -> int:
        return self._prepared.num_cached(self._num_cached)


class OpenAIAnswer(Answer):
    """What a chat's answer and a completion's have in common. A choice is an object in `choices`."""

    whole_name: ClassVar[str]
    chunk_name: ClassVar[str]
    has_prompts: ClassVar[bool] = False  # each choice has one of its own
    logprobs: ClassVar[type[ChatLogprobs | CompletionLogprobs]]

    @abstractmethod
    def _whole(self, index: int, logprobs: Logprobs, reason: str) -> dict[str, Any]:
        """A choice that has ended."""

    @abstractmethod
    def _delta(self, piece: Piece | None) -> dict[str, Any] | None:
        """What a part adds to a choice, if anything; without one: progress, log-probabilities alone, or the end."""

    def _opening(self) -> dict[str, Any] | None:
        """What is in a choice's first chunk, where it has one before its text."""
        return None

    def _reason(self, index: int) -> str:
        return "tool_calls" if self._calls(index) else self._reasons[index]

    def _content(self, tokens: list[list[TokenGenerated]]) -> dict[str, Any]:
        choices = []
        for index in range(len(self._turns)):
            logprobs: Logprobs = None
            prepared = self._prepared
            if prepared.requests[index].num_logprobs is not None:
                told = [event for event in tokens[index] if not self._is_end(index, event)]
                told = self._prompt(index) + told if prepared.echoes else told
                logprobs = self.logprobs(self._pieces).write(told)
            choice = self._whole(index, logprobs, self._reason(index))
            if prepared.tells_ids:
                choice["token_ids"] = [event.token for event in tokens[index]]
            choices.append({**choice, **self._of_prompt(index)} if self.has_prompts else choice)
        more = {} if self.has_prompts else self._of_prompt(0)
        return {**self._head(self.whole_name), "choices": choices, "usage": self._usage(), **more}

    def _of_prompt(self, index: int) -> dict[str, Any]:
        """What is told of the prompt's tokens, where it is asked for."""
        told: dict[str, Any] = {}
        if self._prepared.tells_ids:
            told["prompt_token_ids"] = list(self._prepared.requests[index].token_ids)
        if self._prepared.tells_scores:
            told["prompt_logprobs"] = [
                event.logprobs and self._score(event.token, event.logprobs) for event in self._prompt(index)
            ]
        return told

    def _score(self, token: int, score: TokenLogprobs) -> dict[str, Any]:
        """By token id, as vLLM tells it; the rank of one that is not among the likeliest is not known."""
        ranked = {each.token: (rank, each.logprob) for rank, each in enumerate(score.most_likely, 1)}
        return {
            str(each): {
                "logprob": max(logprob, LEAST_LOGPROB),
                "rank": rank,
                "decoded_token": _token_text(self._pieces.of(each, skip_special=False)),
            }
            for each, (rank, logprob) in {token: (None, score.logprob), **ranked}.items()
        }

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        prepared = self._prepared
        writers = [self.logprobs(self._pieces) for _ in prepared.requests]
        opening = self._opening()
        for index in range(len(prepared.requests) if opening is not None else 0):
            yield self._chunk(index, opening, **({} if self.has_prompts else self._of_prompt(0)))
        begun: set[int] = set()
        async for index, event, pieces in self._parts():
            if isinstance(event, TokenGenerated | Finished) and index not in begun:
                begun.add(index)
                if self.has_prompts and (prepared.echoes or prepared.tells_ids):
                    yield self._beginning(index, writers[index])
            if isinstance(event, PromptProgress) and prepared.returns_progress:
                progress = prompt_progress(event.progress)
                yield self._chunk(index, self._delta(None), prompt_progress=progress)
            logprobs: Logprobs = None
            if isinstance(event, TokenGenerated) and event.logprobs and not self._is_end(index, event):
                logprobs = writers[index].write([event])
            deltas = [delta for piece in pieces if (delta := self._delta(piece)) is not None]
            ids = [event.token] if isinstance(event, TokenGenerated) and prepared.tells_ids else None
            if (logprobs is not None or ids) and not deltas:
                deltas = [self._delta(Text("")) or {}]
            for delta in deltas:
                yield self._chunk(index, {**delta, "token_ids": ids} if ids else delta, logprobs)
                logprobs = ids = None
            if isinstance(event, Finished):
                yield self._chunk(index, self._delta(None), reason=self._reason(index))
        if prepared.include_usage:
            yield {**self._head(self.chunk_name), "choices": [], "usage": self._usage()}

    def _beginning(self, index: int, writer: ChatLogprobs | CompletionLogprobs) -> dict[str, Any]:
        """The prompt, as a choice's first chunk."""
        request, text, logprobs = self._prepared.requests[index], "", None
        if self._prepared.echoes:
            text = self._text_of(request.token_ids)
            logprobs = writer.write(self._prompt(index)) if request.num_logprobs is not None else None
        return self._chunk(index, {**(self._delta(Text(text)) or {}), **self._of_prompt(index)}, logprobs)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any] | None,
        logprobs: Logprobs = None,
        reason: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        if self._prepared.counts_usage:
            more["usage"] = self._usage()
        elif self._prepared.include_usage:
            more["usage"] = None
        choice = {"index": index, **(delta or {}), "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(self.chunk_name), "choices": [choice], **more}

    def _sent(self, chunk: dict[str, Any]) -> bytes:
        return sent(to_json(chunk))

    def _end(self) -> bytes:
        return sent(b"[DONE]")

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self._created,
            "model": self._model_name,
            "system_fingerprint": FINGERPRINT,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt = self._prepared.num_prompt_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_answer,
            "total_tokens": num_prompt + self._num_answer,
            "prompt_tokens_details": {"cached_tokens": self._num_prompt_cached},
        }
        if self._num_thought:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_thought}
        return usage


class ChatAnswer(OpenAIAnswer):
    prefix, whole_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    logprobs = ChatLogprobs

    def _whole(self, index: int, logprobs: Logprobs, reason: str) -> dict[str, Any]:
        turn = self._turns[index]
        message: dict[str, Any] = {"role": "assistant", "content": turn.text, "refusal": None}
        if turn.thought:
            message |= {"reasoning_content": turn.thought, "reasoning": turn.thought}
        if turn.whole_calls:
            message["content"] = turn.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in turn.whole_calls
            ]
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": "", "refusal": None}}

    def _delta(self, piece: Piece | None) -> dict[str, Any] | None:
        call: dict[str, Any]
        match piece:
            case Text(text):
                return {"delta": {"content": text}}
            case Thought(text):
                return {"delta": {"reasoning_content": text, "reasoning": text}}
            case CallBegun(index, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return {"delta": {"tool_calls": [call]}}
            case CallArguments(index, text):
                call = {"index": index, "function": {"arguments": text}}
                return {"delta": {"tool_calls": [call]}}
            case CallEnded():
                return None
        return {"delta": {}}


class CompletionAnswer(OpenAIAnswer):
    prefix, whole_name, chunk_name = "cmpl-", "text_completion", "text_completion"
    logprobs = CompletionLogprobs
    has_prompts = True

    def _whole(self, index: int, logprobs: Logprobs, reason: str) -> dict[str, Any]:
        echoed = self._text_of(self._prepared.requests[index].token_ids) if self._prepared.echoes else ""
        return {
            "index": index,
            "text": echoed + self._turns[index].text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _delta(self, piece: Piece | None) -> dict[str, Any] | None:
        return {"text": piece.text if isinstance(piece, Text) else ""}


def prompt_progress(progress: Progress) -> dict[str, int]:
    return {
        "total": progress.num_tokens,
        "cache": progress.num_cached,
        "processed": progress.num_done,  # those in the cache included
        "time_ms": round(progress.elapsed_s * 1000),
    }


def sent(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
