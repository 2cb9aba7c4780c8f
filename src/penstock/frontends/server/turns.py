"""An answer's text, as it comes, taken apart: thoughts, text, and calls of tools. What an API calls them is another
file's."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from penstock.models.text.calls import (
    ID,
    ID_PATTERN,
    INDEX,
    INDEX_PATTERN,
    IS_TEXT,
    CallFormat,
    ThoughtMarks,
    overlap,
)
from penstock.models.text.literals import Literals, read_json

# A name is not longer; what is, is text.
_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """`index` counts the calls of an answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments' JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    index: int


Piece = Thought | Text | CallBegun | CallArguments | CallEnded


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""
    is_whole: bool = False


@dataclass
class Turn:
    """An answer as far as it has come. A call that was cut is not whole."""

    thought: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        match piece:
            case Thought(text):
                self.thought += text
            case Text(text):
                self.text += text
            case CallBegun(_, name_id, name):
                self.calls.append(Call(name_id, name))
            case CallArguments(index, text):
                self.calls[index].arguments += text
            case CallEnded(index):
                self.calls[index].is_whole = True

    @property
    def whole_calls(self) -> list[Call]:
        return [call for call in self.calls if call.is_whole]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex[:24]}"


class TurnParser:
    """Takes text in pieces of any length. Without a format nothing is a call, without marks nothing a thought.

    `schemas` are those of the tools' arguments: values that are written as text are of the types that they say."""

    def __init__(
        self,
        form: CallFormat | None = None,
        thoughts: ThoughtMarks | None = None,
        *,
        is_thinking: bool = False,
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        self._form = form
        self._thoughts = thoughts
        self._schemas = schemas or {}
        self._state = self._think if is_thinking else self._begin
        self._left = ""  # of what came, not yet known to be something
        self._num_calls = 0
        self._num_values = 0  # of the call at hand, where values come one by one
        self._key: str | None = None  # of the value at hand
        self._searched = 0  # where its end may begin in what is left
        self._is_told = False  # its beginning is
        self._scan = _Scan(None)
        self._written = ""  # of the call at hand, its arguments
        self._is_over = False  # no more text comes
        self._strips = True  # white space at the beginning of thoughts and texts is the format's
        self._next = self._head = self._ends = _NEVER
        if form is not None:
            ends = [_lenient(mark) for mark in (form.closing, form.between) if mark]
            self._ends = re.compile("|".join(ends)) if ends else _NEVER
            follows = r"\s*[{]" if form.literals is None else re.escape(form.literals.opening)
            if form.tags is not None:
                follows = "|".join([_lenient(form.tags.key), *ends])
            after = f"{_lenient(form.middle)}(?={follows})"
            self._head = _begins(form.opening, after)
            self._next = _NEVER if form.between is None else _begins(form.between, after)

    @property
    def is_thinking(self) -> bool:
        return self._state == self._think

    def push(self, text: str) -> list[Piece]:
        """What is known by this text."""
        self._left += text
        return [*self._pieces()]

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """What is left when no more will come. Of a call that was cut before its name was known, nothing is."""
        self._is_over = True
        if is_cut and self._state == self._call and self._form is not None and self._form.trigger:
            self._left = ""
        return [*self._pieces()]

    def _pieces(self) -> Iterator[Piece]:
        before = None
        while self._left and before != (self._state, self._left):
            before = (self._state, self._left)
            yield from self._state()

    # Each state takes from what is left; one that takes nothing and stays waits for more.

    def _begin(self) -> Iterator[Piece]:
        """Before the first letter: thoughts may be opened."""
        mark = "" if self._thoughts is None else self._thoughts.opening
        text = self._left.lstrip()
        if mark and text.startswith(mark):
            self._left = text[len(mark) :]
            self._state = self._think
        elif self._is_over or not (mark.startswith(text) if mark else not text):
            form = self._form
            is_call = form is not None and not form.trigger and text.startswith(form.opening[:1])
            self._strips = form is not None or bool(mark)
            self._left = text if self._strips else self._left
            self._state = self._call if is_call else self._say
        yield from ()

    def _think(self) -> Iterator[Piece]:
        assert self._thoughts is not None
        text, is_found = self._up_to(self._thoughts.closing)
        if self._strips:
            text = text.lstrip()
        if is_found:
            text = text.rstrip()
        elif not self._is_over and (kept := len(text) - len(text.rstrip())):
            self._left = text[-kept:] + self._left  # white space at the end may be the format's
            text = text[:-kept]
        if text:
            self._strips = False
            yield Thought(text)
        if is_found:
            self._left = self._left.lstrip() if self._left.strip() else self._left
            self._state = self._begin

    def _say(self) -> Iterator[Piece]:
        trigger = self._form.trigger if self._form is not None else ""
        text, is_found = self._up_to(trigger) if trigger else (self._left, False)
        if not trigger:
            self._left = ""
        if is_found:
            self._left = trigger + self._left
            self._state = self._call
            text = text.rstrip()
        elif trigger and not self._is_over and (kept := len(text) - len(text.rstrip())):
            self._left = text[-kept:] + self._left
            text = text[:-kept]
        if text:
            yield Text(text)

    def _call(self) -> Iterator[Piece]:
        """A call begins: up to its name and what follows it."""
        yield from self._name(self._head)

    def _name(self, pattern: re.Pattern[str]) -> Iterator[Piece]:
        found = pattern.match(self._left)
        assert self._form is not None
        is_known = found is None or not self._schemas or found["name"] in self._schemas
        if found is not None and (is_known or self._form.trigger):
            self._left = self._left[found.end() :]
            yield CallBegun(self._num_calls, new_id("call"), found["name"])
            self._tool = found["name"]
            self._scan, self._num_values, self._key, self._written = _Scan(self._form.literals), 0, None, ""
            self._is_told = False
            self._state = self._arguments if self._form.tags is None else self._values
        elif self._is_over or not is_known or len(self._left) > len(pattern.pattern) + _MAX_NAME:
            text, self._left = self._left, ""
            self._form, self._state = None, self._say  # it is none
            yield Text(text)

    def _arguments(self) -> Iterator[Piece]:
        assert self._form is not None
        end = self._scan.push(self._left)
        text, self._left = (self._left, "") if end is None else (self._left[:end], self._left[end:])
        self._written += text
        literals = self._form.literals
        if literals is None:
            yield CallArguments(self._num_calls, text)
        if end is None:
            return
        try:
            if literals is None:
                read_json(self._written)
            else:
                given = literals.read(self._written)
                told = json.dumps({key: self._unquoted(key, value) for key, value in given.items()})
                yield CallArguments(self._num_calls, told)
        except (ValueError, RecursionError):  # it never becomes whole
            self._form, self._state = None, self._say
            return
        yield from self._end()

    def _values(self) -> Iterator[Piece]:
        assert self._form is not None
        assert self._form.tags is not None
        tags = self._form.tags
        if self._key is None:
            self._left = self._left.lstrip()
            pattern = f"{_lenient(tags.key.strip())}(.*?){_lenient(tags.value.rstrip())}"
            found = re.match(pattern, self._left, re.DOTALL)
            if found is not None:
                self._key, self._left, self._searched = found[1], self._left[found.end() :], 0
            elif self._ends.match(self._left):
                yield CallArguments(self._num_calls, "}" if self._num_values else "{}")
                yield from self._end()
            return
        # White space of the marks is not the value's; the rest of it is.
        mark, before = tags.end.strip(), tags.value[len(tags.value.rstrip()) :]
        after = tags.end[: len(tags.end) - len(tags.end.lstrip())]
        place = self._left.find(mark, self._searched)
        is_text, is_whole = self._kind(self._key) == "string", place >= 0
        if is_whole:
            text, self._left = self._left[:place].removesuffix(after), self._left[place + len(mark) :]
        elif is_text:  # it may be a whole file: it is told as it comes
            place = len(self._left) - max(overlap(self._left, after + mark), overlap(self._left, mark))
            if place <= (0 if self._is_told else len(before)):
                return
            text, self._left = self._left[:place], self._left[place:]
        else:
            self._searched = max(len(self._left) - len(mark) + 1, 0)
            return
        told = ""
        if not self._is_told:
            told = f"{', ' if self._num_values else '{'}{json.dumps(self._key)}: "
            text = text.removeprefix(before)
        if is_text:
            quotes = ("" if self._is_told else '"', '"' if is_whole else "")
            told += json.dumps(text)[1:-1].join(quotes)
        else:
            told += json.dumps(self._typed(self._key, text))
        self._is_told = not is_whole
        if is_whole:
            self._num_values, self._key = self._num_values + 1, None
        yield CallArguments(self._num_calls, told)

    def _kind(self, key: str) -> Any:
        """The type of an argument, by its schema."""
        schema = self._schemas.get(self._tool)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        own = properties.get(key) if isinstance(properties, Mapping) else None
        return own.get("type") if isinstance(own, Mapping) else None

    def _typed(self, key: str, text: str) -> Any:
        """A value that was written as text: JSON, unless its schema says that it is text, or it is none."""
        if self._kind(key) == "string":
            return text
        try:
            return read_json(text)
        except (ValueError, RecursionError):
            return {"True": True, "False": False, "None": None}.get(text, text)

    def _unquoted(self, key: str, value: Any) -> Any:
        """A literal; one in quotes that is to be none is what it says."""
        is_quoted = isinstance(value, str) and self._kind(key) in ("integer", "number", "boolean", "null")
        return self._typed(key, value) if is_quoted else value

    def _end(self) -> Iterator[Piece]:
        yield CallEnded(self._num_calls)
        self._num_calls += 1
        self._state = self._after

    def _after(self) -> Iterator[Piece]:
        """A call has ended: another follows, or the calls are over."""
        assert self._form is not None
        if self._next.match(self._left):
            yield from self._name(self._next)
            return
        closing = re.match(_lenient(self._form.closing), self._left)
        longest = len(self._next.pattern) + _MAX_NAME
        if self._is_over or len(self._left) > longest:
            self._left = self._left[closing.end() if closing else 0 :].lstrip() if closing else ""
            self._form = self._form if self._left else None
            self._state = self._say
        yield from ()

    def _up_to(self, mark: str) -> tuple[str, bool]:
        """What comes before a mark, which is taken; without it, all that cannot be its beginning."""
        text, found, rest = self._left.partition(mark)
        if found:
            self._left = rest
            return text, True
        num_kept = 0 if self._is_over else overlap(self._left, mark)
        text, self._left = self._left[: len(self._left) - num_kept], self._left[len(self._left) - num_kept :]
        return text, False


_NEVER = re.compile(r"(?!)")


def _lenient(literal: str) -> str:
    """A pattern for a literal: white space may differ, an id and a number be any."""
    pattern = re.sub(r"(?:\\?\s)+", r"\\s*", re.escape(literal))
    pattern = pattern.replace(ID, f"(?:{ID_PATTERN})").replace(INDEX, INDEX_PATTERN)
    return pattern.replace(IS_TEXT, "(?:true|false)")


def _begins(before: str, after: str) -> re.Pattern[str]:
    return re.compile(f"{_lenient(before)}(?P<name>[^\\s\"'<>{{}}\\[\\]()]+?){after}")


class _Scan:
    """Looks for the end of a value that begins with a bracket, in text that comes in pieces: of JSON, or of literals
    with other quotes."""

    def __init__(self, literals: Literals | None) -> None:
        self._quotes = ('"',) if literals is None else literals.quotes
        self._escapes = r"\\.|" if max(map(len, self._quotes)) == 1 else ""
        self._outside = re.compile("|".join([*map(re.escape, self._quotes), r"[\[\]{}()]"]))
        self._pattern = self._outside
        self._depth = 0
        self._left = ""  # what may be the beginning of a quote, or of what is escaped

    def push(self, text: str) -> int | None:
        """Where in this piece the value has ended."""
        before, text, place = len(self._left), self._left + text, 0
        while found := self._pattern.search(text, place):
            place, what = found.end(), found[0]
            if what in self._quotes and self._pattern is self._outside:
                self._pattern = re.compile(self._escapes + re.escape(what), re.DOTALL)
            elif what in self._quotes:
                self._pattern = self._outside
            elif self._pattern is self._outside:
                self._depth += 1 if what in "{[(" else -1
                if not self._depth:
                    return place - before
        longest = max(*map(len, self._quotes), 2) - 1
        self._left = text[max(place, len(text) - longest) :]
        return None
