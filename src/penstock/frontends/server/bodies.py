"""The bodies of requests: names, types and ranges. Null is the same as leaving a parameter away."""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from penstock.engine.events import JsonFormat
from penstock.frontends.server.limits import (
    MAX_CHOICES,
    MAX_ENTRIES,
    MAX_INT,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_SALT_CHARACTERS,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    at_most,
)
from penstock.frontends.server.messages import Message
from penstock.frontends.server.parts import Part
from penstock.frontends.server.unsupported import IN_BODIES, Unsupported

Prompt = str | list[int]
Tokens = Annotated[int, Field(ge=1, le=MAX_INT)]
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]


class Body(Part):
    prompt_param: ClassVar[str]  # what holds the prompt


def _prompts(value: object) -> list[Prompt]:
    """Whatever a prompt may be, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        # There may be millions of items: they are gone through without a line of Python for each.
        kinds = set(map(type, value))
        if kinds == {int}:
            return [_token_ids(value)]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"give up to {MAX_PROMPTS} prompts, not {len(value)}")
        if kinds == {str}:
            return value
        if kinds == {list}:
            return [_token_ids(item) for item in value]
    raise ValueError(_PROMPT_KINDS)


_PROMPT_KINDS = "give a text, a list of texts, a list of token ids, or a list of such lists"


def _token_ids(items: list[Any]) -> list[int]:
    if set(map(type, items)) - {int}:
        raise ValueError(_PROMPT_KINDS)
    if items and not 0 <= min(items) <= max(items) <= MAX_INT:
        raise ValueError(f"token ids are whole numbers from 0 to {MAX_INT} at most")
    return items


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) <= MAX_STOPS:
        longest = max((len(stop) for stop in stops if isinstance(stop, str)), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"a stop string may have up to {MAX_STOP_CHARACTERS} characters, and one has {longest}"
            )
    return stops


def _salt(value: str) -> str:
    # An empty one would share with all who have none, which is hardly what its sender wants.
    if not 1 <= len(value) <= MAX_SALT_CHARACTERS:
        raise ValueError(f"give 1 to {MAX_SALT_CHARACTERS} characters, not {len(value)}, or leave it away")
    return value


class StreamOptions(Part):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None  # there is none


class JsonSchema(Part):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None  # the schema is always kept to


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema', and is needed there")
        return self

    def json_format(self) -> JsonFormat | None:
        if self.type == "text":
            return None
        return JsonFormat(None if self.json_schema is None else self.json_schema.schema_)


class GenerationBody(Body):
    """What both endpoints take. Numbers without a range here have theirs in SamplingParams."""

    unsupported: ClassVar[Unsupported] = IN_BODIES

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: Annotated[list[str] | None, at_most(MAX_STOPS), BeforeValidator(_stops)] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_ENTRIES)] = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    cache_salt: Annotated[str, AfterValidator(_salt)] | None = None
    # Accepted, without effect.
    user: str | None = None
    metadata: Annotated[dict[str, Any] | None, at_most(MAX_ENTRIES)] = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are to be told of; None: not even the chosen one's."""

    @property
    def answer_tokens(self) -> int | None:
        """How many tokens the answer may have, where that was said."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError(
                f"max_tokens={self.max_tokens} contradicts max_completion_tokens={self.max_completion_tokens}: "
                "give one of them"
            )
        if not self.stream and self.stream_options is not None:
            raise ValueError("stream_options is accepted only with 'stream': true")
        if not self.stream and self.return_progress:
            raise ValueError("return_progress is accepted only with 'stream': true")
        return self


class CompletionBody(GenerationBody):
    prompt_param = "prompt"

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(GenerationBody):
    prompt_param = "messages"

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _has_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is accepted only with 'logprobs': true")
        return self


class TokenizeBody(Body):
    """One of a text, a completion's prompt and a chat's messages. `add_special` is whether the tokenizer adds the
    tokens that begin a text: for a prompt it does, for other text not."""

    prompt_param = "content"

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(part is not None for part in (self.content, self.prompt, self.messages)) != 1:
            raise ValueError("give one of content, prompt and messages")
        if self.messages is not None and self.add_special is not None:
            raise ValueError("add_special is not accepted with messages: the model's template has them")
        return self
