"""What the body of a request may be: names, types, ranges and how much of anything."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from penstock.engine.events import AnswerFormat, Grammar, JsonFormat
from penstock.engine.grammar import unknown_formats
from penstock.errors import SettingError, assigned
from penstock.frontends.server.conversation import (
    MAX_TOOLS,
    Choice,
    Conversation,
    Messages,
    Tool,
    ToolChoice,
    known_tools,
    thinking,
)
from penstock.frontends.server.parts import (
    MAX_ENTRIES,
    MAX_INT,
    STRICT,
    Body,
    Part,
    Unsupported,
    at_most,
    wrong,
)

MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_SALT_CHARACTERS = 256
MAX_PROMPTS = 1024
MAX_ALLOWED = 2**18  # tokens: no vocabulary has more
_IN_BODIES: Unsupported = {
    "tools": ("calling tools but in a chat", ([],)),
    "tool_choice": ("calling tools but in a chat", ("none", "auto")),
    "parallel_tool_calls": ("calling tools but in a chat", (True, False)),
    "functions": ("calling functions", ([],)),
    "function_call": ("calling functions", ("none", "auto")),
    "audio": ("sound", ()),
    "modalities": ("anything but text", (["text"],)),
    "prediction": ("predicted output", ()),
    "verbosity": ("a choice of verbosity", ("medium",)),
    "web_search_options": ("searching the web", ()),
    "moderation": ("moderation", ()),
    "service_tier": ("service tiers", ("auto", "default")),
    "best_of": ("choosing among answers; give n and choose", (1,)),
    "use_beam_search": ("beam search", (False,)),
    "echo": ("repeating the prompt but in completions", (False,)),
    "add_special_tokens": ("tokens beside a template's", (False,)),
    "prompt_embeds": ("prompts that are vectors", ()),
    "truncate_prompt_tokens": ("cutting prompts", (-1,)),
    "suffix": ("filling in before a suffix", ("",)),
    "chat_template": ("templates of a request's own", ()),
    "documents": ("documents beside messages; put them into a message", ([],)),
}
# Names of other servers for what is known here by another. A server that is strict does not know them.
_ALIASES = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "stop_sequences": "stop",
}
Prompt = str | list[int | str]  # a text, ids, or texts and ids in a row
Tokens = Annotated[int, Field(ge=1, le=MAX_INT)]
Id = Annotated[int, Field(ge=0, le=MAX_INT)]
# An empty one would share with all who have none, which is hardly what its sender wants.
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_PROMPT_KINDS = (
    "give a text, a list of texts, a list of token ids (texts may be among them), or a list of such lists"
)


def prompts_of(value: object) -> list[Prompt]:
    """Whatever a prompt may be, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        # There may be millions of items: they are gone through without a line of Python for each.
        kinds = set(map(type, value))
        if int in kinds:
            return [_token_ids(value)]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"give up to {MAX_PROMPTS} prompts, not {len(value)}")
        if kinds <= {str, list}:
            return [item if isinstance(item, str) else _token_ids(item) for item in value]
    raise ValueError(_PROMPT_KINDS)


def _token_ids(items: list[Any]) -> list[int | str]:
    kinds = set(map(type, items))
    if kinds - {int, str}:
        raise ValueError(_PROMPT_KINDS)
    ids = items if kinds == {int} else [item for item in items if isinstance(item, int)]
    if len(items) - len(ids) > MAX_PROMPTS:
        raise ValueError(f"give up to {MAX_PROMPTS} texts among token ids, not {len(items) - len(ids)}")
    if ids and not 0 <= min(ids) <= max(ids) <= MAX_INT:
        raise ValueError(f"token ids are whole numbers from 0 to {MAX_INT} at most")
    return items


def _no_limit(value: object) -> object:
    """-1 is what other servers have for no number."""
    return None if value == -1 and not isinstance(value, bool | float) else value


def _seed(value: object) -> object:
    """-1 is any; other numbers below 0 are numbers, too."""
    value = _no_limit(value)
    is_below = isinstance(value, int) and not isinstance(value, bool) and -MAX_SEED - 1 <= value < 0
    return value % (MAX_SEED + 1) if is_below else value  # type: ignore[operator]


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) <= MAX_STOPS:
        longest = max((len(stop) for stop in stops if isinstance(stop, str)), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"a stop string may have up to {MAX_STOP_CHARACTERS} characters, and one has {longest}"
            )
    return stops


def _biases(value: dict[str, float]) -> dict[str, float]:
    for name in value:
        if not (name.isascii() and name.isdigit() and len(name) < 19):
            raise ValueError(f"give token ids, such as '100', not {name[:40]!r}")
    return value


Biases = Annotated[dict[str, float], AfterValidator(_biases), at_most(MAX_ENTRIES)]


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # the usage so far, in every chunk
    include_obfuscation: Literal[False] | None = None  # there is none


Schema = dict[str, Any]


def _schema(value: object) -> object:
    """Some servers take a schema as text, too."""
    if isinstance(value, str):
        try:
            return from_json(value, allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"it is text, but no JSON: {error}") from None
    return value


GivenSchema = Annotated[Schema, BeforeValidator(_schema)]
Choices = Annotated[list[str], Field(min_length=1), at_most(MAX_ENTRIES)]


class JsonSchema(Part):
    schema_: Annotated[Schema, Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # the schema is always kept to


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    grammar: str | None = None
    # What OpenAI's newer API has beside the schema.
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("json_schema is needed with type 'json_schema'")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError("json_schema goes with type 'json_schema'")
        if (self.type == "grammar") != (self.grammar is not None):
            raise ValueError("grammar goes with type 'grammar', and is needed there")
        return self

    def answer_format(self) -> AnswerFormat | None:
        if self.type == "text":
            return None
        if self.grammar is not None:
            return Grammar(self.grammar)
        return JsonFormat(self.schema_ if self.json_schema is None else self.json_schema.schema_)


class StructuredOutputs(Part):
    """One of them; vLLM has its settings of how in the same place."""

    unsupported: ClassVar[Unsupported] = {"structural_tag": ("structural tags", ())}

    json_: Annotated[GivenSchema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    def answer_format(self) -> AnswerFormat | None:
        return _only_one(
            ("json", self.json_, JsonFormat),
            ("json_object", self.json_object or None, lambda _: JsonFormat()),
            ("regex", self.regex, Grammar.regex),
            ("choice", self.choice, Grammar.choice),
            ("grammar", self.grammar, Grammar),
        )


def _called(name: str) -> Callable[[str, object], str]:
    """What a setting is called here."""
    return lambda _, value: assigned(name, value)


def _only_one(*formats: tuple[str, Any, Callable[[Any], AnswerFormat | None]]) -> AnswerFormat | None:
    """What the one that is given makes of itself."""
    given: list[tuple[str, AnswerFormat]] = []
    for name, value, make in formats:
        try:
            wanted = None if value is None else make(value)
        except SettingError as error:
            raise wrong(name, error.message(_called(name))) from None
        given += [] if wanted is None else [(name, wanted)]
    if len(given) > 1:
        raise wrong(given[1][0], f"{given[1][0]} contradicts {given[0][0]}: give one of them")
    return given[0][1] if given else None


class GenerationBody(Body):
    """What both endpoints take. Numbers without a range here have theirs in SamplingParams."""

    unsupported: ClassVar[Unsupported] = _IN_BODIES
    aliases: ClassVar[Mapping[str, str]] = _ALIASES

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[Tokens | None, BeforeValidator(_no_limit)] = None
    max_completion_tokens: Annotated[Tokens | None, BeforeValidator(_no_limit)] = None
    stop: Annotated[list[str] | None, at_most(MAX_STOPS), BeforeValidator(_stops)] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[Annotated[int, Field(ge=0, le=MAX_INT)] | None, BeforeValidator(_no_limit)] = None
    min_p: float | None = None
    seed: Annotated[Annotated[int, Field(ge=0, le=MAX_SEED)] | None, BeforeValidator(_seed)] = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    stop_token_ids: Annotated[list[Id], at_most(MAX_ENTRIES)] | None = None
    allowed_token_ids: Annotated[list[Id], Field(min_length=1), at_most(MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[Word], at_most(MAX_ENTRIES)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: GivenSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: GivenSchema | None = None  # llama.cpp's, as is the next
    grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    cache_salt: Salt | None = None
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
        """How many of the likeliest tokens are reported with each token; None: no log-probabilities."""

    @property
    def num_scores(self) -> int | None:
        """The same for the prompt's own tokens."""
        return self.prompt_logprobs

    def given_format(self) -> ResponseFormat | None:
        """What the API itself calls a format."""
        return self.response_format

    def answer_format(self) -> AnswerFormat | None:
        """What the answer is held to, by whatever name."""
        return _only_one(
            ("response_format", self.given_format(), ResponseFormat.answer_format),
            ("structured_outputs", self.structured_outputs, StructuredOutputs.answer_format),
            ("guided_json", self.guided_json, JsonFormat),
            ("guided_regex", self.guided_regex, Grammar.regex),
            ("guided_choice", self.guided_choice, Grammar.choice),
            ("guided_grammar", self.guided_grammar, Grammar),
            ("json_schema", self.json_schema, JsonFormat),
            ("grammar", self.grammar or None, Grammar),  # its clients send an empty one
        )

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens of the answer, where the body says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _agrees_with_itself(self, info: ValidationInfo) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise wrong(
                "max_tokens",
                f"max_tokens={self.max_tokens} contradicts max_completion_tokens={self.max_completion_tokens}: "
                "give one of them",
            )
        wanted, ignored = self.answer_format(), info.context or STRICT
        for name in unknown_formats(wanted.schema) if isinstance(wanted, JsonFormat) else ():
            if ignored.is_strict:
                raise wrong("format", f"the schema's format {name[:40]!r} is not known")
            ignored.add(f"format.{name}")
        for name in ("stream_options", "return_progress"):
            if getattr(self, name) and not self.stream:
                raise wrong(name, f"{name} is accepted only with 'stream': true")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "prompt_logprobs is accepted only without 'stream': true")
        return self


class CompletionBody(GenerationBody):
    prompt_param = "prompt"

    prompt: Annotated[
        list[Prompt], PlainValidator(prompts_of, json_schema_input_type=str | list[Prompt] | list[int | str])
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[Annotated[int, Field(ge=0, le=MAX_INT)] | None, BeforeValidator(_no_limit)] = None
    echo: bool | None = None
    add_special_tokens: bool | None = None  # those that begin a text

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_scores(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @model_validator(mode="after")
    def _echoes_what_it_scores(self) -> Self:
        if (
            self.echo
            and None not in (self.logprobs, self.prompt_logprobs)
            and self.logprobs != self.prompt_logprobs
        ):
            raise wrong("prompt_logprobs", "with echo, logprobs are the prompt's, too: give one of them")
        return self


class TalkBody(GenerationBody):
    """A body with a conversation in it, of whatever API."""

    @property
    def num_logprobs(self) -> int | None:
        return None

    @abstractmethod
    def conversation(self) -> Conversation: ...

    @model_validator(mode="after")
    def _is_a_conversation(self) -> Self:
        try:
            self.conversation()
        except PydanticCustomError:  # it names what is wrong
            raise
        except ValueError as error:
            raise wrong(self.prompt_param, str(error)) from None
        return self

    def about(self) -> dict[str, Any]:
        """What an answer says of its request."""
        return {}


class BlockBody(TalkBody):
    """One whose answer is a single one, made of blocks that have no place for more."""

    unsupported: ClassVar[Unsupported] = {**TalkBody.unsupported, "n": ("several answers here", (1,))}
    without = frozenset({"n", "prompt_logprobs", "return_token_ids", "return_progress", "stream_options"})


class TemplateBody(Body):
    """What a chat's template is given besides messages."""

    tools: Annotated[list[Tool] | None, known_tools("function"), at_most(MAX_TOOLS)] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MAX_ENTRIES)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def told(self, messages: Messages) -> Conversation:
        if self.continue_final_message and (
            self.add_generation_prompt or not (messages[-1].content or "").strip()
        ):
            raise wrong(
                "continue_final_message", "it needs a last message with text, and no add_generation_prompt"
            )
        variables = self.chat_template_kwargs
        if self.enable_thinking is not None:
            variables = {"enable_thinking": self.enable_thinking, **(variables or {})}
        return Conversation(
            [message.plain() for message in messages],
            [tool.function.plain() for tool in self.tools or ()],
            self.tool_choice or Choice(),
            self.parallel_tool_calls is not False,
            thinking(self.reasoning_effort, variables),
            bool(self.continue_final_message),
            self.add_generation_prompt is not False and not self.continue_final_message,
        )


class ChatBody(TemplateBody, TalkBody):
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
            raise wrong("top_logprobs", "top_logprobs is accepted only with 'logprobs': true")
        return self

    def conversation(self) -> Conversation:
        return self.told(self.messages)


class TokenizeBody(TemplateBody):
    """One of a text, a completion's prompt and a chat's messages. `add_special` is whether the tokenizer adds the
    tokens that begin a text: for a prompt it does, for other text not."""

    prompt_param = "content"
    aliases: ClassVar[Mapping[str, str]] = {"add_special_tokens": "add_special"}  # vLLM's

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special: bool | None = None
    # Each token with its text, or its bytes where it is a part of a character.
    with_pieces: bool | None = None
    return_token_strs: bool | None = None

    @property
    def has_texts(self) -> bool:
        return bool(self.with_pieces or self.return_token_strs)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(part is not None for part in (self.content, self.prompt, self.messages)) != 1:
            raise ValueError("give one of content, prompt and messages")
        if self.messages is not None and self.add_special:
            raise wrong(
                "add_special", "add_special is not accepted with messages: the model's template has them"
            )
        if self.messages is not None:
            self.told(self.messages)
        return self


class DetokenizeBody(Body):
    prompt_param = "tokens"

    tokens: Annotated[
        list[int], PlainValidator(lambda value: _ids_only(value), json_schema_input_type=list[int])
    ]
    model: str | None = None


def _ids_only(value: object) -> list[int]:
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise ValueError("give a list of token ids")
    if value and not 0 <= min(value) <= max(value) <= MAX_INT:
        raise ValueError(f"token ids are whole numbers from 0 to {MAX_INT} at most")
    return value
