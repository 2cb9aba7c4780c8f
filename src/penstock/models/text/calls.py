"""How a model writes calls of tools, and its thoughts: read from its chat template, by rendering probes and looking
where their names and values come out."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, AnyStr

from penstock.errors import PenstockError
from penstock.models.text.literals import Literals

# In a literal: a call's id, a call's number, and whether a tagged value is text.
ID, INDEX, IS_TEXT = "\ue000", "\ue001", "\ue002"
ID_PATTERN, INDEX_PATTERN = "[a-zA-Z0-9_-]{1,64}", "[0-9]{1,3}"
_IDS = ("pRoBe0001", "pRoBe0002")  # some templates want nine letters and digits
_NAMES = ("prb_alpha", "prb_beta")
_ARGUMENTS = {"prb_key": "prb text", "prb_num": 7}  # in the order of their names, too
_ANSWER, _THOUGHT = "prb answer", "prb thought"
_USER = {"role": "user", "content": "prb question"}
_MARK = r"(?:<[^<>\s]+>|\[[A-Z_/]+\])"
# Python's literals, however a template quotes them, and keys without quotes beside texts with a model's own.
_PYTHON = re.compile(r"\(prb_key=.{0,8}?prb text.{0,8}?prb_num=\W{0,2}7\W{0,2}?\)", re.DOTALL)
_BARE_KEYS = re.compile(
    r"\{prb_key:(?P<quote><[^<>\s]{1,20}>)prb text(?P=quote),prb_num:(?:(?P=quote))?7(?:(?P=quote))?\}"
)

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True)
class Tags:
    """Arguments that are written one by one: what comes before a key, between it and its value, after the value. A
    value that is text is written as it is, others as JSON."""

    key: str
    value: str
    end: str


@dataclass(frozen=True)
class CallFormat:
    """Calls as literals: `opening` NAME `middle` ARGUMENTS, then `between` and the next, or `closing`."""

    opening: str
    middle: str
    closing: str
    between: str | None  # None: one call at a time
    tags: Tags | None = None  # None: arguments are a JSON object, or what comes next
    literals: Literals | None = None
    takes_text: bool = False  # the template wants arguments of past calls as text
    is_native: bool = True  # the template knows tools; else they are told in the system message
    # The template writes calls of the past; else they are a part of a message's text.
    writes_calls: bool = True

    @property
    def trigger(self) -> str:
        """The mark by which a call can be told from text; empty where a call is the whole answer."""
        found = re.match(rf"{_MARK}|[^\s{{\[]\S*?(?=\s|\{{|$)", self.opening)
        return found[0] if found else ""

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Names and arguments as a model would write them."""

        def arguments(given: Mapping[str, Any]) -> str:
            return (
                json.dumps(given, ensure_ascii=False) if self.literals is None else self.literals.write(given)
            )

        between = self.closing + self.opening if self.between is None else self.between
        return (
            self.opening
            + between.join(f"{name}{self.middle}{arguments(given)}" for name, given in calls)
            + self.closing
        )


@dataclass(frozen=True)
class ThoughtMarks:
    """What thoughts are written between."""

    opening: str
    closing: str

    def is_open_after(self, prompt: str) -> bool:
        """Whether a prompt ends within thoughts."""
        return prompt.rstrip().endswith(self.opening)


# What templates write after calls, for those who answer them.
_FOLLOWS = ("<|tool_response>",)
# For templates that say nothing of tools.
HERMES = CallFormat(
    opening='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    closing="}\n</tool_call>",
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    is_native=False,
    writes_calls=False,
)
# What a probe cannot see, by a mark of the template's source: the history is written otherwise than the answer, or
# the format is told in words.
_KNOWN: dict[str, CallFormat] = {
    "<|channel|>commentary": CallFormat(
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>", None
    ),
}
# The same where a probe found nothing: tools are told natively, calls of the past are not.
_TOLD: dict[str, CallFormat] = {
    "<|tool_call|>": CallFormat(
        '<|tool_call|>[{"name": "', '", "arguments": ', "}]", '}, {"name": "', writes_calls=False
    ),
    "List of tools: ": CallFormat(
        "<|tool_call_start|>[", "", "]<|tool_call_end|>", ", ", literals=Literals(), writes_calls=False
    ),
}
_KNOWN_THOUGHTS = {"<|channel|>analysis": ThoughtMarks("<|channel|>analysis<|message|>", "<|end|>")}
HERMES_TOOLS = (
    "You may call functions. These are their names, what they do, and their parameters as JSON schemas:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, write its name and arguments as JSON, in this form, and end your turn:\n"
    '<tool_call>\n{{"name": NAME, "arguments": {{...}}}}\n</tool_call>\n'
    "What it returns comes in <tool_response></tool_response>."
)


def read_format(source: str, render: Render, ends: Sequence[str] = ()) -> CallFormat:
    """The format in which a template writes calls; `ends` are the texts of tokens that end an answer."""
    for mark, known in _KNOWN.items():
        if mark in source:
            return known
    for takes_text in (False, True):
        try:
            if (found := _read(render, ends, takes_text)) is not None:
                return found
        except PenstockError:  # a template that cannot take such messages
            continue
    return next((known for mark, known in _TOLD.items() if mark in source), HERMES)


def read_thoughts(source: str, render: Render) -> ThoughtMarks | None:
    """The marks of thoughts, where a template knows of them."""
    for mark, known in _KNOWN_THOUGHTS.items():
        if mark in source:
            return known
    try:
        text = render([_USER, {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}], ())
    except PenstockError:
        text = ""
    found = re.search(rf"({_MARK})\s*{_THOUGHT}\s*({_MARK})", text)
    if found:
        return ThoughtMarks(found[1], found[2])
    return ThoughtMarks("<think>", "</think>") if "</think>" in source else None


def overlap(text: AnyStr, mark: AnyStr) -> int:
    """How much at the end of a text may be the beginning of a mark."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


def _tool(name: str) -> dict[str, Any]:
    properties = {"prb_key": {"type": "string"}, "prb_num": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {
        "type": "function",
        "function": {"name": name, "description": "prb tool", "parameters": parameters},
    }


def _call(index: int, takes_text: bool) -> dict[str, Any]:
    arguments = json.dumps(_ARGUMENTS) if takes_text else _ARGUMENTS
    return {
        "id": _IDS[index],
        "type": "function",
        "function": {"name": _NAMES[index], "arguments": arguments},
    }


def _read(render: Render, ends: Sequence[str], takes_text: bool) -> CallFormat | None:
    tools = [*map(_tool, _NAMES)]
    head, _, end = render([_USER, {"role": "assistant", "content": _ANSWER}], tools).rpartition(_ANSWER)

    def written(num_calls: int) -> str:
        """What the answer is, from its first letter to its last."""
        calls = [_call(index, takes_text) for index in range(num_calls)]
        text = render([_USER, {"role": "assistant", "content": "", "tool_calls": calls}], tools)
        shared = re.sub(r"[<\[][^<>\[\]\s]*$", "", _shared(head, text))  # no mark is cut
        text = text[len(shared) :].removesuffix(end)
        for each in filter(None, (*ends, *_FOLLOWS)):
            text = text.partition(each)[0]
        for each in _IDS:
            text = text.replace(each, ID)
        return text

    opening, name, rest = written(1).partition(_NAMES[0])
    one = _split(rest)
    if not name or one is None:
        return None
    between = None
    try:
        two = _split(written(2).partition(_NAMES[0])[2])
    except PenstockError:  # it refuses two calls
        two = None
    if two is not None and _NAMES[1] in two.closing:
        between, _, rest = two.closing.partition(_NAMES[1])
        last = _split(rest)
        if last is not None and last.middle != one.middle:  # calls are numbered
            one, last = _numbered(one), _numbered(last)
            between = re.sub(r"\d+", INDEX, between)
        if last is None or (last.middle, last.closing) != (one.middle, one.closing):
            between = None
        else:
            opening, between = _counted(opening, between)
    return replace(one, opening=opening.lstrip(), between=between, takes_text=takes_text)


def _shared(one: str, other: str) -> str:
    """What two texts begin with."""
    pairs = zip(one, other, strict=False)
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]


def _counted(opening: str, between: str) -> tuple[str, str]:
    """What comes before a name, with a mark where calls are counted there."""
    marked = opening.replace("0", INDEX), between.replace("1", INDEX)
    same = _shared(marked[0][::-1], marked[1][::-1])[::-1]
    if INDEX not in same:
        return opening, between
    return opening[: len(opening) - len(same)] + same, between[: len(between) - len(same)] + same


def _numbered(form: CallFormat) -> CallFormat:
    return replace(form, middle=re.sub(r"\d+", INDEX, form.middle))


def _split(text: str) -> CallFormat | None:
    """What follows a name, taken apart: arguments are found by their values. `closing` is all that comes after. The
    text is a template's, and may be anything: each step goes through it once."""
    for found in re.finditer(r"\{[^{}\[\]]*\}", text):
        try:
            if json.loads(found[0]) == _ARGUMENTS:
                return CallFormat("", text[: found.start()], text[found.end() :], None)
        except ValueError:
            continue
    if (literals := _PYTHON.search(text) or _BARE_KEYS.search(text)) is not None:
        quote = literals.groupdict().get("quote", "")
        return CallFormat(
            "", text[: literals.start()], text[literals.end() :], None, literals=Literals(quote)
        )
    head, _, rest = text.partition("prb_key")
    value_mark, _, rest = rest.partition("prb text")
    next_key, _, rest = rest.partition("prb_num")
    second_mark, found_7, tail = rest.partition("7")
    if value_mark != second_mark:
        value_mark, second_mark = value_mark.replace("true", IS_TEXT), second_mark.replace("false", IS_TEXT)
    if not found_7 or value_mark != second_mark:
        return None
    shared = _shared(next_key, tail)
    end_mark = shared[: shared.rfind(">") + 1]
    key = next_key[len(end_mark) :]
    if not end_mark or not key or not head.endswith(key):
        return None
    tags = Tags(key, value_mark, end_mark)
    return CallFormat("", head.removesuffix(key), tail[len(end_mark) :], None, tags)
