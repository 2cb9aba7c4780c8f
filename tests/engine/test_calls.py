"""A grammar of the format that a template writes calls in allows just those, from where an answer is held to it."""

import string
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from penstock.engine.constraint import NUM_KEPT, Constraint, ConstraintFactory
from penstock.engine.events import FreeText, Grammar, JsonFormat
from penstock.engine.grammar import CallGrammar, after_thoughts, grammar_text
from penstock.errors import SettingError
from penstock.models.text.calls import HERMES, CallFormat, Tags, ThoughtMarks
from penstock.models.text.chat import ChatTemplate
from penstock.models.text.literals import Literals
from penstock.models.text.tokenizer import SpecialTokens, Tokenizer
from tests.byte_models import byte_backend
from tests.models.call_templates import MAIL, TEMPLATES, WEATHER

SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, MAIL)}
# Special in some vocabularies, text in others.
MARKS = ["[TOOL_CALLS]", "<｜calls▁begin｜>", "<tool_call>", "<|section_begin|>"]


def format_of(family: str) -> CallFormat:
    return ChatTemplate(TEMPLATES[family][0], {}).calls


def vocabulary(specials: list[str]) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_backend().to_str())
    backend.add_special_tokens([AddedToken(name, special=True) for name in ["</s>", *specials]])
    return Tokenizer(backend, SpecialTokens((256,)), None)


def allows(tokenizer: Tokenizer, grammar: Grammar, text: str, *, ends: bool = True) -> bool:
    """Whether an answer may be this text, and end there."""
    constraint = ConstraintFactory(tokenizer, tokenizer.vocab_size, frozenset([256])).new(grammar)
    try:
        for token in tokenizer.encode(text, add_special_tokens=False):
            constraint.accept(token)
        if ends and not constraint.is_finished:
            constraint.accept(256)
    except SettingError:
        return False
    return True


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_grammar_allows_calls_and_nothing_else(family: str, is_special: bool) -> None:
    form, (_, one, two) = format_of(family), TEMPLATES[family]
    tokenizer = vocabulary(
        [mark for mark in MARKS if mark in one and family != "hermes"] if is_special else []
    )
    rules = CallGrammar(form, SCHEMAS, tokenizer)
    assert bool(rules.special) == (is_special and any(mark in one for mark in MARKS) and family != "hermes")
    required, auto = rules.grammar(is_required=True), rules.grammar(is_required=False)
    single = rules.grammar(is_required=True, is_parallel=False)
    named = CallGrammar(form, {"mail": SCHEMAS["mail"]}, tokenizer).grammar(is_required=True)
    for grammar in (required, auto, single):
        assert allows(tokenizer, grammar, one)
        if grammar is not auto or family != "pythonic":  # which is text where it names no tool
            assert not allows(tokenizer, grammar, one.replace("weather", "weatherx"))
        assert not allows(tokenizer, grammar, one.replace("3", '"x"'))
        assert not allows(tokenizer, grammar, one[:-1])
        assert not allows(tokenizer, grammar, one + " and more")
    assert not allows(tokenizer, named, one)
    if two is not None:
        assert allows(tokenizer, required, two)
        assert allows(tokenizer, auto, two)
        assert not allows(tokenizer, single, two)
    assert allows(tokenizer, auto, 'Well, {"a": 1}: it < rains.')
    assert not allows(tokenizer, required, "Well")
    if form.trigger:
        assert allows(tokenizer, auto, "I look. " + one)


@pytest.mark.parametrize("opens", ["", "<think>"])
@pytest.mark.parametrize("is_special", [False, True])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_grammar_that_is_free_up_to_a_mark_allows_the_same_before_it(
    is_special: bool, opens: str, data: st.DataObject
) -> None:
    """Whether it is held to from the first token, or only where a mark may have begun."""
    tokenizer = vocabulary(["<tool_call>", "<think>"] if is_special else [])
    marks = ThoughtMarks("<think>", "</think>")
    late = CallGrammar(HERMES, SCHEMAS, tokenizer).grammar(is_required=False, thoughts=marks)
    assert late.free is not None
    factory = ConstraintFactory(tokenizer, tokenizer.vocab_size, frozenset([256]))
    free, held = factory.new(late), factory.new(Grammar(late.text))
    for token in tokenizer.encode(opens and f"{opens}<tool_call> no </think>", add_special_tokens=False):
        free.accept(token)
    call, logits = TEMPLATES["hermes"][1], torch.zeros(tokenizer.vocab_size)
    letters = tokenizer.encode(string.printable, add_special_tokens=False)
    texts = st.text(alphabet="a <\ntol_", max_size=12) | st.integers(1, len(call)).map(lambda end: call[:end])
    for token in tokenizer.encode("".join(data.draw(st.lists(texts, max_size=4))), add_special_tokens=False):
        allowed = held.mask(logits)
        if free.is_holding:
            assert torch.equal(free.mask(logits), allowed)
        assert free.is_holding or allowed[letters].isfinite().all()
        if allowed[token] != 0:
            return
        free.accept(token)
        held.accept(token)
        assert free.is_finished == held.is_finished
        if free.is_finished:
            return


NESTED: dict[str, Any] = {
    "type": "object",
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    "properties": {
        "kind": {"enum": ["a", 2, None]},
        "points": {"type": "array", "items": {"$ref": "#/$defs/point"}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer", "maximum": 9},
        "rest": {"type": "object"},
        "loop": {"$ref": "#"},
    },
    "required": ["points"],
}


@pytest.mark.parametrize("literals", [Literals(), Literals('<|"|>')])
def test_literals_are_held_to_schemas(literals: Literals) -> None:
    form, tokenizer = CallFormat("<call>", "", "</call>", "&", literals=literals), vocabulary([])
    required = CallGrammar(form, {"f": NESTED}, tokenizer).grammar(is_required=True)
    good: list[dict[str, Any]] = [
        {"points": []},
        {"kind": None, "points": [{"x": 1.5}, {"x": 2}], "count": 9},
        {"points": [], "maybe": None, "rest": {"a": [1, {"b": "c"}]}, "loop": {"points": [{"x": 0}]}},
    ]
    bad: list[dict[str, Any]] = [
        {},
        {"kind": "b", "points": []},
        {"points": [{}]},
        {"points": [], "count": 10},
        {"points": [], "other": 1},
        {"points": [], "loop": {}},
    ]
    for arguments in (*good, *bad):
        assert allows(tokenizer, required, form.write([("f", arguments)])) == (arguments in good), arguments


def test_thoughts_come_before_calls() -> None:
    marks, tokenizer = ThoughtMarks("<think>", "</think>"), vocabulary([])
    rules, call = CallGrammar(HERMES, SCHEMAS, tokenizer), TEMPLATES["hermes"][1]
    opened = rules.grammar(is_required=True, thoughts=marks, is_thinking=True)
    assert allows(tokenizer, opened, "a <tool_call> b\n</think>\n\n" + call)
    assert not allows(tokenizer, opened, call)
    maybe = rules.grammar(is_required=True, thoughts=marks)
    assert allows(tokenizer, maybe, "<think>a</think>\n" + call)
    assert allows(tokenizer, maybe, call)
    assert not allows(tokenizer, maybe, "<think>a</think>\nNo.")
    auto = rules.grammar(is_required=False, thoughts=marks, is_thinking=True)
    assert allows(tokenizer, auto, "a <tool_call> b</think>\nNo.")


THINK = ThoughtMarks("<think>", "</think>")
NUMBERS = JsonFormat({"type": "array", "items": {"type": "integer"}})


def test_text_that_is_held_to_a_format_comes_in_place_of_calls() -> None:
    tokenizer, call = vocabulary([]), TEMPLATES["hermes"][1]
    rules = CallGrammar(HERMES, SCHEMAS, tokenizer)
    either = rules.grammar(is_required=False, text=NUMBERS)
    assert either.free is None
    allowed = [allows(tokenizer, either, text) for text in ("[1,2]", call, "Well", '["a"]')]
    assert allowed == [True, True, False, False]
    assert not allows(tokenizer, rules.grammar(is_required=True, text=NUMBERS), "[1,2]")
    opened = rules.grammar(is_required=False, text=NUMBERS, thoughts=THINK, is_thinking=True)
    assert allows(tokenizer, opened, "hm</think>\n[1]")
    assert not allows(tokenizer, opened, "[1]")
    unopened = rules.grammar(is_required=False, text=NUMBERS, thoughts=THINK)
    assert allows(tokenizer, unopened, "[1]")
    assert not allows(tokenizer, unopened, "<think>hm</think>[1]")


@pytest.mark.parametrize("is_special", [False, True])
def test_an_answer_is_held_to_its_format_after_thoughts(is_special: bool) -> None:
    tokenizer = vocabulary(["</think>"] if is_special else [])
    grammar = after_thoughts(NUMBERS, THINK, tokenizer)
    for text, is_allowed in (
        ("so [x]</think>[1]", True),
        ("</think>\n\n\n\n[1]", True),
        ("</think>\n\n\n\n\n[1]", False),
        ("[1]", False),
        ("so</think>Well", False),
    ):
        assert allows(tokenizer, grammar, text) == is_allowed, text


TAGGED = CallFormat("<call>", ">", "</call>", None, tags=Tags("<key>", "=", "</key>"))
TAGGED_SCHEMA: dict[str, Any] = {
    "$defs": {"few": {"type": "integer", "maximum": 3}},
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["a", "b"]},
        "mixed": {"enum": ["a", 1]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/few"}},
        "some": True,
    },
    "required": ["text"],
}


def test_tagged_arguments_are_text_or_json_as_their_schema_says() -> None:
    tokenizer = vocabulary([])
    grammar = CallGrammar(TAGGED, {"f": TAGGED_SCHEMA, "g": {}}, tokenizer).grammar(is_required=True)
    text = "<key>text=any < {</key>"
    for arguments, is_allowed in (
        (text, True),
        ("", False),
        (text + "<key>kind=b</key>", True),
        (text + "<key>kind=c</key>", False),
        (text + "<key>mixed=anything</key>", True),
        (text + "<key>list=[1,3]</key>", True),
        (text + "<key>list=[4]</key>", False),
        (text + "<key>list=x</key>", False),
        (text + "<key>some=x</key>", True),
        (text + "<key>other=x</key>", False),
        ("<key>kind=b</key>" + text, False),
    ):
        assert allows(tokenizer, grammar, f"<call>f>{arguments}</call>") == is_allowed, arguments
    assert allows(tokenizer, grammar, "<call>g></call>")


@pytest.mark.parametrize("literals", [Literals(), Literals('<|"|>')])
def test_literals_of_every_kind_of_schema(literals: Literals) -> None:
    form, tokenizer = CallFormat("<call>", "", "</call>", None, literals=literals), vocabulary([])
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(12):
        deep = {"type": "array", "items": deep}
    cases: list[tuple[Any, list[Any], list[Any]]] = [
        ({"type": "string"}, ["", "a b"], [1, None]),
        ({"type": "boolean"}, [True, False], [None, 1, "True"]),
        ({"type": "null"}, [None], [False]),
        ({"type": ["integer", "null"]}, [3, None], ["x", 1.5]),
        ({"type": "number", "exclusiveMinimum": 1, "multipleOf": 2}, [2, 4], [1, 3, "x"]),
        ({"const": 5}, [5], [6, None]),
        ({"enum": []}, [1, "x", [None]], []),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["x", 1], [None, []]),
        ({"$ref": "#/$defs/none"}, [1, "x"], []),
        (True, [1, "x", {"a": 1}, [True, {"b": None}]], []),
        ({"type": "array"}, [[], [1], [1, "x", [None]]], [{}, 1]),
        ({"type": "array", "items": {"type": "integer"}}, [[], [1], [1, 2, 3]], [["x"], [1, "x"]]),
        ({"type": "object"}, [{}, {"a": 1}, {"a": 1, "b": {"c": []}}], [[], 1]),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}},
            [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
            [1],
        ),
        (deep, [[[[]]], [[[[[[[[["x"]]]]]]]]]], ["x", [["x"]]]),
    ]
    for schema, good, bad in cases:
        whole = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
        grammar = CallGrammar(form, {"f": whole}, tokenizer).grammar(is_required=True)
        for number, value in enumerate((*good, *bad)):
            text = form.write([("f", {"v": value})])
            assert allows(tokenizer, grammar, text) == (number < len(good)), (schema, text)
    no_arguments = CallGrammar(form, {"f": {"type": "object"}}, tokenizer).grammar(is_required=True)
    assert allows(tokenizer, no_arguments, form.write([("f", {})]))
    assert not allows(tokenizer, no_arguments, form.write([("f", {"v": 1})]))


def test_tools_with_too_many_values_are_refused() -> None:
    form = CallFormat("<call>", "", "</call>", None, literals=Literals())
    schemas = {
        f"f{tool}": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(500)}}
        for tool in range(11)
    }
    CallGrammar(form, dict([*schemas.items()][:10]), vocabulary([]))
    with pytest.raises(SettingError, match="too many values"):
        CallGrammar(form, schemas, vocabulary([]))


def holding(constraint: Constraint, tokenizer: Tokenizer, text: str) -> str:
    """Of each token of a text, whether the one after it is held to the grammar."""
    marks = ""
    for token in tokenizer.encode(text, add_special_tokens=False):
        constraint.accept(token)
        marks += "-#"[constraint.is_holding]
    return marks


@pytest.mark.parametrize(
    ("free", "text", "expected"),
    [
        (FreeText("<x>"), "a<x>b", "-####"),
        (FreeText("<x>"), "<<x>b", "#####"),
        (FreeText("<x>"), "<a<x", "#-##"),
        (FreeText("<x>", is_first=True), "  <x>b", "--####"),
        (FreeText("<x>", is_first=True), "a<x>b", "-----"),
        (FreeText("<x>", THINK), "<x>", "###"),
        (FreeText("<x>", THINK), "<think><x></think><x>", "#-" + "-" * 16 + "###"),
        (FreeText("<x>", THINK), "a<think><x>", "-#------###"),
        (FreeText("<x>", THINK, is_thinking=True), "<x></think><x>", "-----------###"),
    ],
)
def test_an_answer_is_held_where_a_mark_may_have_begun(free: FreeText, text: str, expected: str) -> None:
    """Not within thoughts, nor behind the place where a mark could have been."""
    tokenizer = vocabulary([])
    factory = ConstraintFactory(tokenizer, tokenizer.vocab_size, frozenset([256]))
    constraint = factory.new(Grammar(r"start: /(.|\n)*/", free))
    assert not constraint.is_holding
    assert holding(constraint, tokenizer, text) == expected


def test_a_grammar_that_nobody_can_follow_is_not_held_to_where_nobody_waited_for_it() -> None:
    tokenizer = vocabulary([])
    factory = ConstraintFactory(tokenizer, tokenizer.vocab_size, frozenset([256]))
    bad = Grammar("start: /(/", FreeText("<x>"))
    assert holding(factory.new(bad), tokenizer, "a<x>b") == "-----"
    assert isinstance(factory.compile_later(bad).exception(10), SettingError)
    with pytest.raises(SettingError):
        factory.new(Grammar("start: /(/"))
    other = factory.new(Grammar('start: "y"', FreeText("<x>")))  # which the mark does not fit
    assert holding(other, tokenizer, "<x>") == "---"


def test_the_last_grammars_are_kept_compiled() -> None:
    tokenizer = vocabulary([])
    factory = ConstraintFactory(tokenizer, tokenizer.vocab_size, frozenset([256]))
    grammars = [Grammar(f'start: "{number}"') for number in range(NUM_KEPT + 1)]
    first = factory.compile_later(grammars[0])
    for grammar in grammars[1:NUM_KEPT]:
        factory.new(grammar)
    assert factory.compile_later(grammars[0]) is first  # and is the last to be used now
    second = factory.compile_later(grammars[1])
    factory.compile_later(grammars[NUM_KEPT])
    assert factory.compile_later(grammars[0]) is first
    assert factory.compile_later(grammars[1]) is second
    assert factory.compile_later(grammars[NUM_KEPT]).result(10) is not None


def test_schemas_of_tools_were_not_written_for_a_grammar() -> None:
    """What is refused in a format that somebody asked for is taken as well as it can be."""
    tokenizer = vocabulary([])
    overlapping = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
    schema = {"type": "object", "properties": {"a": overlapping}, "required": ["a"], "description": "a" * 99}
    grammar = CallGrammar(HERMES, {"f": schema}, tokenizer).grammar(is_required=True)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
    assert allows(tokenizer, grammar, call)
    assert "a" * 99 not in grammar.text
    with pytest.raises(SettingError, match="oneOf"):
        allows(tokenizer, Grammar(grammar_text(JsonFormat(schema))), "")
    assert "a" * 99 in grammar_text(JsonFormat({"type": "object", "description": "a" * 99}))
