"""What the body of a request may be: names, types, ranges and how much of anything. Null is the same as leaving a
parameter out."""

import codecs
import difflib
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from penstock.engine.events import AnswerFormat, Grammar, JsonFormat
from penstock.frontends.server.errors import ApiError
from penstock.models.reading import shortened

# Bounds on everything, so that no body takes long to refuse, or much memory.
MAX_INT = 2**31 - 1  # of whole numbers without a bound of their own
MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_SALT_CHARACTERS = 256
MAX_MESSAGES = 10_000
MAX_PROMPTS = 1024
MAX_ENTRIES = 1024  # of logit_bias, and of metadata
MAX_ALLOWED = 2**18  # tokens: no vocabulary has more
MAX_TOOLS = 512
MAX_IGNORED = 64  # names in a body that are not known
# Lists and objects of a whole body: the smallest take three bytes as JSON, and a hundred as values of Python.
MAX_CONTAINERS = 2**16
# What comes before a bracket outside of strings, and the bracket, or the end. It never goes back, and always matches.
_TO_BRACKET = re.compile(
    rb"""(?: [^"\[{]++ | "[^"\\]*+ (?:\\.[^"\\]*+)*+ (?:"|\\?\Z) )*+ (?:([\[{])|\Z)""", re.VERBOSE | re.DOTALL
)

# Parameters of other servers that are known and not supported: what each would need, and the values that ask for
# nothing. Those are accepted, and so is null.
Unsupported = Mapping[str, tuple[str, tuple[Any, ...]]]
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
    "suffix": ("filling in before a suffix", ("",)),
    "chat_template": ("templates of a request's own", ()),
    "documents": ("documents beside messages; put them into a message", ([],)),
}
_IN_MESSAGES: Unsupported = {
    "function_call": ("calling functions", ()),
    "audio": ("sound", ()),
    "refusal": ("refusals", ()),
    "annotations": ("annotations", ([],)),
}
# Of those, what an answer means the same without: ignored, unless the server is strict.
_WITHOUT_MEANING = {"prediction", "verbosity", "moderation", "service_tier", "refusal", "annotations"}
# Names of other servers for what is known here by another. A server that is strict does not know them.
_ALIASES = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "stop_sequences": "stop",
}
# A name that is so much like a known one is a mistake, and not of another server.
_ALIKE = 0.85
_MAX_NAME = 64


class Ignored:
    """What a body has beyond what is known: refused where the server is strict, else ignored, and remembered."""

    def __init__(self, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self.names: dict[str, None] = {}  # in the order in which they came

    def add(self, name: str) -> None:
        if len(self.names) == MAX_IGNORED:
            raise wrong(name, f"it is not known, and so are {MAX_IGNORED} others", "unknown_parameter")
        self.names[name] = None

    @property
    def header(self) -> str:
        """Names, with commas in between, of letters that a header may have."""
        return ", ".join(re.sub(r"[^!-+\--~]", "?", name[:_MAX_NAME]) for name in self.names)


_STRICT = Ignored(is_strict=True)


class Part(BaseModel):
    """An object that a client sends. The first parameter that is not supported, or not known where that is not
    ignored, is the error: a client that sends a million of them is told of one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    unsupported: ClassVar[Unsupported] = {}
    own_names: ClassVar[Mapping[str, str]] = {}  # an API's own for what is known here by another
    aliases: ClassVar[Mapping[str, str]] = {}  # other servers', for those that are not strict

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return values
        ignored: Ignored = info.context or _STRICT
        known, accepted = _names(cls), dict[str, Any]()
        for given, value in values.items():
            name = cls.own_names.get(given, given)
            name = name if ignored.is_strict else cls.aliases.get(name, name)
            if name in known:
                if accepted.get(name) not in (None, value):
                    raise wrong(given, f"{given} contradicts another name of {name}: give one of them")
                if value is not None or name not in accepted:
                    accepted[name] = value
            elif name in cls.unsupported:
                cls._check_unsupported(name, value, ignored)
            elif ignored.is_strict:
                raise wrong(name, "", "unknown_parameter")
            elif name not in ignored.names:
                if meant := _meant(cls, name):
                    raise wrong(name, f"did you mean {meant}?", "unknown_parameter")
                ignored.add(name)
        return accepted

    @classmethod
    def _check_unsupported(cls, name: str, value: Any, ignored: Ignored) -> None:
        what, neutral = cls.unsupported[name]
        # Of the same type too: 1 is no True, and true is no 1.
        if value is None or any(type(value) is type(item) and value == item for item in neutral):
            return
        if ignored.is_strict or name not in _WITHOUT_MEANING:
            raise wrong(name, f"this server does not do {what}; leave it away", "unsupported_parameter")
        ignored.add(name)


@cache
def _names(kind: type[Part]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def _meant(kind: type[Part], name: str) -> str | None:
    """The parameter whose name this is but for a slip."""
    if len(name) > _MAX_NAME:
        return None
    alike = difflib.get_close_matches(name, sorted(_names(kind)), 1, _ALIKE)
    return alike[0] if alike else None


def wrong(name: str, reason: str, code: str = "invalid_value") -> PydanticCustomError:
    """An error about the parameter `name` of the object that is validated."""
    return PydanticCustomError(code, "{reason}", {"name": name, "reason": reason})


def at_most(limit: int) -> BeforeValidator:
    """Refuses lists and objects that have more, before anything in them is looked at."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"give up to {limit} of them, not {len(value)}")
        return value

    return BeforeValidator(check)


def _role(value: object) -> object:
    if value == "function":
        raise ValueError("messages of functions are OpenAI's old form: use the role tool")
    return "system" if value == "developer" else value  # OpenAI's newer name for it; templates know the older


def text_of(content: object) -> str:
    """A text, or the texts of its parts on lines of their own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("give a text, or a list of parts {'type': 'text', 'text': ...}")
    return "\n".join(map(_text_part, content))


def _text_part(part: object) -> str:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise ValueError(f"parts of type {kind[:40]!r} are not supported: this server takes text only")
    raise ValueError("give parts {'type': 'text', 'text': ...}")


def arguments_of(value: object) -> dict[str, Any]:
    """Those of a call: an object, or its JSON."""
    if isinstance(value, str):
        try:
            value = from_json(value or "{}", allow_inf_nan=False)
        except ValueError as error:
            raise ValueError(f"they are no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("give a JSON object")
    return value


Name = Annotated[str, Field(pattern=r"^[^\s\"'<>{}\[\]()\\]{1,128}$")]


class CalledFunction(Part):
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(arguments_of)]


class ToolCall(Part):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id or "", "type": "function", "function": function}


class Message(Part):
    unsupported = _IN_MESSAGES
    aliases: ClassVar[Mapping[str, str]] = {"reasoning": "reasoning_content"}

    role: Annotated[str, Field(min_length=1, max_length=_MAX_NAME), BeforeValidator(_role)]
    content: Annotated[str | None, BeforeValidator(lambda value: value and text_of(value))] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(fail_fast=True), at_most(MAX_TOOLS)] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise wrong("content", "give a text, or a list of parts {'type': 'text', 'text': ...}")
        return self

    def plain(self) -> dict[str, Any]:
        """What the model's template gets."""
        message: dict[str, Any] = {"role": str(self.role), "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message


class Function(Part):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the schema is always kept to

    def plain(self) -> dict[str, Any]:
        """As the model's template knows tools."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": function}


class Tool(Part):
    type: Literal["function"]
    function: Function


def known_tools(value: object, info: ValidationInfo) -> object:
    """Those of types that this server has no use for, such as searching the web, are ignored."""
    ignored: Ignored = info.context or _STRICT
    if not isinstance(value, list) or ignored.is_strict:
        return value
    known = []
    for tool in value:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            ignored.add(f"tools.{kind}")
        else:
            known.append(tool)
    return known


ToolChoice = Literal["none", "auto", "required"]


class ChosenFunction(Part):
    name: str


class ChosenTool(Part):
    type: Literal["function"]
    function: ChosenFunction


@dataclass(frozen=True)
class Conversation:
    """What a template is given, whatever the API: messages, tools as OpenAI's chat has them, and which of these may
    be called: none, any, one at least, or the one of a name."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    choice: str = "auto"
    is_named: bool = False  # `choice` is a tool's name
    is_parallel: bool = True
    variables: dict[str, Any] = field(default_factory=dict)
    continues: bool = False  # the last message, which is the beginning of the answer
    adds_prompt: bool = True  # the answer's beginning, as the template has it

    def __post_init__(self) -> None:
        names = [tool["function"]["name"] for tool in self.tools]
        if len(set(names)) < len(names):
            raise wrong("tools", "tools have names of their own")
        if self.is_named and self.choice not in names:
            raise wrong("tool_choice", f"there is no tool {self.choice[:100]!r} among tools")
        if self.choice == "required" and not names:
            raise wrong("tool_choice", "tool_choice 'required' needs tools")


def thinking(effort: str | None, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables of a template that say how much to think; those that are given by name go first."""
    found: dict[str, Any] = {}
    if effort is not None:
        found = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    for name in _FIXED & (variables or {}).keys():
        raise wrong(
            "chat_template_kwargs", f"{name} is not for chat_template_kwargs: it has a place of its own"
        )
    return {**found, **(variables or {})}


_FIXED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
Prompt = str | list[int | str]  # a text, ids, or texts and ids in a row
Tokens = Annotated[int, Field(ge=1, le=MAX_INT)]
Id = Annotated[int, Field(ge=0, le=MAX_INT)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]
_PROMPT_KINDS = (
    "give a text, a list of texts, a list of token ids (texts may be among them), or a list of such lists"
)


class Body(Part):
    prompt_param: ClassVar[str]  # what holds the prompt


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
    is_below = isinstance(value, int) and not isinstance(value, bool) and -MAX_SEED <= value < 0
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


def _only_one(*formats: tuple[str, Any, Callable[[Any], AnswerFormat | None]]) -> AnswerFormat | None:
    """What the one that is given makes of itself."""
    made = [(name, make(value)) for name, value, make in formats if value is not None]
    given = [(name, wanted) for name, wanted in made if wanted is not None]
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
    logit_bias: Annotated[dict[str, float], AfterValidator(_biases), at_most(MAX_ENTRIES)] | None = None
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
    # An empty one would share with all who have none, which is hardly what its sender wants.
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
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

    def answer_format(self) -> AnswerFormat | None:
        """What the answer is held to, by whatever name."""
        return _only_one(
            ("response_format", self.response_format, ResponseFormat.answer_format),
            ("structured_outputs", self.structured_outputs, StructuredOutputs.answer_format),
            ("guided_json", self.guided_json, JsonFormat),
            ("guided_regex", self.guided_regex, Grammar.regex),
            ("guided_choice", self.guided_choice, Grammar.choice),
            ("guided_grammar", self.guided_grammar, Grammar),
            ("json_schema", self.json_schema, JsonFormat),
            ("grammar", self.grammar, Grammar),
        )

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens of the answer, where the body says so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise wrong(
                "max_tokens",
                f"max_tokens={self.max_tokens} contradicts max_completion_tokens={self.max_completion_tokens}: "
                "give one of them",
            )
        self.answer_format()
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

    @abstractmethod
    def conversation(self) -> Conversation: ...

    def about(self) -> dict[str, Any]:
        """What an answer says of its request."""
        return {}


class ChatBody(TalkBody):
    prompt_param = "messages"

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool] | None, BeforeValidator(known_tools), at_most(MAX_TOOLS)] = None
    tool_choice: ToolChoice | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MAX_ENTRIES)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _has_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "top_logprobs is accepted only with 'logprobs': true")
        if self.continue_final_message and (self.add_generation_prompt or not self.messages[-1].content):
            raise wrong(
                "continue_final_message", "it needs a last message with text, and no add_generation_prompt"
            )
        self.conversation()
        return self

    def conversation(self) -> Conversation:
        choice, variables = self.tool_choice, self.chat_template_kwargs
        if self.enable_thinking is not None:
            variables = {"enable_thinking": self.enable_thinking, **(variables or {})}
        return Conversation(
            [message.plain() for message in self.messages],
            [tool.function.plain() for tool in self.tools or ()],
            choice.function.name if isinstance(choice, ChosenTool) else choice or "auto",
            isinstance(choice, ChosenTool),
            self.parallel_tool_calls is not False,
            thinking(self.reasoning_effort, variables),
            bool(self.continue_final_message),
            self.add_generation_prompt is not False and not self.continue_final_message,
        )


class TokenizeBody(Body):
    """One of a text, a completion's prompt and a chat's messages. `add_special` is whether the tokenizer adds the
    tokens that begin a text: for a prompt it does, for other text not."""

    prompt_param = "content"

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special: bool | None = None
    with_pieces: bool | None = (
        None  # each token with its text, or its bytes where it is a part of a character
    )
    return_token_strs: bool | None = None

    @property
    def has_texts(self) -> bool:
        return bool(self.with_pieces or self.return_token_strs)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(part is not None for part in (self.content, self.prompt, self.messages)) != 1:
            raise ValueError("give one of content, prompt and messages")
        if self.messages is not None and self.add_special is not None:
            raise wrong(
                "add_special", "add_special is not accepted with messages: the model's template has them"
            )
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


_Body = TypeVar("_Body", bound=Body)


def parse(raw: bytes, kind: type[_Body], ignored: Ignored = _STRICT) -> _Body:
    """The body in these bytes, or an error that names the parameter that is wrong. What is not known is an error, or
    goes to `ignored`."""
    if has_too_many_containers(raw):
        raise ApiError(
            400,
            f"the body has more than {MAX_CONTAINERS} lists and objects in it: this server takes no more; send less",
            code="invalid_value",
        )
    try:
        # Refuses NaN, text that is no Unicode and deep nesting, besides what is no JSON.
        value = from_json(raw.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not accepted: give a JSON object", code="invalid_json")
    try:
        return kind.model_validate(value, context=ignored)
    except ValidationError as error:
        raise _api_error(error.errors(include_url=False)[0]) from None


def has_too_many_containers(raw: bytes) -> bool:
    """Counts the lists and objects of bytes that may be JSON, without parsing them."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_CONTAINERS:
        return False
    # Most may be in texts, such as programs.
    found = islice(_TO_BRACKET.finditer(raw), MAX_CONTAINERS + 1)
    return sum(match[1] is not None for match in found) > MAX_CONTAINERS


def _api_error(error: Mapping[str, Any]) -> ApiError:
    kind, context = str(error["type"]), error.get("ctx", {})
    reason = str(context.get("error", error["msg"])).replace("Input should", "it should")
    param = _path((*error["loc"], context["name"]) if "name" in context else error["loc"])
    match kind:
        case "missing":
            return ApiError(400, f"{param} is missing", code="missing_required_parameter", param=param)
        case "unknown_parameter":
            message = f"unknown parameter: {param}" + (f" ({reason})" if reason else "")
            return ApiError(400, message, code=kind, param=param)
        case "unsupported_parameter":
            return ApiError(400, f"{param} is not supported: {reason}", code=kind, param=param)
    if kind == "invalid_value" or param is None:  # about several parameters: the reason names them
        return ApiError(400, reason, code="invalid_value", param=param)
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return ApiError(
        400, f"{param}={_shown(error['input'])} is not accepted: {reason}", code=code, param=param
    )


def _path(location: tuple[int | str, ...]) -> str | None:
    """`messages[0].content`; None for the body itself."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return shortened(path.removeprefix("."), 100) or None


def _shown(value: object) -> str:
    match value:
        case dict():
            return "{...}"
        case list():
            return "[...]"
        case _:
            return shortened(repr(value[:100] if isinstance(value, str) else value), 60)
