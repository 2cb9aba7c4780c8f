"""`penstock chat`, in this process, on a tiny random model: lines in, answers out."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.engine.llm import LLM
from penstock.errors import PromptError
from penstock.frontends.chat import Talk
from penstock.frontends.cli import app
from penstock.frontends.display import Display


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, dtype="float32", threads=1)


def talk(tiny_model: Path, text: str | bytes, *more: str, command: str = "chat") -> Result:
    arguments = [
        command,
        str(tiny_model),
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--max-tokens",
        "12",
        "--temperature",
        "0",
        *more,
    ]
    return CliRunner().invoke(app, arguments, input=text)


def test_a_conversation_is_what_the_engine_says(tiny_model: Path, llm: LLM) -> None:
    first = [{"role": "user", "content": "hello"}]
    one = llm.generate(first, max_tokens=12).text
    second = [*first, {"role": "assistant", "content": one}, {"role": "user", "content": "and\nnow"}]
    two = llm.generate(second, max_tokens=12).text
    for command, lines in (("chat", "hello\nand\\\nnow\n"), ("run", 'hello\n"""\nand\nnow\n"""\n')):
        done = talk(tiny_model, lines, "--quiet", command=command)
        assert done.exit_code == 0, done.stderr
        assert done.stdout == "".join(text if text.endswith("\n") else text + "\n" for text in (one, two))


def test_documents_and_saved_conversations(tiny_model: Path, tmp_path: Path) -> None:
    document, saved = tmp_path / "a.txt", tmp_path / "chat.json"
    document.write_text("sluices " * 20)
    done = talk(
        tiny_model,
        f"/file {document}\nwhat?\n/save {saved}\n/clear\n/load {saved}\n/help\n",
        "--system",
        "Be brief.",
    )
    assert done.exit_code == 0, done.stderr
    system, user, assistant = json.loads(saved.read_text())["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"] == "sluices " * 20 + "\n\nwhat?"
    assert assistant["role"] == "assistant"
    assert "3 messages from" in done.stderr
    assert "peak memory" not in done.stderr  # which is for one prompt, and not for each turn of a chat
    again = talk(tiny_model, "again\n", "--load", str(saved), "--cache-dir", str(tmp_path / "cache"))
    assert again.exit_code == 0, again.stderr
    assert "3 messages from" in again.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/file nowhere.txt", "no such file"),
        ("/load nowhere.json", "cannot be read"),
        ("/file", "/file needs the path of a file"),
        ("/save ", "/save needs the path of a file"),
        ("/load", "/load needs the path of a file"),
        ("/save /nowhere/x.json", "cannot be written"),
        ("/zorp", "/help"),
        (b"hello \xff", "not UTF-8 text"),
        ("x" * 9000, "context"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_goes_wrong_is_told_and_the_chat_goes_on(tiny_model: Path, line: str | bytes, said: str) -> None:
    done = talk(tiny_model, (line if isinstance(line, bytes) else line.encode()) + b"\nhello\n/exit\nnever\n")
    assert done.exit_code == 0
    assert said in done.stderr
    assert done.stdout


def test_files_without_an_end_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontends.answer.MAX_TEXT_BYTES", 1 << 20)
    done = talk(tiny_model, "/file /dev/zero\n/load /dev/zero\nhello\n")
    assert (done.exit_code, done.stderr.count("more than 1048576 bytes")) == (0, 2), done.stderr
    assert done.stdout


def test_a_command_that_is_interrupted_ends_no_chat(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt  # at a pipe that nobody writes to

    monkeypatch.setattr("penstock.frontends.answer.read_text", interrupted)
    done = talk(tiny_model, "/file x\nhello\n", "--quiet")
    assert (done.exit_code, bool(done.stdout)) == (0, True)


@pytest.mark.parametrize(
    ("redirect", "status", "said"),
    [
        ("<&-", 0, ""),
        ("0> /dev/null", 2, "Bad file descriptor"),
        ("> /dev/full", 1, "cannot write to standard output"),
    ],
)
def test_streams_that_cannot_be_used_are_no_traceback(
    tiny_model: Path, redirect: str, status: int, said: str
) -> None:
    chat = f"{sys.executable} -m penstock chat {tiny_model} --threads 1 --max-tokens 2 {redirect}"
    done = subprocess.run(chat, shell=True, input="hi\n", capture_output=True, text=True, timeout=300)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_conversation_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, talk, told = tmp_path / "chat.json", Talk("Be brief."), Display()
    talk._save(str(saved), told)
    before = saved.read_text()
    talk.messages = [{"role": "user", "content": "\udcff"}]  # no text, which shows when it is written
    with pytest.raises(PromptError):
        talk._save(str(saved), told)
    assert saved.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["chat.json"]


def test_what_is_no_conversation_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1]")
    done = talk(tiny_model, "hello\n", "--load", str(tmp_path / "x.json"))
    assert (done.exit_code, done.stdout) == (2, "")


def test_a_message_that_was_cancelled_before_its_answer_is_taken_back(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("sluices")
    told, talk = Display(), Talk()
    talk.take(f"/file {tmp_path / 'a.txt'}", llm, told)
    ended = replace(llm.generate("x", max_tokens=1), finish_reason="cancelled", text="")
    with monkeypatch.context() as patched:
        patched.setattr("penstock.frontends.answer.answer", lambda *_, **__: ended)
        talk.take("what?", llm, told, max_tokens=2)
    assert talk.messages == []
    talk.take("what now?", llm, told, max_tokens=2)
    assert [message["content"] for message in talk.messages][:1] == ["sluices\n\nwhat now?"]
