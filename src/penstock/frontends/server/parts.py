"""An object that a client sends: names that are known, others that are ignored or refused; from bytes to it, or an
error that names what is wrong. Null is the same as leaving a parameter out."""

import codecs
import difflib
import re
from collections.abc import Mapping
from functools import cache
from itertools import islice
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from penstock.frontends.server.errors import ApiError
from penstock.models.reading import shortened

# Bounds on everything, so that no body takes long to refuse, or much memory.
MAX_INT = 2**31 - 1  # of whole numbers without a bound of their own
MAX_ENTRIES = 1024  # of logit_bias, and of metadata
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
# Of those, what an answer means the same without: ignored, unless the server is strict.
_WITHOUT_MEANING = {"prediction", "verbosity", "moderation", "service_tier", "refusal", "annotations"}
# A name that is so much like a known one is a mistake, and not of another server.
_ALIKE = 0.9
MAX_NAME = 64


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
        return ", ".join(re.sub(r"[^!-+\--~]", "?", name[:MAX_NAME]) for name in self.names)


STRICT = Ignored(is_strict=True)


class Part(BaseModel):
    """An object that a client sends. The first parameter that is not supported, or not known where that is not
    ignored, is the error: a client that sends a million of them is told of one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    unsupported: ClassVar[Unsupported] = {}
    own_names: ClassVar[Mapping[str, str]] = {}  # an API's own for what is known here by another
    aliases: ClassVar[Mapping[str, str]] = {}  # other servers', for those that are not strict
    without: ClassVar[frozenset[str]] = frozenset()  # its base's, which it does not know

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, values: Any, info: ValidationInfo) -> Any:
        if not isinstance(values, dict):
            return values
        ignored: Ignored = info.context or STRICT
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
    return frozenset(field.alias or name for name, field in kind.model_fields.items()) - kind.without


def _meant(kind: type[Part], name: str) -> str | None:
    """The parameter whose name this is but for a slip."""
    if len(name) > MAX_NAME:
        return None
    known = {_squeezed(each): each for each in sorted(_names(kind))}
    alike = difflib.get_close_matches(_squeezed(name), known, 1, _ALIKE)
    return known[alike[0]] if alike else None


def _squeezed(name: str) -> str:
    return re.sub("[_-]", "", name.lower()).removesuffix("s")


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


class Body(Part):
    prompt_param: ClassVar[str]  # what holds the prompt


_Body = TypeVar("_Body", bound=Body)


def parse(raw: bytes, kind: type[_Body], ignored: Ignored = STRICT) -> _Body:
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
        known = {**kind.aliases, **kind.own_names}
        names = {known[name]: name for name in value if name in known}
        raise _api_error(_first_of(error), names) from None


def has_too_many_containers(raw: bytes) -> bool:
    """Counts the lists and objects of bytes that may be JSON, without parsing them."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_CONTAINERS:
        return False
    # Most may be in texts, such as programs.
    found = islice(_TO_BRACKET.finditer(raw), MAX_CONTAINERS + 1)
    return sum(match[1] is not None for match in found) > MAX_CONTAINERS


def _first_of(error: ValidationError) -> Mapping[str, Any]:
    """What is wrong with the first parameter; of one that may be a text or a list, with what it is."""
    first, *others = error.errors(include_url=False)
    if first["loc"][-1:] == ("str",) and isinstance(first["input"], list):
        alike = (other for other in others if other["loc"][: len(first["loc"]) - 1] == first["loc"][:-1])
        return next(alike, first)
    return first


def _api_error(error: Mapping[str, Any], names: Mapping[str, str]) -> ApiError:
    """`names` are a body's own for what is known here by others."""
    kind, context = str(error["type"]), error.get("ctx", {})
    reason = str(context.get("error", error["msg"])).replace("Input should", "it should")
    place = (*error["loc"], context["name"]) if "name" in context else error["loc"]
    param = _path((names.get(place[0], place[0]), *place[1:]) if place else place)
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
    # But for types that it could be of.
    parts = (part for part in location if "[" not in str(part) and part != "str")
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return shortened(path.removeprefix("."), 100) or None


def _shown(value: object) -> str:
    match value:
        case dict():
            return "{...}"
        case list():
            return "[...]"
        case _:
            return shortened(repr(value[:100] if isinstance(value, str) else value), 60)
