"""Streamed text equals decoded text, and no piece holds a part of a character."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.models.hf.tokenizer import folder_tokenizer
from penstock.models.opened import open_model
from penstock.models.text.tokenizer import StreamDecoder, Tokenizer
from tests.models.test_tokenizer import TEXTS, byte_level_backend, save_folder, sentence_piece_backend


@pytest.fixture(scope="module", params=["smollm2", "byte level", "prefixed pieces", "bare pieces"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "smollm2":
        path: Path = request.getfixturevalue("smollm2_path")
        return open_model(path).tokenizer
    backend = (
        byte_level_backend()
        if request.param == "byte level"
        else sentence_piece_backend(request.param == "prefixed pieces")
    )
    return folder_tokenizer(save_folder(tmp_path_factory.mktemp("tokenizer"), backend, {}))


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.finish()]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_pieces_add_up_to_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = st.one_of(
        st.integers(0, tokenizer.vocab_size - 1), st.integers(0, min(500, tokenizer.vocab_size - 1))
    )
    ids = data.draw(st.lists(tokens, max_size=60))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text and "\ufffd" not in text])
def test_a_character_comes_whole_or_not_at_all(tokenizer: Tokenizer, text: str) -> None:
    pieces = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_text_comes_as_early_as_it_can(tokenizer: Tokenizer) -> None:
    """After each token, what was held back is no more than an unfinished character."""
    ids = tokenizer.encode("naïve 🎉🎉 Привет", add_special_tokens=False)
    decoder = StreamDecoder(tokenizer)
    text = ""
    for count, token in enumerate(ids, start=1):
        text += decoder.push(token)
        whole = tokenizer.decode(ids[:count])
        assert text == whole.rstrip("\ufffd")


def test_the_end_of_an_unfinished_character_is_marked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦖", add_special_tokens=False)
    pieces = stream(tokenizer, ids[:-1])
    assert "".join(pieces[:-1]).strip() == ""
    assert pieces[-1] == "\ufffd"


def test_special_and_unknown_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a", add_special_tokens=False)
    assert "".join(stream(tokenizer, [0, *a, 1, 1 << 30])) == "a"
