"""From a body to requests of the engine."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from penstock.engine.events import AnswerFormat, GenerationRequest
from penstock.engine.grammar import CallGrammar, after_thoughts
from penstock.engine.sampler import SamplingParams
from penstock.engine.service import Service
from penstock.errors import ContextLengthError, PromptError, SettingError
from penstock.frontends.server.bodies import (
    MAX_SEED,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Prompt,
    TalkBody,
    TokenizeBody,
)
from penstock.frontends.server.conversation import Conversation
from penstock.frontends.server.errors import ApiError
from penstock.frontends.server.settings import ServerSettings
from penstock.frontends.server.turns import TurnParser
from penstock.models.text.calls import HERMES_TOOLS, CallFormat

if TYPE_CHECKING:
    from penstock.frontends.server.embeddings import EmbeddingBody
    from penstock.frontends.server.llama_api import InfillBody

# A text that may be too long is tokenized in slices first, so many characters each. A cut may add tokens, no more
# than these.
_SLICE = 1 << 15
_CUT_TOKENS = 64
# OpenAI's own defaults, where they differ from Penstock's.
_TEMPERATURE = 1.0
_COMPLETION_TOKENS = 16
# Stands where a message ends that is gone on with.
_CONTINUED = "PENSTOCK-GOES-ON-HERE"


@dataclass(frozen=True)
class PreparedRequest:
    """What an HTTP request asks of the engine: one request for each choice, those of the first prompt first."""

    requests: tuple[GenerationRequest, ...]
    num_prompt_tokens: int  # a prompt counts once, however many choices it has
    num_choices: int = 1  # of each prompt
    streams: bool = False
    include_usage: bool = False
    returns_progress: bool = False
    counts_usage: bool = False  # in every chunk of a stream
    parser: Callable[[], TurnParser] = TurnParser  # takes the answer's text apart
    about: Mapping[str, Any] = field(default_factory=dict)  # what the answer says of the request
    held_later: Future[object] | None = None  # fails where tools' schemas are too complex to hold calls to
    echoes: bool = False  # the prompt is the beginning of the answer
    tells_scores: bool = False  # the prompt's log-probabilities, as vLLM does
    tells_ids: bool = False  # token ids of prompt and answer

    def num_cached(self, of_requests: Sequence[int]) -> int:
        """Prompt tokens found in the cache: those that none of a prompt's choices had to read."""
        starts = range(0, len(of_requests), self.num_choices)
        return sum(min(of_requests[start : start + self.num_choices]) for start in starts)


@dataclass(frozen=True)
class _Held:
    """What an answer is held to, the special tokens of its text, and how that is taken apart."""

    grammar: AnswerFormat | None
    shown: frozenset[int]
    parser: Callable[[], TurnParser]
    later: Future[object] | None = None  # compiles the grammar, or fails: then calls are not held to it


class RequestBuilder:
    """From a body to requests of the engine, within the server's own limits. Tokenizing takes time: not for the event
    loop."""

    def __init__(self, service: Service, settings: ServerSettings) -> None:
        self._llm = service.llm
        self._settings = settings
        self._isolates = settings.isolates
        self._has_tenants = len(settings.api_keys) > 1 or service.schedule.max_running_per_key is not None
        self._max_request_tokens = service.max_request_tokens
        self._max_prompt_tokens = settings.max_prompt_tokens or service.max_request_tokens
        self._max_requests = service.schedule.max_running + service.schedule.max_waiting

    def chat(self, body: TalkBody, tenant: str | None) -> PreparedRequest:
        told = body.conversation()
        if len(told.messages) > self._max_prompt_tokens:  # each has a token at least
            raise ContextLengthError(
                f"the chat has {len(told.messages)} messages, and this server takes prompts of up to "
                f"{self._max_prompt_tokens} tokens: shorten the chat"
            )
        prompt = self.render(told)
        held = self._held(told, prompt, body.answer_format())
        prepared = self._prepare(
            body, tenant, 1, lambda: [self._encode(prompt, adds_special=False)], None, held
        )
        return replace(prepared, parser=held.parser, about=body.about(), held_later=held.later)

    def _held(self, told: Conversation, prompt: str, wanted: AnswerFormat | None) -> "_Held":
        """What the answer is held to, and how it is taken apart."""
        tokenizer = self._llm.tokenizer
        thoughts = tokenizer.chat.thoughts
        is_thinking = thoughts is not None and not told.continues and thoughts.is_open_after(prompt)
        marks = () if thoughts is None else (thoughts.opening, thoughts.closing)
        shown = {part for mark in marks for part in tokenizer.split_special(mark) if isinstance(part, int)}
        if not told.tools or told.choice.mode == "none":
            if wanted is not None and thoughts is not None and is_thinking:
                wanted = after_thoughts(wanted, thoughts, tokenizer)
            parser = partial(TurnParser, None, thoughts, is_thinking=is_thinking)
            return _Held(wanted, frozenset(shown), parser)
        form = tokenizer.chat.calls
        tools = (tool["function"] for tool in (*told.tools, *told.more_tools))
        schemas = {tool["name"]: tool["parameters"] for tool in tools}
        if told.choice.names is not None:
            schemas = {name: schemas[name] for name in told.choice.names}
        parser = partial(TurnParser, form, thoughts, is_thinking=is_thinking, schemas=schemas)
        is_required = told.choice.mode == "required"
        try:
            rules = CallGrammar(form, schemas, tokenizer)
            grammar = rules.grammar(
                is_required=is_required,
                is_parallel=told.is_parallel and not told.choice.is_one,
                thoughts=thoughts,
                is_thinking=is_thinking,
                text=wanted,
            )
            later = None
            if grammar.free is None:
                self._llm.constraints.new(grammar)
            else:
                later = self._llm.constraints.compile_later(grammar)
        except SettingError as error:
            if is_required:
                raise SettingError("tools", ..., because=error.because or str(error)) from error
            later = Future()
            later.set_exception(error)
            return _Held(None, frozenset(shown), parser, later)
        return _Held(grammar, rules.special | shown, parser, later)

    def count(self, body: TalkBody) -> int:
        """The tokens of a conversation."""
        return len(self._encode(self.render(body.conversation()), adds_special=False))

    def completion(self, body: CompletionBody, tenant: str | None) -> PreparedRequest:
        return self._complete(body, tenant, body.prompt, _COMPLETION_TOKENS)

    def native(self, body: CompletionBody, tenant: str | None) -> PreparedRequest:
        """A completion by llama.cpp's defaults."""
        return self._complete(body, tenant, body.prompt, None)

    def infill(self, body: "InfillBody", tenant: str | None) -> PreparedRequest:
        return self._complete(body, tenant, [body.parts(self._llm.tokenizer)], None)

    def _complete(
        self, body: CompletionBody, tenant: str | None, prompts: Sequence[Prompt], default_tokens: int | None
    ) -> PreparedRequest:
        def encode() -> list[Sequence[int]]:
            return [self._encode_parts(prompt, body.add_special_tokens is not False) for prompt in prompts]

        return self._prepare(body, tenant, len(prompts), encode, default_tokens)

    def embeddings(self, body: "EmbeddingBody", tenant: str | None) -> PreparedRequest:
        self.check_model(body.model, is_needed=True)
        self._check_number(len(body.input), 1, body.prompt_param)
        prompts = [self._encode_parts(prompt, True) for prompt in body.input]
        for prompt in prompts:
            self._check_length(len(prompt))
        requests = tuple(
            GenerationRequest(
                prompt, 0, pooling=body.pooling or "mean", **self._sharing(tenant, body.cache_salt)
            )
            for prompt in prompts
        )
        return PreparedRequest(requests, sum(map(len, prompts)), about=body.about())

    def tokenize(self, body: TokenizeBody) -> list[int]:
        self.check_model(body.model)
        if body.messages is not None:
            return self._llm.tokenizer.encode(self.render(body.told(body.messages)), add_special_tokens=False)
        text = body.content if body.prompt is None else body.prompt
        adds_special = body.prompt is not None if body.add_special is None else body.add_special
        return self._llm.tokenizer.encode(text or "", add_special_tokens=adds_special)

    def detokenize(self, body: DetokenizeBody) -> str:
        """Special tokens are themselves; an id that the model has not is an error."""
        self.check_model(body.model)
        vocab_size = self._llm.model.config.vocab_size
        if body.tokens and max(body.tokens) >= vocab_size:
            raise PromptError(f"token ids are 0 to {vocab_size - 1}, the model's vocabulary")
        return self._llm.tokenizer.decode(body.tokens, skip_special=False)

    def check_model(self, name: str | None, *, is_needed: bool = False) -> None:
        """Whether requests may call the model so. Only what is strict asks for a name, or for the right one."""
        if name is None and is_needed and self._settings.strict_parameters:
            raise ApiError(400, "model is missing", code="missing_required_parameter", param="model")
        if name is not None and self._settings.strict_model and name != self._settings.model_name:
            raise no_model(name, self._settings.model_name)

    def _prepare(
        self,
        body: GenerationBody,
        tenant: str | None,
        num_prompts: int,
        encode: Callable[[], Sequence[Sequence[int]]],
        default_tokens: int | None,
        held: "_Held | None" = None,
    ) -> PreparedRequest:
        self.check_model(body.model, is_needed=True)
        num_choices = body.n or 1
        self._check_number(num_prompts, num_choices, body.prompt_param)
        sampling = self._sampling(body)  # before the prompt, which may be long
        prompts = encode()
        requests = tuple(
            GenerationRequest(
                token_ids=prompt,
                max_tokens=self._max_tokens(body, len(prompt), default_tokens),
                sampling=_of_choice(sampling, index),
                stop=tuple(body.stop or ()),
                num_logprobs=body.num_logprobs,
                json_format=body.answer_format() if held is None else held.grammar,
                shown_special=self._llm.tokenizer.pieces.special
                if body.skip_special_tokens is False
                else frozenset()
                if held is None
                else held.shown,
                ignore_eos=bool(body.ignore_eos),
                includes_stop=bool(body.include_stop_str_in_output),
                prompt_logprobs=body.num_scores,
                priority=body.priority or 0,
                **self._sharing(tenant, body.cache_salt),
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
            counts_usage=options is not None and bool(options.continuous_usage_stats),
            echoes=isinstance(body, CompletionBody) and bool(body.echo),
            tells_scores=body.prompt_logprobs is not None,
            tells_ids=bool(body.return_token_ids),
        )

    def _sampling(self, body: GenerationBody) -> SamplingParams:
        """By the names that SamplingParams and the body share; what is left out has the default."""
        given: dict[str, Any] = {"temperature": _TEMPERATURE}
        for each in fields(SamplingParams):
            if (value := getattr(body, each.name, None)) is not None:
                given[each.name] = value
        biases = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
        # A word may begin a text or stand within one.
        texts = {text for word in body.bad_words or () for text in (word, f" {word.lstrip()}")}
        bad = {tuple(self._llm.tokenizer.encode(text, add_special_tokens=False)) for text in texts}
        return SamplingParams(**{**given, "logit_bias": biases, "bad_sequences": tuple(bad - {()})})

    def _sharing(self, tenant: str | None, cache_salt: str | None) -> dict[str, Any]:
        """Who shares what was read, and takes turns, with whom."""
        return {
            "cache_salt": salt_of(tenant if self._isolates else None, cache_salt or ""),
            "owner": tenant if tenant is not None and self._has_tenants else "",
        }

    def _check_number(self, num_prompts: int, num_choices: int, param: str) -> None:
        if num_prompts * num_choices > self._max_requests:
            raise ApiError(
                400,
                f"{num_prompts} prompts with n={num_choices} are {num_prompts * num_choices} answers at once: "
                f"this server takes up to {self._max_requests}; send several requests",
                code="invalid_value",
                param="n" if num_prompts == 1 else param,
            )

    def _check_length(self, num_prompt: int) -> None:
        if num_prompt > self._max_prompt_tokens:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, and this server takes up to {self._max_prompt_tokens}: "
                "shorten the prompt"
            )

    def _max_tokens(self, body: GenerationBody, num_prompt: int, default: int | None) -> int:
        """The most tokens of the answer to a prompt. Whether both fit together, the service checks."""
        self._check_length(num_prompt)
        room = max(self._max_request_tokens - num_prompt, 1)
        if body.answer_tokens is None:
            return room if default is None else min(default, room)
        return body.answer_tokens if self._settings.strict_parameters else min(body.answer_tokens, room)

    def render(self, told: Conversation) -> str:
        """A conversation as the model reads it, up to where the answer begins."""
        tokenizer = self._llm.tokenizer
        tools = told.tools if told.choice.mode != "none" else []
        messages = told.messages
        if told.continues:  # a mark tells where it ends: what a template writes behind it may look the same
            last = {**messages[-1], "content": messages[-1]["content"].rstrip() + _CONTINUED}
            messages = [*messages[:-1], last]
        if tools or any("tool_calls" in message or message["role"] == "tool" for message in messages):
            form = tokenizer.chat.calls
            messages = written(messages, form, tools)
            tools = tools if form.is_native else []
        text = tokenizer.render_chat(
            messages, add_generation_prompt=told.adds_prompt, tools=tools, variables=told.variables
        )
        before, is_found, _ = text.rpartition(_CONTINUED) if told.continues else ("", "", "")
        return before if is_found else text

    def _encode_parts(self, prompt: Prompt, adds_special: bool) -> Sequence[int]:
        """A text, ids, or texts and ids in a row, which begins as a text does where its first part is one."""
        if isinstance(prompt, str):
            return self._encode(prompt, adds_special=adds_special)
        if set(map(type, prompt)) == {int}:
            return cast(list[int], prompt)
        tokens: list[int] = []
        for index, part in enumerate(prompt):
            tokens += (
                [part]
                if isinstance(part, int)
                else self._encode(part, adds_special=adds_special and not index)
            )
        return tokens

    def _encode(self, text: str, *, adds_special: bool) -> list[int]:
        """The tokens of a prompt. One that has far too many is refused before all of it is tokenized, which takes
        long and much memory."""
        encode, most = self._llm.tokenizer.encode, self._max_prompt_tokens
        num_tokens = 0
        for start in range(0, len(text) if len(text) > max(most, _SLICE) else 0, _SLICE):
            part = encode(text[start : start + _SLICE], add_special_tokens=False)
            num_tokens += max(len(part) - _CUT_TOKENS, 0)
            if num_tokens > most:
                raise ContextLengthError(
                    f"the prompt has more than {num_tokens} tokens, and this server takes up to {most}: shorten the "
                    "prompt"
                )
        return encode(text, add_special_tokens=adds_special)


def written(
    messages: Sequence[Mapping[str, Any]], form: CallFormat, tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages as a template takes calls and results; where it knows of none, as text."""
    told: list[dict[str, Any]] = []
    for message in map(dict, messages):
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if not form.is_native and message["role"] == "tool":
            answer = f"<tool_response>\n{message['content']}\n</tool_response>"
            if told and told[-1].get("is_result"):
                told[-1]["content"] += "\n" + answer
                continue
            message = {"role": "user", "content": answer, "is_result": True}
        elif not form.writes_calls and calls:
            own = form.write([(call["name"], call["arguments"]) for call in calls])
            message = {
                "role": message["role"],
                "content": "\n".join(filter(None, [message["content"], own])),
            }
        elif form.takes_text and calls:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
                }
                for call in message["tool_calls"]
            ]
        told.append(message)
    if tools and not form.is_native:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        block = HERMES_TOOLS.format(tools=lines)
        if told and told[0]["role"] == "system":
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{block}"}
        else:
            told.insert(0, {"role": "system", "content": block})
    return told


def no_model(name: str, model_name: str) -> ApiError:
    return ApiError(
        404,
        f"there is no model {name[:100]!r} here: this server has {model_name!r}",
        code="model_not_found",
        param="model",
    )


def salt_of(tenant: str | None, cache_salt: str) -> str:
    """The salt of a request's block keys: requests share a prefix only where it is the same. No two pairs of tenant
    and cache_salt have the same one, since a tenant's name has a fixed length."""
    return cache_salt if tenant is None else f"{tenant}:{cache_salt}"


def _of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The sampling of a prompt's choice of this index: with a seed, each draws with one of its own."""
    if sampling.seed is None or not index:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % (MAX_SEED + 1))
