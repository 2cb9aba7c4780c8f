"""From a body to what the engine is asked for. Runs on a thread of the intake: tokenizing takes time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.engine.events import GenerationRequest
from penstock.engine.sampler import MAX_BIAS, SamplingParams
from penstock.engine.service import Service
from penstock.errors import ContextLengthError, PenstockError
from penstock.frontends.server.bodies import ChatBody, CompletionBody, GenerationBody, TokenizeBody
from penstock.frontends.server.limits import MAX_SEED
from penstock.frontends.server.messages import Message
from penstock.frontends.server.problems import ApiError, as_api_error
from penstock.frontends.server.settings import ServerSettings
from penstock.frontends.server.tenants import salt_of

# OpenAI's own defaults, where they differ from Penstock's.
_TEMPERATURE = 1.0
_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class Ask:
    """One request for each choice: those of the first prompt, then those of the next."""

    requests: tuple[GenerationRequest, ...]
    num_prompt_tokens: int  # a prompt counts once, however many choices it has
    num_choices: int  # of each prompt
    streams: bool
    include_usage: bool
    returns_progress: bool

    @property
    def wants_json(self) -> bool:
        return any(request.json_format is not None for request in self.requests)

    def num_cached(self, of_requests: Sequence[int]) -> int:
        """How many tokens of the prompts were in the cache, by the number of each request: those that none of a
        prompt's choices had to read."""
        starts = range(0, len(of_requests), self.num_choices)
        return sum(min(of_requests[start : start + self.num_choices]) for start in starts)


class Asker:
    """Makes what the engine is asked for, by the limits of a service and the server's own."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self._llm = service.llm
        self._model_name = settings.model_name
        self._isolates = settings.isolates
        self._max_request_tokens = service.max_request_tokens
        self._max_prompt_tokens = settings.max_prompt_tokens or service.max_request_tokens
        schedule = service.schedule
        self._max_requests = schedule.max_running + schedule.max_waiting

    def chat(self, body: ChatBody, tenant: str | None) -> Ask:
        num_messages = len(body.messages)
        if num_messages > self._max_prompt_tokens:  # each has a token at least
            error = ContextLengthError(
                f"the chat has {num_messages} messages, and this server takes prompts of up to "
                f"{self._max_prompt_tokens} tokens: shorten the chat"
            )
            raise as_api_error(error, body.prompt_param)
        return self._ask(body, tenant, 1, lambda: [self._encode_chat(body.messages)], None)

    def completion(self, body: CompletionBody, tenant: str | None) -> Ask:
        def encode() -> list[Sequence[int]]:
            return [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt]

        return self._ask(body, tenant, len(body.prompt), encode, _COMPLETION_TOKENS)

    def tokenize(self, body: TokenizeBody) -> list[int]:
        if body.model is not None:
            self.check_model(body.model)
        try:
            if body.messages is not None:
                return self._encode_chat(body.messages)
            text = body.content if body.prompt is None else body.prompt
            adds_special = body.prompt is not None if body.add_special is None else body.add_special
            return self._llm.tokenizer.encode(text or "", add_special_tokens=adds_special)
        except PenstockError as error:
            raise as_api_error(error, body.prompt_param) from error

    def check_model(self, name: str) -> None:
        if name != self._model_name:
            raise ApiError(
                404,
                f"there is no model {name[:100]!r} here: this server has {self._model_name!r}",
                code="model_not_found",
                param="model",
            )

    def _ask(
        self,
        body: GenerationBody,
        tenant: str | None,
        num_prompts: int,
        encode: Callable[[], Sequence[Sequence[int]]],
        default_tokens: int | None,
    ) -> Ask:
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
        try:
            # Before the prompt, which may be long.
            first = self._sampling(body)
            sampling = [_of_choice(first, index) for index in range(num_choices)]
            json_format = None if body.response_format is None else body.response_format.json_format()
            salt = salt_of(tenant if self._isolates else None, body.cache_salt or "")
            prompts = encode()
            requests = tuple(
                GenerationRequest(
                    token_ids=prompt,
                    max_tokens=self._answer_tokens(body, len(prompt), default_tokens),
                    sampling=params,
                    stop=tuple(body.stop or ()),
                    num_logprobs=body.num_logprobs,
                    json_format=json_format,
                    ignore_eos=bool(body.ignore_eos),
                    cache_salt=salt,
                )
                for prompt in prompts
                for params in sampling
            )
        except PenstockError as error:
            raise as_api_error(error, body.prompt_param) from error
        options = body.stream_options
        return Ask(
            requests=requests,
            num_prompt_tokens=sum(len(prompt) for prompt in prompts),
            num_choices=num_choices,
            streams=bool(body.stream),
            include_usage=options is not None and bool(options.include_usage),
            returns_progress=bool(body.return_progress),
        )

    def _answer_tokens(self, body: GenerationBody, num_prompt: int, default: int | None) -> int:
        if num_prompt > self._max_prompt_tokens:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, and this server takes up to {self._max_prompt_tokens}: "
                "shorten the prompt"
            )
        room = self._max_request_tokens - num_prompt
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, which leaves no room for an answer: both together may "
                f"have {self._max_request_tokens} tokens; shorten the prompt"
            )
        asked = body.answer_tokens
        if asked is None:
            return room if default is None else min(default, room)
        if asked > room:
            raise ContextLengthError(
                f"a prompt of {num_prompt} tokens and an answer of up to {asked} are {num_prompt + asked} tokens: "
                f"both together may have {self._max_request_tokens}; shorten the prompt, or give max_tokens up to "
                f"{room}"
            )
        return asked

    def _sampling(self, body: GenerationBody) -> SamplingParams:
        return SamplingParams(
            temperature=_or(body.temperature, _TEMPERATURE),
            top_k=body.top_k or 0,
            top_p=_or(body.top_p, 1.0),
            min_p=_or(body.min_p, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            seed=body.seed,
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            logit_bias=self._biases(body.logit_bias or {}),
        )

    def _biases(self, given: dict[str, float]) -> dict[int, float]:
        vocab_size = self._llm.model.config.vocab_size
        biases = {}
        for text, bias in given.items():
            is_token = text.isascii() and text.isdigit() and len(text) < 19 and int(text) < vocab_size
            if not is_token or not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ApiError(
                    400,
                    f"logit_bias of {bias} for {text[:40]!r} is not accepted: give token ids from 0 to "
                    f"{vocab_size - 1}, with numbers from {-MAX_BIAS:.0f} to {MAX_BIAS:.0f}",
                    code="invalid_value",
                    param="logit_bias",
                )
            biases[int(text)] = bias
        return biases

    def _encode(self, text: str) -> list[int]:
        return self._llm.tokenizer.encode(text, add_special_tokens=True)

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self._llm.tokenizer.encode_chat([message.plain() for message in messages])


def _of_choice(first: SamplingParams, index: int) -> SamplingParams:
    """How the tokens of a prompt's choice of this index are drawn."""
    if first.seed is None or not index:
        return first
    return replace(first, seed=(first.seed + index) % (MAX_SEED + 1))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
