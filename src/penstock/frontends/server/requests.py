"""From an HTTP request to requests of the engine: its body is read in bounded time and space, then parsed and
tokenized on a thread."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from fastapi import Request

from penstock.engine.events import GenerationRequest
from penstock.engine.sampler import SamplingParams
from penstock.engine.service import Service
from penstock.errors import ContextLengthError, QueueFullError
from penstock.frontends.server.bodies import (
    MAX_SEED,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    TokenizeBody,
)
from penstock.frontends.server.errors import ApiError, client_gone
from penstock.frontends.server.lifecycle import Drain, disconnected, run_unless
from penstock.frontends.server.settings import ServerSettings

# Parsing and tokenizing; the cores are the model's.
NUM_THREADS = 2
BODY_TIMEOUT_S = 60.0
# What is read of a body that is too large, and thrown away: a client that is still sending when the connection
# closes would not see the answer.
_DISCARD_BYTES = 64 << 20
_DISCARD_S = 5.0
# OpenAI's own defaults, where they differ from Penstock's.
_TEMPERATURE = 1.0
_COMPLETION_TOKENS = 16

_Result = TypeVar("_Result")


class BodyReader:
    """Reads bodies and works on them in a few threads, at most `max_pending` at once."""

    def __init__(self, max_pending: int, max_body_bytes: int, drain: Drain) -> None:
        self._max_pending = max_pending
        self._max_body_bytes = max_body_bytes
        self._drain = drain
        self._num_pending = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="penstock-bodies")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def apply(self, request: Request, work: Callable[[bytes], _Result]) -> _Result:
        """The result of `work` on a request's body, on a thread. Work that has not begun when the client disconnects
        is never done. Nothing of the body is kept."""
        if self._num_pending >= self._max_pending:
            raise QueueFullError(
                f"{self._num_pending} requests are being read, as many as may be: try again later"
            )
        self._num_pending += 1
        body: list[bytes] = []
        try:
            body.append(await run_unless(self._read(request), self._drain.over()))
            self._drain.check_open()
            loop = asyncio.get_running_loop()

            async def run() -> _Result:
                return await loop.run_in_executor(self._threads, lambda: work(body.pop()))

            return await run_unless(run(), disconnected(request.receive), self._drain.over())
        finally:
            body.clear()  # cancelled work stays in the queue until a thread is free
            self._num_pending -= 1

    async def _read(self, request: Request) -> bytes:
        """The body, whether its length is known or it comes in pieces."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                parts = await self._parts(request)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {BODY_TIMEOUT_S:.0f} s",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        if parts is None:
            raise ApiError(
                413,
                f"the body is too large: this server takes up to {self._max_body_bytes} bytes (--max-body-bytes)",
                code="body_too_large",
                headers={"Connection": "close"},
            )
        return b"".join(parts)

    async def _parts(self, request: Request) -> list[bytes] | None:
        """None if they are too large. The rest is then read and thrown away, up to a limit."""
        parts: list[bytes] | None = []
        num_bytes = 0
        gives_up_at = math.inf
        has_more = True
        max_read = self._max_body_bytes + _DISCARD_BYTES
        while has_more and num_bytes < max_read and time.monotonic() < gives_up_at:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise client_gone()
            part = message.get("body", b"")
            num_bytes += len(part)
            has_more = message.get("more_body", False)
            if parts is not None and num_bytes <= self._max_body_bytes:
                parts.append(part)
            elif parts is not None:
                parts = None
                gives_up_at = time.monotonic() + _DISCARD_S
        return parts


@dataclass(frozen=True)
class PreparedRequest:
    """What an HTTP request asks of the engine: one request for each choice, those of the first prompt first."""

    requests: tuple[GenerationRequest, ...]
    num_prompt_tokens: int  # a prompt counts once, however many choices it has
    num_choices: int  # of each prompt
    streams: bool
    include_usage: bool
    returns_progress: bool

    def num_cached(self, of_requests: Sequence[int]) -> int:
        """Prompt tokens found in the cache: those that none of a prompt's choices had to read."""
        starts = range(0, len(of_requests), self.num_choices)
        return sum(min(of_requests[start : start + self.num_choices]) for start in starts)


class RequestBuilder:
    """From a body to requests of the engine, within the server's own limits. Tokenizing takes time: not for the event
    loop."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self._llm = service.llm
        self._model_name = settings.model_name
        self._isolates = settings.isolates
        self._max_request_tokens = service.max_request_tokens
        self._max_prompt_tokens = settings.max_prompt_tokens or service.max_request_tokens
        self._max_requests = service.schedule.max_running + service.schedule.max_waiting

    def chat(self, body: ChatBody, tenant: str | None) -> PreparedRequest:
        def encode() -> list[Sequence[int]]:
            if len(body.messages) > self._max_prompt_tokens:  # each has a token at least
                raise ContextLengthError(
                    f"the chat has {len(body.messages)} messages, and this server takes prompts of up to "
                    f"{self._max_prompt_tokens} tokens: shorten the chat"
                )
            return [self._encode_chat(body.messages)]

        return self._prepare(body, tenant, 1, encode, None)

    def completion(self, body: CompletionBody, tenant: str | None) -> PreparedRequest:
        def encode() -> list[Sequence[int]]:
            tokenizer = self._llm.tokenizer
            return [
                tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
                for prompt in body.prompt
            ]

        return self._prepare(body, tenant, len(body.prompt), encode, _COMPLETION_TOKENS)

    def tokenize(self, body: TokenizeBody) -> list[int]:
        if body.model is not None:
            self.check_model(body.model)
        if body.messages is not None:
            return self._encode_chat(body.messages)
        text = body.content if body.prompt is None else body.prompt
        adds_special = body.prompt is not None if body.add_special is None else body.add_special
        return self._llm.tokenizer.encode(text or "", add_special_tokens=adds_special)

    def check_model(self, name: str) -> None:
        if name != self._model_name:
            raise ApiError(
                404,
                f"there is no model {name[:100]!r} here: this server has {self._model_name!r}",
                code="model_not_found",
                param="model",
            )

    def _prepare(
        self,
        body: GenerationBody,
        tenant: str | None,
        num_prompts: int,
        encode: Callable[[], Sequence[Sequence[int]]],
        default_tokens: int | None,
    ) -> PreparedRequest:
        self.check_model(body.model)
        num_choices = body.n or 1
        if num_prompts * num_choices > self._max_requests:
            raise ApiError(
                400,
                f"{num_prompts} prompts with n={num_choices} are {num_prompts * num_choices} answers at once: "
                f"this server takes up to {self._max_requests}; send several requests",
                code="invalid_value",
                param="n" if num_prompts == 1 else body.prompt_param,
            )
        sampling = _sampling(body)  # before the prompt, which may be long
        prompts = encode()
        requests = tuple(
            GenerationRequest(
                token_ids=prompt,
                max_tokens=self._max_tokens(body, len(prompt), default_tokens),
                sampling=_of_choice(sampling, index),
                stop=tuple(body.stop or ()),
                num_logprobs=body.num_logprobs,
                json_format=None if body.response_format is None else body.response_format.json_format(),
                ignore_eos=bool(body.ignore_eos),
                cache_salt=salt_of(tenant if self._isolates else None, body.cache_salt or ""),
            )
            for prompt in prompts
            for index in range(num_choices)
        )
        options = body.stream_options
        return PreparedRequest(
            requests=requests,
            num_prompt_tokens=sum(map(len, prompts)),
            num_choices=num_choices,
            streams=bool(body.stream),
            include_usage=options is not None and bool(options.include_usage),
            returns_progress=bool(body.return_progress),
        )

    def _max_tokens(self, body: GenerationBody, num_prompt: int, default: int | None) -> int:
        """The most tokens of the answer to a prompt. Whether both fit together, the service checks."""
        if num_prompt > self._max_prompt_tokens:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, and this server takes up to {self._max_prompt_tokens}: "
                "shorten the prompt"
            )
        if body.answer_tokens is not None:
            return body.answer_tokens
        room = max(self._max_request_tokens - num_prompt, 1)
        return room if default is None else min(default, room)

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self._llm.tokenizer.encode_chat([message.plain() for message in messages])


def salt_of(tenant: str | None, cache_salt: str) -> str:
    """The salt of a request's block keys: requests share a prefix only where it is the same. No two pairs of tenant
    and cache_salt have the same one, since a tenant's name has a fixed length."""
    return cache_salt if tenant is None else f"{tenant}:{cache_salt}"


def _sampling(body: GenerationBody) -> SamplingParams:
    """By the names that SamplingParams and the body share; what is left out has the default."""
    given: dict[str, Any] = {"temperature": _TEMPERATURE}
    for field in fields(SamplingParams):
        if (value := getattr(body, field.name)) is not None:
            given[field.name] = value
    biases = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    return SamplingParams(**{**given, "logit_bias": biases})


def _of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The sampling of a prompt's choice of this index: with a seed, each draws with one of its own."""
    if sampling.seed is None or not index:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % (MAX_SEED + 1))
