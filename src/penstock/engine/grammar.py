"""What an answer may be, as one text: a grammar in llguidance's form of Lark. Schemas, GBNF and calls of tools become
that text; what compiles it is `constraint.py`."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from penstock.engine.events import AnswerFormat, FreeText, Grammar, JsonFormat
from penstock.engine.schema_limits import check_counts, schema_text, too_deep
from penstock.errors import SettingError
from penstock.models.text.calls import (
    HERMES,
    ID,
    ID_PATTERN,
    INDEX,
    INDEX_PATTERN,
    IS_TEXT,
    CallFormat,
    ThoughtMarks,
)
from penstock.models.text.literals import Literals
from penstock.models.text.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 256 * 1024
# Between two parts of JSON: nothing, one space, or a new line and its indent. Without a bound, small models go on
# with white space for ever.
WHITESPACE = r" |\n[ \t]{0,32}"
_OPTIONS = {"whitespace_pattern": WHITESPACE, "item_separator": ",", "key_separator": ":"}
# Keywords that are not supported are errors; but not in tools, which nobody wrote for a grammar.
_STRICT = {**_OPTIONS, "lenient": False, "coerce_one_of": False}
_LENIENT = {**_OPTIONS, "lenient": True, "coerce_one_of": True}
_OPTIONS_KEY = "x-guidance"
# No text is forced into certain tokens: every token whose bytes fit is allowed.
_HEADER = '%llguidance {"no_forcing": true}\n'
_ALIKE_TO_LARK = re.compile(r"^\s*[A-Za-z_][\w.-]*\s*(\[[^\]]*\])?\s*:", re.MULTILINE)

# Where a schema has schemas in it.
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# An object that says one of these says itself what else it may have.
_OPENS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_JOINS = ("anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef")
# Formats that texts are held to. Others only say what is meant, as all do in JSON Schema unless one asks for more.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
# Of literals: a text as Python writes it, and what bounds a number.
_PYTHON_TEXT = r"""/"([^"\\\x00-\x1f]|\\[nrt"'\\])*"/ | /'([^'\\\x00-\x1f]|\\[nrt"'\\])*'/"""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SAID_ONLY = ("description", "title", "examples", "default", "$comment", "deprecated")


def grammar_text(wanted: AnswerFormat) -> str:
    """The grammar of an answer; what is too large, or no grammar, is refused."""
    if isinstance(wanted, JsonFormat):
        schema = {"type": "object"} if wanted.schema is None else wanted.schema
        return f"{_HEADER}start: {json_rule(schema)}"
    text = wanted.text
    if len(text) > MAX_GRAMMAR_BYTES:
        raise _too_large()
    if "::=" in text:
        text = _from_gbnf(text)
    elif not _ALIKE_TO_LARK.search(text):
        raise SettingError("grammar", ..., "rules of Lark ('start: ...') or of GBNF ('root ::= ...')")
    for found in re.finditer(r"%json\b\s*", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise SettingError("grammar", ..., because=f"what follows %json is no schema: {error}") from error
        if isinstance(schema, dict):
            check_counts(schema)
    return _HEADER + re.sub(r"^\s*%llguidance\b.*$", "", text, flags=re.MULTILINE)


def _too_large() -> SettingError:
    return SettingError(
        "grammar", ..., "a smaller one", because=f"it has more than {MAX_GRAMMAR_BYTES} bytes"
    )


def json_rule(schema: object, *, is_lenient: bool = False) -> str:
    """JSON of a schema, as a part of a rule."""
    schema_text(schema)
    assert isinstance(schema, dict)
    check_counts(schema)
    if _OPTIONS_KEY in schema:
        raise SettingError("json_format", ..., because=f"the schema has {_OPTIONS_KEY}: leave it out")
    try:
        closed = _closed(schema, closes=not _joins(schema), drops=_SAID_ONLY if is_lenient else ())
    except RecursionError as error:
        raise too_deep() from error
    return "%json " + json.dumps({_OPTIONS_KEY: _LENIENT if is_lenient else _STRICT, **closed})


class CallGrammar:
    """Makes grammars of answers with calls of tools, in the format of a model. `tools` are the schemas of their
    arguments, by name."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._rules = [r"TEXT: /(.|\n)*/"]
        self._names = map("part_{}".format, count())  # of rules
        self._num_bytes = 0
        self._referred: dict[int, str] = {}  # rules, by the identity of schemas that are referred to
        self._shared: dict[str, str] = {}  # rules that all tools have, by what they are for
        self._middle = form.middle + (form.literals.opening if form.literals is not None else "")
        self._arguments = {name: self._rule_of(schema) for name, schema in tools.items()}

    def grammar(
        self,
        *,
        is_required: bool,
        is_parallel: bool = True,
        thoughts: ThoughtMarks | None = None,
        is_thinking: bool = False,  # the prompt has opened thoughts
        text: AnswerFormat | None = None,  # what an answer without calls is held to
    ) -> Grammar:
        """In an answer that may be text, calls are held to from their mark on; else from the first token, or from
        the end of thoughts."""
        form, rules, free = self._form, [*self._rules], None
        more = "" if form.between is None or not is_parallel else f"({self._literal(form.between)} call)*"
        calls = [
            f"{json.dumps(name)} {self._literal(self._middle)} {rule}"
            for name, rule in self._arguments.items()
        ]
        rules += [f"call: {' | '.join(calls)}", f"after: call {more} {self._literal(form.closing)}"]
        whole = f"{self._literal(form.opening)} after"
        start = whole
        if not is_required and text is not None:
            rules.append(_renamed(text, "said"))
            start = f"said | {whole}"
        elif not is_required and form.trigger:
            free = FreeText(form.trigger, thoughts, is_thinking)
            triggered = self._until("trigger", form.trigger, rules)
            start = f"TEXT | {triggered} {self._literal(form.opening.removeprefix(form.trigger))} after"
        elif not is_required:
            free = FreeText(form.opening, thoughts, is_thinking, is_first=True)
            heads = [form.opening]
            if len(form.opening) == 1:  # as many texts begin: a name tells
                heads = [form.opening + name + self._middle for name in self._arguments]
                first = [
                    f"{json.dumps(head)} {rule}"
                    for head, rule in zip(heads, self._arguments.values(), strict=True)
                ]
                whole = f"({' | '.join(first)}) {more} {self._literal(form.closing)}"
            rules.append(f"OTHER: TEXT & ~/({'|'.join(map(_escaped, heads))})(.|\\n)*/")
            start = f"OTHER | {whole}"
        if free is None and thoughts is not None and (is_required or is_thinking):
            ended = f"{self._until('thoughts', thoughts.closing, rules)} /[ \\n]{{0,4}}/"
            rules.append(f"answer: {start}")
            opened = f"{self._literal(thoughts.opening)} {ended} answer"
            start = f"{ended} answer" if is_thinking else f"{opened} | answer"
        return Grammar("\n".join([f"start: {start}", *rules]), free)

    @property
    def special(self) -> frozenset[int]:
        """The special tokens that calls are written with."""
        form = self._form
        texts = [form.opening, form.middle, form.closing, form.between or ""]
        texts += () if form.tags is None else (form.tags.key, form.tags.value, form.tags.end)
        texts += () if form.literals is None else form.literals.quotes
        parts = (part for text in texts for part in self._tokenizer.split_special(text))
        return frozenset(part for part in parts if isinstance(part, int))

    def _literal(self, text: str) -> str:
        """A text as a part of a rule, in which special tokens are themselves and any id fits."""
        parts = []
        for part in self._tokenizer.split_special(text):
            if isinstance(part, int):
                parts.append(f"<[{part}]>")
                continue
            for piece in re.split(f"([{ID}{INDEX}])", part):
                pattern = {ID: ID_PATTERN, INDEX: INDEX_PATTERN}.get(piece)
                parts.append(f"/{pattern}/" if pattern else json.dumps(piece) if piece else "")
        return " ".join(filter(None, parts))

    def _until(self, name: str, mark: str, rules: list[str]) -> str:
        """Any text, up to a mark and with it."""
        match self._tokenizer.split_special(mark):
            case [int(), *_]:
                return f"TEXT {self._literal(mark)}"
            case [str(first), *_]:
                rules.append(f"{name}[lazy]: TEXT {json.dumps(first)}")
                return f"{name} {self._literal(mark.removeprefix(first))}"
        raise AssertionError(f"{mark!r} is no mark")

    def _rule_of(self, schema: Any) -> str:
        """A tool's arguments, which are an object; of literals without the bracket that they begin with."""
        schema_text(schema)
        kinds = schema.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise SettingError(
                "json_format", ..., because=f"arguments are an object, and not of type {kinds!r:.40}"
            )
        if self._form.tags is None and self._form.literals is None:
            return self._counted(json_rule({**schema, "type": "object"}, is_lenient=True))
        check_counts(schema)
        if self._form.tags is None:
            try:
                return self._object(schema, schema, is_outermost=True)
            except RecursionError as error:
                raise too_deep() from error
        tags, properties = self._form.tags, schema.get("properties")
        required = schema.get("required")
        units = []
        for key, value in properties.items() if isinstance(properties, dict) else ():
            unit = f"{self._literal(tags.key)} {json.dumps(key)} {self._value(value, schema)}"
            is_needed = isinstance(required, list) and key in required
            units.append(unit if is_needed else f"({unit})?")
        return " ".join(units)

    def _value(self, schema: Any, whole: Mapping[str, Any]) -> str:
        """What comes before a tagged value, it, and its end: text as it is, of other types JSON."""
        assert self._form.tags is not None
        mark, end = self._form.tags.value, self._form.tags.end
        before = self._literal(mark.replace(IS_TEXT, "true"))
        kind = schema.get("type") if isinstance(schema, dict) else None
        options = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(options, list) and options and all(isinstance(option, str) for option in options):
            return f"{before} ({' | '.join(map(json.dumps, options))}) {self._literal(end)}"
        if kind in ("integer", "number", "boolean", "null", "object", "array"):
            defined = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
            before = self._literal(mark.replace(IS_TEXT, "false"))
            value = self._counted(json_rule({**defined, **schema}, is_lenient=True))
            return f"{before} {value} {self._literal(end)}"
        return f"{before} {self._until(next(self._names), end, self._rules)}"

    def _counted(self, rule: str) -> str:
        self._num_bytes += len(rule)
        if self._num_bytes > MAX_GRAMMAR_BYTES:
            raise _too_large()
        return rule

    def _rule(self, rule: str, name: str | None = None) -> str:
        """A rule of its own: its name."""
        name = name or next(self._names)
        self._rules.append(self._counted(f"{name}: {rule}"))
        return name

    # Literals: types, names and choices are held to; bounds of numbers too, those of texts and lists are not.

    def _object(self, schema: Mapping[str, Any], whole: Any, *, is_outermost: bool = False) -> str:
        """An object in brackets: its properties in their order, those that are not required or left out."""
        form = self._literals
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict):
            properties = {}
        if not properties and not is_outermost:
            return self._any(is_object=True)
        is_python = not form.quote and not is_outermost
        equals = ": " if is_python else form.equals
        opening, closing = ("{", "}") if is_python else (form.opening, form.closing)
        opening = "" if is_outermost else opening
        first, more = '""', '""'
        for key, value in reversed(properties.items()):
            name = json.dumps(json.dumps(key) if is_python else key)
            pair = self._rule(f"{name} {json.dumps(equals)} {self._literally(value, whole)}")
            is_needed = isinstance(required, list) and key in required
            first = self._rule(f"{pair} {more}" + ("" if is_needed else f" | {first}"))
            more = self._rule(f"{json.dumps(form.comma)} {pair} {more}" + ("" if is_needed else f" | {more}"))
        return f"{json.dumps(opening)} {first} {json.dumps(closing)}"

    def _literally(self, schema: Any, whole: Any) -> str:
        """A rule for a value of a schema, which is a part of a whole that references point into."""
        form = self._literals
        if not isinstance(schema, dict):
            return self._any()
        if isinstance(reference := schema.get("$ref"), str):
            return self._reference(reference, whole)
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(options, list) and options:
            return self._one_of(self._literal(form.write(option, is_outermost=False)) for option in options)
        kinds = schema.get("type")
        several = next(
            (schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), None
        )
        if isinstance(kinds, list):
            several = [{**schema, "type": kind} for kind in kinds]
        if several:
            return self._one_of(self._literally(each, whole) for each in several)
        match kinds:
            case "integer" | "number":
                bounds = {name: value for name, value in schema.items() if name in _BOUNDS}
                return json_rule({"type": kinds, **bounds}, is_lenient=True)
            case "boolean" | "null":
                values = (True, False) if kinds == "boolean" else (None,)
                return self._one_of(json.dumps(form.write(value)) for value in values)
            case "array":
                item = self._rule(self._literally(schema.get("items"), whole))
                return f'"[" ({item} ({json.dumps(form.comma)} {item})*)? "]"'
            case "object":
                return self._object(schema, whole)
            case "string":
                return self._quoted()
        return self._any()

    def _reference(self, reference: str, whole: Any) -> str:
        """A rule for what is referred to, which may refer to itself; any value where there is none."""
        found: Any = {"$ref": reference}
        passed = set[str]()
        while isinstance(found, dict) and isinstance(found.get("$ref"), str):
            reference = found["$ref"]
            if reference in passed or not reference.startswith("#"):
                return self._any()
            passed.add(reference)
            found = whole
            for part in filter(None, reference.removeprefix("#").split("/")):
                found = found.get(part) if isinstance(found, dict) else None
        if id(found) not in self._referred:
            self._referred[id(found)] = name = next(self._names)
            self._rule(self._literally(found, whole), name)
        return self._referred[id(found)]

    @property
    def _literals(self) -> Literals:
        assert self._form.literals is not None
        return self._form.literals

    def _quoted(self) -> str:
        quote = self._literals.quote
        if "text" not in self._shared:
            text = (
                f"{self._literal(quote)} {self._until('unquoted', quote, self._rules)}"
                if quote
                else _PYTHON_TEXT
            )
            self._shared["text"] = self._rule(text)
        return self._shared["text"]

    def _any(self, *, is_object: bool = False) -> str:
        """Any value, or any object."""
        form = self._literals
        if "object" not in self._shared:
            self._shared |= {"object": next(self._names), "value": next(self._names)}
            value, comma = self._shared["value"], json.dumps(form.comma)
            key = (
                f"/[A-Za-z_][A-Za-z0-9_]*/ {json.dumps(form.equals)}"
                if form.quote
                else f'{self._quoted()} ": "'
            )
            self._rule(f'"{{" ({key} {value} ({comma} {key} {value})*)? "}}"', self._shared["object"])
            plain = self._literally({"type": ["string", "number", "boolean", "null"]}, None)
            self._rule(f'{plain} | {self._shared["object"]} | "[" ({value} ({comma} {value})*)? "]"', value)
        return self._shared["object" if is_object else "value"]

    @staticmethod
    def _one_of(rules: Iterable[str]) -> str:
        return f"({' | '.join(rules)})"


def after_thoughts(wanted: AnswerFormat, thoughts: ThoughtMarks, tokenizer: Tokenizer) -> Grammar:
    """The same answer, after thoughts that the prompt has opened."""
    rules = CallGrammar(HERMES, {}, tokenizer)
    ended = rules._until("thoughts", thoughts.closing, rules._rules)
    answer = _renamed(wanted, "answer")
    return Grammar("\n".join([f"start: {ended} /[ \\n]{{0,4}}/ answer", answer, *rules._rules]))


def _renamed(wanted: AnswerFormat, name: str) -> str:
    """The rules of an answer, of which the first has another name."""
    return re.sub(r"^start\b", name, grammar_text(wanted).removeprefix(_HEADER), flags=re.MULTILINE)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(text)
    except Exception as error:  # it is a stranger's text, and a converter that is small
        line = " ".join(str(error).split())[:200]
        raise SettingError("grammar", ..., because=f"it is no GBNF: {line}") from error
    return lark


def _parts(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Each keyword that holds schemas, and a list of them."""
    parts: list[tuple[str, Any]] = [
        (name, [schema[name]]) for name in _ONE if isinstance(schema.get(name), dict)
    ]
    parts += [(name, schema[name]) for name in _LISTS if isinstance(schema.get(name), list)]
    parts += [(name, [*schema[name].values()]) for name in _NAMED if isinstance(schema.get(name), dict)]
    return parts


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Itself, and those in it."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack += [inner for _, inners in _parts(node) for inner in inners]


def _joins(schema: dict[str, Any]) -> bool:
    """Whether some object may have to hold to several schemas at once: then no part can say what it has not."""
    return any(
        "allOf" in node or ("properties" in node and any(name in node for name in _JOINS))
        for node in _schemas(schema)
    )


def unknown_formats(schema: Any) -> list[str]:
    """Formats that its texts are not held to."""
    found = (node["format"] for node in _schemas(schema) if _has_unknown_format(node))
    return list(dict.fromkeys(found))


def _has_unknown_format(schema: Mapping[str, Any]) -> bool:
    return isinstance(schema.get("format"), str) and schema["format"] not in FORMATS


def _closed(schema: Any, *, closes: bool, drops: Sequence[str]) -> Any:
    """A copy in which objects that list properties have no others, unless they say so; without what nothing is
    held to."""
    if not isinstance(schema, dict):
        return schema

    def inner(part: Any) -> Any:
        return _closed(part, closes=closes, drops=drops)

    dropped = (*drops, "format") if _has_unknown_format(schema) else drops
    copy = {name: value for name, value in schema.items() if name not in dropped}
    for name in {*_ONE, *_LISTS, *_NAMED} & copy.keys():
        value = copy[name]
        if name in _NAMED and isinstance(value, dict):
            copy[name] = {key: inner(part) for key, part in value.items()}
        elif name in _LISTS and isinstance(value, list):
            copy[name] = [inner(part) for part in value]
        elif name in _ONE and isinstance(value, dict):
            copy[name] = inner(value)
    if closes and isinstance(copy.get("properties"), dict) and not any(name in copy for name in _OPENS):
        copy["additionalProperties"] = False
    return copy
