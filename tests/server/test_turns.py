"""Calls and thoughts are found in an answer however its text is cut, in the format that a template writes, and a
grammar of the same format allows just that."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontends.server.turns import CallArguments, Turn, TurnParser
from penstock.models.text.calls import HERMES, CallFormat, ThoughtMarks
from penstock.models.text.chat import ChatTemplate
from penstock.models.text.literals import Literals
from tests.models.call_templates import CALLS, MAIL, PLAIN, TEMPLATES, THINKING, WEATHER

SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, MAIL)}


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


def test_a_call_that_was_cut_is_no_text() -> None:
    for family in ("hermes", "coder", "nemo", "small"):
        form, answer = format_of(family), TEMPLATES[family][1]
        for end in range(len(form.trigger), len(answer)):
            parser = TurnParser(form, schemas=SCHEMAS)
            turn = Turn()
            for piece in (*parser.push(f"I look.\n{answer[:end]}"), *parser.finish(is_cut=True)):
                turn.add(piece)
            assert turn.text == "I look.", answer[:end]


def test_a_text_among_tagged_arguments_comes_as_it_is_written() -> None:
    form, answer = format_of("coder"), str(TEMPLATES["coder"][2])
    parser, told = TurnParser(form, schemas=SCHEMAS), ""
    for letter in answer[: answer.index("urgent") - 30]:
        for piece in parser.push(letter):
            told += piece.text if isinstance(piece, CallArguments) else ""
    assert '{"text": "a \\"b\\" }]{' in told


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
