"""Errors about settings: fields, and the one line that is made of them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.errors import ModelFileError, PenstockError, SettingError
from penstock.files import replace_json
from penstock.models.reading import first_line


def typed(setting: str, value: object) -> str:
    return f"--{setting}" if value is ... else f"--{setting} {value}"


@pytest.mark.parametrize(
    ("error", "message", "as_option"),
    [
        (
            SettingError("top_p", 2, "a number up to 1"),
            "top_p=2 is not accepted: give a number up to 1",
            "--top_p 2 is not accepted: give a number up to 1",
        ),
        (
            SettingError("port", 80, "another", where="on here", because="it is in use"),
            "port=80 is not accepted on here: it is in use; give another",
            "--port 80 is not accepted on here: it is in use; give another",
        ),
        (
            SettingError("a", 1, "0", beside={"b": 2, "c": 3}),
            "a=1 is not accepted with b=2 and c=3: give 0",
            "--a 1 is not accepted with --b 2 and --c 3: give 0",
        ),
        (
            SettingError("a", ..., contradicts={"b": 2}),
            "a contradicts b=2: leave one of them out",
            "--a contradicts --b 2: leave one of them out",
        ),
        (
            SettingError("a", 1, "auto", contradicts={"b": ...}, because="it cannot be"),
            "a=1 contradicts b: it cannot be; leave one of them out, or give auto",
            "--a 1 contradicts --b: it cannot be; leave one of them out, or give auto",
        ),
        (
            SettingError("a", 1, needs=("b", "C"), because="of that"),
            "a=1 needs b or C: of that",
            "--a 1 needs --b or --C: of that",
        ),
        (SettingError("key", ...), "key is not accepted", "--key is not accepted"),
    ],
)
def test_a_message_is_made_of_fields(error: SettingError, message: str, as_option: str) -> None:
    assert str(error) == error.message() == message
    assert error.message(typed) == as_option


def test_fields_are_there_to_be_asked() -> None:
    error = SettingError("overlap", 8, "0", beside={"chunk_size": 4}, because="why", where="here")
    assert (error.setting, error.value, error.accepted) == ("overlap", 8, "0")
    assert (error.beside, error.because, error.where) == ({"chunk_size": 4}, "why", "here")
    none: Mapping[str, object] = {}
    assert (error.contradicts, error.needs) == (none, ())
    assert isinstance(error, PenstockError | ValueError)


def test_what_is_no_settings_fault_is_a_message_alone() -> None:
    error = SettingError("the request has ended")
    assert (error.setting, error.value, error.accepted) == (None, None, "")
    assert str(error) == error.message(typed) == "the request has ended"


def test_what_a_model_file_says_is_short_and_harmless() -> None:
    """Names in files are of any length, and may hold what a terminal obeys."""
    long = str(ModelFileError(f"/a/model.gguf is damaged: {'x' * 10**6} is there twice"))
    assert long.startswith("/a/model.gguf is damaged: xxx")
    assert long.endswith("xxx is there twice")
    assert len(long) < 1500
    assert str(ModelFileError("x" * 1200)) == "x" * 1200
    assert (
        first_line(ValueError("\x1b[2Jred\x00\x07\nmore"))
        == "\N{REPLACEMENT CHARACTER}[2Jred" + 2 * "\N{REPLACEMENT CHARACTER}"
    )


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "facts.json"
    replace_json(path, {"a": 1})
    replace_json(path, {"a": 2}, indent=1)
    assert path.read_text() == '{\n "a": 2\n}\n'
    with pytest.raises(TypeError):
        replace_json(path, {"a": object()})
    assert path.read_text() == '{\n "a": 2\n}\n'
    assert [file.name for file in path.parent.iterdir()] == ["facts.json"]
