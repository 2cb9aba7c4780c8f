"""Calls and thoughts are found in an answer however its text is cut, in the format that a template writes, and a
grammar of the same format allows just that."""

import json
import string
import sys
import threading
import traceback
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from penstock.engine.constraint import NUM_QUEUED, ConstraintFactory
from penstock.engine.events import Grammar
from penstock.engine.grammar import CallGrammar
from penstock.errors import SettingError
from penstock.frontends.server.turns import CallArguments, Turn, TurnParser
from penstock.models.text.calls import HERMES, CallFormat, ThoughtMarks
from penstock.models.text.chat import ChatTemplate
from penstock.models.text.literals import Literals
from penstock.models.text.tokenizer import SpecialTokens, Tokenizer
from tests.byte_models import byte_backend
from tests.models.call_templates import CALLS, MAIL, PLAIN, TEMPLATES, THINKING, WEATHER

SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, MAIL)}
# Special in some vocabularies, text in others.
MARKS = ["[TOOL_CALLS]", "<｜calls▁begin｜>", "<tool_call>", "<|section_begin|>"]


def format_of(family: str) -> CallFormat:
    return ChatTemplate(TEMPLATES[family][0], {}).calls


def parsed(parser: TurnParser, *texts: str) -> Turn:
    turn = Turn()
    for text in texts:
        for piece in parser.push(text):
            turn.add(piece)
    for piece in parser.finish():
        turn.add(piece)
    return turn


def calls_of(turn: Turn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in turn.whole_calls]


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_are_found_wherever_the_text_is_cut(family: str, num_calls: int) -> None:
    form, answer = format_of(family), TEMPLATES[family][num_calls]
    assert form.is_native
    if answer is None:
        assert form.between is None
        return
    for before in ("", "I look. ") if form.trigger else ("",):
        text = before + answer
        for cut in range(len(text)):
            turn = parsed(TurnParser(form, schemas=SCHEMAS), text[:cut], text[cut:])
            assert (turn.text, turn.thought) == (before.rstrip(), ""), cut
            assert calls_of(turn) == CALLS[:num_calls], cut
        turn = parsed(TurnParser(form, schemas=SCHEMAS), *text)
        assert calls_of(turn) == CALLS[:num_calls]


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_was_cut_is_no_call(family: str) -> None:
    form, answer = format_of(family), TEMPLATES[family][1]
    for end in range(len(answer)):
        assert calls_of(parsed(TurnParser(form, schemas=SCHEMAS), answer[:end])) in ([], CALLS[:1]), end


@pytest.mark.parametrize("family", [family for family in TEMPLATES if format_of(family).tags is not None])
def test_tagged_values_keep_their_white_space(family: str) -> None:
    form, answer = format_of(family), TEMPLATES[family][1]
    for value in ("    indented\n\tlines\n", "\n", " ", "", "NaN", "1e999"):
        turn = parsed(TurnParser(form, schemas=SCHEMAS), *answer.replace("Köln", value))
        assert calls_of(turn) == [("weather", {"city": value, "days": 3})]
    for value, read in (("NaN", "NaN"), ("1e999", sys.float_info.max), ("true", True)):
        assert calls_of(parsed(TurnParser(form), answer.replace("Köln", value)))[0][1]["city"] == read


NO_JSON = ["{'a': 1}", '{"a": NaN}', '{"a" 1}', '{"a":' * 2000 + "1" + "}" * 2000]


@pytest.mark.parametrize("arguments", NO_JSON, ids=lambda text: text[:20])
def test_what_is_no_json_is_no_call(arguments: str) -> None:
    """Where a schema cannot be held to, a model may write anything."""
    turn = parsed(TurnParser(HERMES), f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')
    assert [call.name for call in turn.calls] == ["f"]
    assert turn.whole_calls == []


def test_arguments_come_as_they_are_written() -> None:
    parser = TurnParser(HERMES)
    texts = []
    for letter in '<tool_call>\n{"name": "f", "arguments": {"text": "' + "long " * 20:
        texts += [piece.text for piece in parser.push(letter) if isinstance(piece, CallArguments)]
    assert "".join(texts) == '{"text": "' + "long " * 20


@given(text=st.text(alphabet='ab <>/tol_ca{}"\n', max_size=60), data=st.data())
def test_what_is_no_call_is_text(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    assert parsed(TurnParser(), text[:cut], text[cut:]).text == text
    turn = parsed(TurnParser(HERMES), text[:cut], text[cut:])
    if HERMES.trigger not in text:
        assert (turn.text.strip(), turn.calls) == (text.strip(), [])


@pytest.mark.parametrize(
    ("text", "is_thinking", "expected"),
    [
        ("<think>\nhm <x>\n</think>\n\nYes.", False, ("hm <x>", "Yes.")),
        ("hm\n</think>\n\nYes.\n", True, ("hm", "Yes.\n")),
        ("Yes, <think> it.", False, ("", "Yes, <think> it.")),
        ("hm", True, ("hm", "")),
    ],
)
def test_thoughts_are_apart(text: str, is_thinking: bool, expected: tuple[str, str]) -> None:
    marks = ChatTemplate(THINKING, {}).thoughts
    assert marks == ThoughtMarks("<think>", "</think>")
    for cut in range(len(text) + 1):
        turn = parsed(TurnParser(None, marks, is_thinking=is_thinking), text[:cut], text[cut:])
        assert (turn.thought, turn.text) == expected, cut
        turn = parsed(TurnParser(HERMES, marks, is_thinking=is_thinking), text[:cut], text[cut:])
        assert (turn.thought, turn.text.strip()) == (expected[0], expected[1].strip()), cut


def test_a_template_without_tools_has_blocks() -> None:
    assert ChatTemplate(PLAIN, {}).calls == HERMES
    assert ChatTemplate("{{ raise_exception('no') }}", {}).calls == HERMES
    assert ChatTemplate(PLAIN, {}).thoughts is None


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


CALL = "｜call｜"


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


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
            ),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_literals_are_read_as_they_are_written(arguments: dict[str, Any]) -> None:
    for literals in (Literals(), Literals('<|"|>')):
        text = literals.write(arguments)
        assert literals.read(text) == arguments
        form = CallFormat("<call>", "", "</call>", None, literals=literals)
        answer = form.write([("f", arguments)])
        assert calls_of(parsed(TurnParser(form), answer[: len(answer) // 2], answer[len(answer) // 2 :])) == [
            ("f", arguments)
        ]


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
