"""A grammar of the format that a template writes calls in allows just those, from where an answer is held to it."""

import string
import threading
import traceback
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from penstock.engine.constraint import NUM_KEPT, NUM_QUEUED, Constraint, ConstraintFactory
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
CALL = "｜call｜"
KEYWORDS = [
    "type",
    "properties",
    "items",
    "enum",
    "const",
    "$ref",
    "$defs",
    "anyOf",
    "oneOf",
    "allOf",
    "required",
]
values = st.recursive(
    st.sampled_from(
        ["object", "array", "string", "integer", "null", "#", "#/$defs/a", "#/properties", "a", "", 0, 1.5]
    )
    | st.none()
    | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=4)
    ),
    max_leaves=15,
)


def format_of(family: str) -> CallFormat:
    return ChatTemplate(TEMPLATES[family][0], {}).calls


def vocabulary(specials: list[str], words: list[str] | None = None) -> Tokenizer:
    """Bytes, tokens that are special, and some that are longer texts."""
    backend = tokenizers.Tokenizer.from_str(byte_backend().to_str())
    backend.add_special_tokens([AddedToken(name, special=True) for name in ["</s>", *specials]])
    backend.add_tokens(words or [])
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
    words = data.draw(
        st.lists(st.sampled_from(["a <", "<to", "ol_c", "l>\n", "call>\n{", "<<"]), unique=True)
    )
    tokenizer = vocabulary(["<tool_call>", "<think>"] if is_special else [], words)
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
    deepest: Any = 1
    for _ in range(12):
        deep, deepest = {"type": "array", "items": deep}, [deepest]
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
        (deep, [[[[]]], deepest], ["x", [["x"]], [[[[[[[[["x"]]]]]]]]], [deepest]]),
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
        for tool in range(20)
    }
    CallGrammar(form, dict([*schemas.items()][:3]), vocabulary([]))
    with pytest.raises(SettingError) as raised:
        CallGrammar(form, schemas, vocabulary([]))
    assert raised.value.setting == "grammar"


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
    other = Grammar('start: "y"', FreeText("<x>"))  # which the mark does not fit
    logits = torch.zeros(tokenizer.vocab_size)
    for grammar in (bad, other):
        constraint = factory.new(grammar)
        for token in tokenizer.encode("a<x>b", add_special_tokens=False):
            constraint.accept(token)
            assert torch.equal(constraint.mask(logits), logits)
            assert not constraint.is_holding
    with pytest.raises(SettingError):
        factory.compile_later(bad)
    with pytest.raises(SettingError):
        factory.new(Grammar("start: /(/"))


def test_the_last_grammars_are_kept_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = vocabulary([])
    factory = ConstraintFactory(tokenizer, tokenizer.vocab_size, frozenset([256]))
    compiled, compile_ = list[str](), factory._compile

    def counted(text: str, setting: str) -> Any:
        compiled.append(text)
        return compile_(text, setting)

    monkeypatch.setattr(factory, "_compile", counted)
    grammars = [Grammar(f'start: "{number}"') for number in range(NUM_KEPT + 1)]
    for grammar in grammars[:NUM_KEPT]:
        factory.new(grammar)
    factory.new(grammars[0])  # the last to be used now
    assert len(compiled) == NUM_KEPT
    factory.new(grammars[NUM_KEPT])
    factory.new(grammars[0])
    assert len(compiled) == NUM_KEPT + 1
    factory.new(grammars[1])
    assert len(compiled) == NUM_KEPT + 2


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


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        (HERMES, "</think><tool_call>", ["><"]),
        (HERMES, "<think>a</think>\n<tool", [">\n<"]),
        (HERMES, "<think></think><", ["<think></think><"]),
        (HERMES, "b <think><tool_call>", ["b <think>"]),
        (format_of("llama"), '<think>a {"name": "b</think>\n{"name": "', []),
        (format_of("llama"), '<think>a</think> {"na', ["<t"]),
        (CallFormat(f'{CALL} {{"name": "', '", "arguments": ', "}", None), f"{CALL} ", []),
        (CallFormat(f'{CALL} {{"name": "', '", "arguments": ', "}", None), f"a{CALL[:-1]}", []),
    ],
)
def test_a_mark_is_seen_where_tokens_cross_it(form: CallFormat, text: str, words: list[str]) -> None:
    tokenizer, marks = vocabulary([], words), ThoughtMarks("<think>", "</think>")
    rules = CallGrammar(form, SCHEMAS, tokenizer)
    grammar = rules.grammar(is_required=False, thoughts=marks, is_thinking=text.startswith("</think>"))
    constraint = ConstraintFactory(tokenizer, tokenizer.vocab_size, frozenset([256])).new(grammar)
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert constraint.mask(torch.zeros(tokenizer.vocab_size))[token] == 0
        constraint.accept(token)
    assert constraint.is_holding


@pytest.mark.parametrize("text", ['f{"name": "', '<think>a</think>b {"name": "', '<think>{"name": "'])
def test_a_call_that_is_only_one_at_first_is_text_elsewhere(text: str) -> None:
    tokenizer, marks = vocabulary([], ['f{"']), ThoughtMarks("<think>", "</think>")
    rules = CallGrammar(format_of("llama"), SCHEMAS, tokenizer)
    grammar = rules.grammar(is_required=False, thoughts=marks)
    constraint = ConstraintFactory(tokenizer, tokenizer.vocab_size, frozenset([256])).new(grammar)
    for token in tokenizer.encode(text, add_special_tokens=False):
        constraint.accept(token)
    assert not constraint.is_holding


def test_a_grammar_is_waited_for_where_its_mask_is_needed() -> None:
    tokenizer = vocabulary([])
    factory = ConstraintFactory(tokenizer, tokenizer.vocab_size, frozenset([256]))
    rules = [
        CallGrammar(HERMES, {f"f{number}": {"type": "object"}}, tokenizer) for number in range(NUM_QUEUED + 2)
    ]
    grammars = [rule.grammar(is_required=False) for rule in rules]
    goes_on, compile_ = threading.Event(), factory._compile

    def waits(grammar: str, setting: str) -> Any:
        assert threading.current_thread() is threading.main_thread() or goes_on.wait(60)
        return compile_(grammar, setting)

    factory._compile = waits  # type: ignore[method-assign]
    futures = [factory.compile_later(grammar) for grammar in grammars]
    # Enough wait for the thread: one more is compiled by who asks.
    assert [future is None for future in futures] == [False] * NUM_QUEUED + [True] * 2
    constraint, last = factory.new(grammars[0]), factory.new(grammars[1])
    for each in (constraint, last):
        for token in tokenizer.encode("a <tool_call>", add_special_tokens=False)[:3]:
            each.accept(token)
        assert each.is_holding
        assert not each.is_finished
    assert not any(future.done() for future in futures if future is not None)
    logits = torch.zeros(tokenizer.vocab_size)
    assert last.mask(logits).isinf().any()  # the thread has not begun with it
    threading.Timer(0.05, goes_on.set).start()
    assert constraint.mask(logits).isinf().any()
    assert [future.result(60) for future in futures if future is not None]


def test_what_is_wrong_with_a_grammar_is_told_to_each_who_asks() -> None:
    tokenizer = vocabulary([])
    factory = ConstraintFactory(tokenizer, tokenizer.vocab_size, frozenset([256]))
    errors = []
    for _ in range(20):
        with pytest.raises(SettingError) as raised:
            factory.new(Grammar("start: nothing"))
        errors.append(raised.value)
    assert len({str(error) for error in errors}) == 1
    assert len({len([*traceback.walk_tb(error.__traceback__)]) for error in errors[1:]}) == 1


def test_references_do_not_multiply_what_they_refer_to() -> None:
    inner: dict[str, Any] = {"$ref": "#/$defs/names"}
    for _ in range(20):
        inner = {"type": "array", "items": {"anyOf": [inner, {"type": "null"}]}}
    schema = {
        "type": "object",
        "$defs": {
            "names": {"enum": [f"name {index}" for index in range(1000)]},
            "loop": {"$ref": "#/$defs/loop"},
        },
        "properties": {**{f"key_{index}": inner for index in range(20)}, "loop": {"$ref": "#/$defs/loop"}},
    }
    form, tokenizer = CallFormat("<call>", "", "</call>", None, literals=Literals()), vocabulary([])
    grammar = CallGrammar(form, {"f": schema}, tokenizer).grammar(is_required=True)
    assert grammar.text.count("name 999") == 1
    assert allows(
        tokenizer, grammar, "<call>f(key_0=" + "[" * 20 + '"name 7"' + "]" * 20 + ", loop=[1])</call>"
    )
    tagged = {**schema, "properties": {f"key_{index}": {"type": "object"} for index in range(500)}}
    with pytest.raises(SettingError, match="bytes"):
        CallGrammar(format_of("coder"), {"f": tagged}, tokenizer)


@pytest.mark.parametrize("family", ["hermes", "coder", "pythonic", "gemma4"])
@settings(max_examples=60, deadline=None)
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), values, max_size=5))
def test_any_schema_of_a_tool_is_held_to_or_refused(family: str, schema: Any) -> None:
    tokenizer = vocabulary([])
    factory = ConstraintFactory(tokenizer, tokenizer.vocab_size, frozenset([256]))
    for parameters in (schema, {"type": "object", "properties": {"b": schema}, "required": ["b"]}):
        try:
            factory.new(
                CallGrammar(format_of(family), {"f": parameters}, tokenizer).grammar(is_required=True)
            )
        except SettingError as error:
            assert str(error)  # noqa: PT017
