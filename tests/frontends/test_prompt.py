"""Where a prompt comes from, and what is refused."""

import io
import sys
from pathlib import Path

import pytest

from penstock.errors import PromptError
from penstock.frontends.answer import read_prompt


def set_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, *, is_terminal: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(content))
    monkeypatch.setattr(stdin, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdin", stdin)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"text", "text"),
        (b"text\n", "text"),
        (b"text\r\n", "text"),
        (b"text\n\n", "text\n"),
        (b"  two\r\nlines  ", "  two\r\nlines  "),
        (b"\xef\xbb\xbfmarked", "marked"),
        ("Stauwehr, écluse, 水門".encode(), "Stauwehr, écluse, 水門"),
    ],
)
def test_a_file_and_standard_input_are_taken_alike(
    content: bytes, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(content)
    assert read_prompt(None, str(file)) == text
    assert read_prompt("And?", str(file)) == f"{text}\n\nAnd?"
    for name in (None, "-"):
        set_stdin(monkeypatch, content)
        assert read_prompt(None, name) == text


def test_a_prompt_option_leaves_standard_input_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, b"not this")
    assert read_prompt("this", None) == "this"


def test_no_prompt_on_a_terminal_is_refused_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, b"", is_terminal=True)
    with pytest.raises(PromptError, match="there is no prompt: give --prompt, --prompt-file or"):
        read_prompt(None, None)


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_prompt_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        read_prompt(text, None)
    set_stdin(monkeypatch, text.encode())
    with pytest.raises(PromptError, match="the prompt is empty"):
        read_prompt(None, None)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"abc\xff")
    for file, said in [
        (tmp_path / "none", "there is no such file"),
        (tmp_path, "is a folder"),
        (binary, r"is not UTF-8 text \(byte 3 is 0xff\)"),
        (binary / "below", "cannot be read: Not a directory"),
        ("nul\0", "cannot be read"),
        ("~no-such-user/prompt", "cannot be read: Could not determine home directory"),
    ]:
        with pytest.raises(PromptError, match=said) as caught:
            read_prompt(None, str(file))
        assert f"--prompt-file {file}" in str(caught.value)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(PromptError, match="--prompt is not accepted: it is not UTF-8 text"):
        read_prompt("caf\udce9", None)


def test_a_long_name_is_cut_short() -> None:
    with pytest.raises(PromptError, match="cannot be read: File name too long") as caught:
        read_prompt(None, "x" * 5000)
    assert len(str(caught.value)) < 400


def test_closed_standard_input_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(PromptError, match="standard input is closed"):
        read_prompt(None, "-")
    with pytest.raises(PromptError, match="there is no prompt"):
        read_prompt(None, None)
