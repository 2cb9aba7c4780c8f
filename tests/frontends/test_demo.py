"""The demo's document is long enough whatever Python's texts are, and the demo runs."""

from pathlib import Path
from pydoc_data.topics import topics

import pytest

from penstock.frontends import demo


def count_words(text: str) -> int:
    return len(text.split())


def test_the_document_is_the_same_each_time_and_begins_with_what_is_asked_about() -> None:
    first, second = (demo.make_document(topics, count_words, at_least=2000, at_most=2400) for _ in range(2))
    assert first == second
    assert 2000 <= count_words(first) <= 2400
    assert first.startswith(topics[demo.TOPICS[0]].strip())


def test_missing_topics_are_made_up_for_by_others() -> None:
    texts = {name: f"{name} " * 50 for name in topics if name not in demo.TOPICS[1:]}
    document = demo.make_document(texts, count_words, at_least=1500, at_most=1900)
    assert 1500 <= count_words(document) <= 1900
    assert document.startswith(demo.TOPICS[0])


def test_a_topic_that_is_too_long_is_left_out() -> None:
    texts = {demo.TOPICS[0]: "first " * 10, demo.TOPICS[1]: "long " * 5000, demo.TOPICS[2]: "short " * 20}
    document = demo.make_document(texts, count_words, at_least=25, at_most=40)
    assert set(document.split()) == {"first", "short"}


def test_it_runs(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(str(tiny_model))
    out, err = capsys.readouterr()
    assert demo.QUESTION in out
    assert demo.NEXT in out
    assert "prompt tokens" in err


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main("no such model")
    assert ended.value.code == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock: ")
