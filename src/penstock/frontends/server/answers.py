"""From events to an answer: whole, or as a stream of server-sent events."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.engine.events import Failed, Finished, PromptProgress, TokenGenerated
from penstock.frontends.server.asks import Ask
from penstock.frontends.server.gathering import Gathering
from penstock.frontends.server.gone import disconnected, unless
from penstock.frontends.server.json_answer import to_json
from penstock.frontends.server.logprobs import LogprobWriter
from penstock.frontends.server.problems import ApiError, as_failure, cancelled, internal
from penstock.frontends.server.shapes import Envelope, Logprobs, usage
from penstock.frontends.server.writing import Writer
from penstock.plan.progress import Progress


@dataclass(frozen=True)
class Answer:
    """One HTTP request's answer in the making. The token that ends a text is not among its log-probabilities."""

    ask: Ask
    gathering: Gathering
    envelope: Envelope
    make_writer: Callable[[], LogprobWriter]
    eos_ids: frozenset[int]

    async def whole(self, writer: Writer) -> Response:
        num_choices = len(self.ask.requests)
        texts: list[list[str]] = [[] for _ in range(num_choices)]
        tokens: list[list[TokenGenerated]] = [[] for _ in range(num_choices)]
        reasons = [""] * num_choices
        num_cached = [0] * num_choices
        num_answer = 0
        async for index, event in self.gathering.events():
            match event:
                case TokenGenerated():
                    texts[index].append(event.text)
                    if event.logprobs is not None:
                        tokens[index].append(event)
                case Finished():
                    texts[index].append(event.text)
                    reasons[index] = _reason(event)
                    num_answer += event.usage.completion_tokens
                    num_cached[index] = event.usage.cached_tokens
                case Failed():
                    raise as_failure(event.error)

        def make() -> dict[str, Any]:
            choices = [
                self.envelope.shape.whole(
                    index, "".join(texts[index]), self._logprobs(index, tokens[index]), reasons[index]
                )
                for index in range(num_choices)
            ]
            return self.envelope.whole(choices, self._usage(num_answer, num_cached))

        return await writer.write(make)

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events. Where something goes wrong on the way, the last one is the error."""
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
        shape, envelope = self.envelope.shape, self.envelope
        blank = {"usage": None} if self.ask.include_usage else {}
        writers = [self.make_writer() for _ in self.ask.requests]
        num_cached = [0] * len(self.ask.requests)
        num_answer = 0
        for index in range(len(self.ask.requests)):
            opening = shape.opening(index)
            if opening is not None:
                yield envelope.chunk(opening, **blank)
        async for index, event in self.gathering.events():
            match event:
                case PromptProgress():
                    if self.ask.returns_progress:
                        progress = _prompt_progress(event.progress)
                        yield envelope.chunk(shape.pause(index), **blank, prompt_progress=progress)
                case TokenGenerated():
                    told = event.logprobs is not None and not self._is_end(index, event)
                    if told or event.text:
                        logprobs = writers[index].write([event]) if told else None
                        yield envelope.chunk(shape.piece(index, event.text, logprobs), **blank)
                case Finished():
                    reason = _reason(event)
                    if event.text:
                        yield envelope.chunk(shape.piece(index, event.text, None), **blank)
                    yield envelope.chunk(shape.closing(index, reason), **blank)
                    num_answer += event.usage.completion_tokens
                    num_cached[index] = event.usage.cached_tokens
                case Failed():
                    raise as_failure(event.error)
        if self.ask.include_usage:
            yield envelope.chunk(usage=self._usage(num_answer, num_cached))

    def _usage(self, num_answer: int, num_cached: list[int]) -> dict[str, Any]:
        return usage(self.ask.num_prompt_tokens, num_answer, self.ask.num_cached(num_cached))

    def _logprobs(self, index: int, events: list[TokenGenerated]) -> Logprobs:
        if self.ask.requests[index].num_logprobs is None:
            return None
        return self.make_writer().write([event for event in events if not self._is_end(index, event)])

    def _is_end(self, index: int, event: TokenGenerated) -> bool:
        return event.token in self.eos_ids and not self.ask.requests[index].ignore_eos


class EventStreamResponse(StreamingResponse):
    """Server-sent events to a client, until one of the two ends it; `at_end` is called in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], at_end: Callable[[], None]) -> None:
        # A proxy is not to wait for more before it passes an event on.
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless(self.stream_response(send), disconnected(receive))
        except ApiError:  # nobody is there
            pass
        finally:
            self._at_end()


def _reason(event: Finished) -> str:
    if event.reason == "cancelled":
        raise cancelled()
    return event.reason


def _prompt_progress(progress: Progress) -> dict[str, int]:
    return {
        "total": progress.num_tokens,
        "cache": progress.num_cached,
        "processed": progress.num_done,  # those in the cache included
        "time_ms": round(progress.elapsed_s * 1000),
    }


def _sent(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
