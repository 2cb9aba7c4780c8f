"""Arguments of calls that are nearly JSON: Python's literals, as in `(city='Bonn', days=3)`, and bare keys with a
model's own quotes, as in `{city:<|"|>Bonn<|"|>,days:3}`."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_TOKEN = re.compile(
    r"""[\[\]{}(),:=] | "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | [^\s\[\]{}(),:="']+""", re.X | re.S
)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_CLOSING = {"(": ")", "{": "}", "[": "]"}
Token = tuple[bool, str]  # whether it is a text, and what it is


@dataclass(frozen=True)
class Literals:
    """How values are written. Without a `quote` of their own they are Python's, and the brackets round ones."""

    quote: str = ""

    @property
    def opening(self) -> str:
        return "{" if self.quote else "("

    @property
    def closing(self) -> str:
        return _CLOSING[self.opening]

    @property
    def equals(self) -> str:
        """Between a key and its value."""
        return ":" if self.quote else "="

    @property
    def comma(self) -> str:
        return "," if self.quote else ", "

    @property
    def quotes(self) -> tuple[str, ...]:
        return (self.quote,) if self.quote else ('"', "'")

    def read(self, text: str) -> dict[str, Any]:
        """Arguments, with their brackets."""
        try:
            (value,) = _values(iter([*self._tokens(text), (False, ")")]), ")")
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(value, dict):
            raise ValueError("arguments have names")
        return value

    def write(self, value: Any, *, is_outermost: bool = True) -> str:
        def inner(part: Any) -> str:
            return self.write(part, is_outermost=False)

        match value:
            case str() if self.quote:
                return self.quote + value + self.quote
            case Mapping() if is_outermost or self.quote:
                pairs = (f"{key}{self.equals}{inner(part)}" for key, part in value.items())
                return self.opening + self.comma.join(pairs) + self.closing
            case Mapping():
                return (
                    "{" + ", ".join(f"{json.dumps(key)}: {inner(part)}" for key, part in value.items()) + "}"
                )
            case list():
                return "[" + self.comma.join(map(inner, value)) + "]"
            case bool() | None if not self.quote:
                return str(value)
        return json.dumps(value, ensure_ascii=False)

    def _tokens(self, text: str) -> Iterator[Token]:
        for index, part in enumerate(text.split(self.quote) if self.quote else [text]):
            if index % 2:
                yield True, part
                continue
            for token in _TOKEN.findall(part):
                is_text = token[0] in "\"'"
                yield is_text, _unescaped(token[1:-1]) if is_text else token


def _unescaped(text: str) -> str:
    def meant(found: re.Match[str]) -> str:
        what = found[1]
        return chr(int(what[1:], 16)) if len(what) > 1 else _ESCAPED.get(what, what)

    return _ESCAPE.sub(meant, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _values(tokens: Iterator[Token], closing: str) -> list[Any]:
    """Values up to a bracket; where they have names, all of them are one object."""
    found: list[Any] = []
    named: dict[str, Any] = {}
    key: str | None = None
    for is_text, token in tokens:
        value: Any = token
        if not is_text:
            if token == closing:
                return [named] if named else found
            if token in (":", "="):
                if not found:
                    raise ValueError("a value without a name")
                key = str(found.pop())
                continue
            if token == ",":
                continue
            if token in _CLOSING:
                inner = _values(tokens, _CLOSING[token])
                is_object = token != "[" and (not inner or isinstance(inner[0], dict))
                value = (inner[0] if inner else {}) if is_object else inner
            elif token in _CLOSING.values():
                raise ValueError(f"{token} closes nothing")
            else:
                value = _word(token)
        if key is None:
            found.append(value)
        else:
            named[key], key = value, None
    raise ValueError(f"there is no {closing}")


def _word(token: str) -> Any:
    if token in _WORDS:
        return _WORDS[token]
    try:
        return read_json(token)
    except ValueError:
        return token


def read_json(text: str) -> Any:
    """A value that can be written as JSON again: numbers are numbers, and those beyond the largest are that one."""
    return json.loads(text, parse_float=_finite, parse_constant=_refused)


def _finite(text: str) -> float:
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _refused(word: str) -> float:
    raise ValueError(f"{word} is no JSON")
