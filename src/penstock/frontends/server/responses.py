"""Answers: from the engine's events to OpenAI's two formats, whole or as server-sent events, and to JSON."""

import asyncio
import codecs
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock import __version__
from penstock.engine.events import Failed, Finished, PromptProgress, TokenGenerated
from penstock.engine.sampler import RankedToken
from penstock.engine.service import Service
from penstock.engine.streams import EventStream
from penstock.frontends.server.errors import ApiError, as_failure, cancelled, internal
from penstock.frontends.server.lifecycle import disconnected, run_unless
from penstock.frontends.server.requests import PreparedRequest
from penstock.models.text.tokenizer import TokenPieces
from penstock.plan.progress import Progress

FINGERPRINT = f"penstock-{__version__}"
# What stands for a probability of 0, since JSON has no infinity.
LEAST_LOGPROB = -9999.0
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


class JsonResponse(JSONResponse):
    """JSON, whatever text is in it."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_response(error: ApiError) -> Response:
    return JsonResponse(error.content, status_code=error.status, headers=error.headers)


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
        offsets, tokens, chosen, top = [], [], [], []
        for event in events:
            assert event.logprobs is not None
            offsets.append(self._advance(event.token))
            tokens.append(self._name(event.token))
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


def _token_text(piece: bytes) -> str:
    """A token's text, or its bytes where they are a part of a character: `bytes:\\xe2\\x82`."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class ChatFormat:
    """The objects of a chat's answer. A choice is an object in `choices`."""

    prefix, whole_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    logprobs = ChatLogprobs

    def whole(self, index: int, text: str, logprobs: Logprobs, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first chunk, where it has one before its text."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(
        self, index: int, text: str | None = None, logprobs: Logprobs = None, reason: str | None = None
    ) -> dict[str, Any]:
        """A piece of a choice's text. Without text: progress of the prompt, or the choice's end."""
        delta = {} if text is None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class CompletionFormat:
    """The same of a completion's answer."""

    prefix, whole_name, chunk_name = "cmpl", "text_completion", "text_completion"
    logprobs = CompletionLogprobs

    def whole(self, index: int, text: str, logprobs: Logprobs, reason: str) -> dict[str, Any]:
        return self.chunk(index, text, logprobs, reason)

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(
        self, index: int, text: str | None = None, logprobs: Logprobs = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text or "", "logprobs": logprobs, "finish_reason": reason}


AnswerFormat = ChatFormat | CompletionFormat


class Answer:
    """The answer to one HTTP request, made from the events of its requests. The token that ends a text is not among
    its log-probabilities."""

    def __init__(
        self,
        prepared: PreparedRequest,
        events: EventStream,
        form: AnswerFormat,
        model_name: str,
        service: Service,
    ) -> None:
        # The id ends as that of its first request does, by which the live page knows it.
        self.id = f"{form.prefix}-{events.ids[0].rpartition('-')[2]}"
        self._prepared = prepared
        self._events = events
        self._form = form
        self._model_name = model_name
        self._created = int(time.time())
        self._pieces = service.llm.tokenizer.pieces
        self._eos_ids = service.llm.eos_ids
        self._num_answer = 0  # tokens of all choices
        self._num_cached = [0] * len(prepared.requests)

    async def whole(self, writer: ResponseWriter) -> Response:
        num_choices = len(self._prepared.requests)
        texts: list[list[str]] = [[] for _ in range(num_choices)]
        tokens: list[list[TokenGenerated]] = [[] for _ in range(num_choices)]
        reasons = [""] * num_choices
        async for index, event in self._events:
            match event:
                case TokenGenerated():
                    self._num_answer += 1
                    texts[index].append(event.text)
                    if event.logprobs is not None:
                        tokens[index].append(event)
                case Finished():
                    texts[index].append(event.text)
                    reasons[index] = self._finish(index, event)
                case Failed():
                    raise as_failure(event.error)

        def make() -> dict[str, Any]:
            choices = [
                self._form.whole(
                    index, "".join(texts[index]), self._logprobs(index, tokens[index]), reasons[index]
                )
                for index in range(num_choices)
            ]
            return {**self._head(self._form.whole_name), "choices": choices, "usage": self._usage()}

        return await writer.write(make)

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events. If something goes wrong on the way, the last one is the error."""
        try:
            async for chunk in self._chunks():
                yield _sent(to_json(chunk))
        except ApiError as error:
            yield _sent(to_json(error.content))
        except Exception as error:
            yield _sent(to_json(internal(error).content))
        else:
            yield _sent(b"[DONE]")

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        form, prepared = self._form, self._prepared
        writers = [form.logprobs(self._pieces) for _ in prepared.requests]
        for index in range(len(prepared.requests)):
            opening = form.opening(index)
            if opening is not None:
                yield self._chunk(opening)
        async for index, event in self._events:
            match event:
                case PromptProgress():
                    if prepared.returns_progress:
                        progress = _prompt_progress(event.progress)
                        yield self._chunk(form.chunk(index), prompt_progress=progress)
                case TokenGenerated():
                    self._num_answer += 1
                    has_logprobs = event.logprobs is not None and not self._is_end(index, event)
                    if has_logprobs or event.text:
                        logprobs = writers[index].write([event]) if has_logprobs else None
                        yield self._chunk(form.chunk(index, event.text, logprobs))
                case Finished():
                    reason = self._finish(index, event)
                    if event.text:
                        yield self._chunk(form.chunk(index, event.text))
                    yield self._chunk(form.chunk(index, reason=reason))
                case Failed():
                    raise as_failure(event.error)
        if prepared.include_usage:
            yield {**self._head(self._form.chunk_name), "choices": [], "usage": self._usage()}

    def _chunk(self, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        if self._prepared.counts_usage:
            more["usage"] = self._usage()
        elif self._prepared.include_usage:
            more["usage"] = None
        return {**self._head(self._form.chunk_name), "choices": [choice], **more}

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self._created,
            "model": self._model_name,
            "system_fingerprint": FINGERPRINT,
        }

    def _finish(self, index: int, event: Finished) -> str:
        if event.reason == "cancelled":
            raise cancelled()
        self._num_cached[index] = event.usage.cached_tokens
        return event.reason

    def _usage(self) -> dict[str, Any]:
        num_prompt = self._prepared.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_answer,
            "total_tokens": num_prompt + self._num_answer,
            "prompt_tokens_details": {"cached_tokens": self._prepared.num_cached(self._num_cached)},
        }

    def _logprobs(self, index: int, events: list[TokenGenerated]) -> Logprobs:
        if self._prepared.requests[index].num_logprobs is None:
            return None
        writer = self._form.logprobs(self._pieces)
        return writer.write([event for event in events if not self._is_end(index, event)])

    def _is_end(self, index: int, event: TokenGenerated) -> bool:
        return event.token in self._eos_ids and not self._prepared.requests[index].ignore_eos


def _prompt_progress(progress: Progress) -> dict[str, int]:
    return {
        "total": progress.num_tokens,
        "cache": progress.num_cached,
        "processed": progress.num_done,  # those in the cache included
        "time_ms": round(progress.elapsed_s * 1000),
    }


def _sent(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
