"""Calls and thoughts are found in an answer however its text is cut, in the format that a template writes, and a
grammar of the same format allows just that."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from penstock.engine.constraint import ConstraintFactory
from penstock.engine.events import Grammar
from penstock.engine.grammar import CallGrammar
from penstock.errors import SettingError
from penstock.frontends.server.turns import CallArguments, Turn, TurnParser
from penstock.models.text.calls import HERMES, CallFormat, ThoughtMarks
from penstock.models.text.chat import ChatTemplate
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
