"""Engines in processes of their own: what is asked, what is answered, and what is refused."""

import sys
import time
from pathlib import Path

import pytest

from penstock.bench import peers_workers
from penstock.bench.peers_process import PeerError, PeerProcess

ENGINE = """
import os, sys, time
def describe():
    return "an engine that sleeps"
def prepare(settings):
    open(settings["output"], "w").write("made")
def load(settings):
    if settings.get("is_broken"):
        raise RuntimeError("no weights\\nin two lines")
    print("what engines print is no answer", flush=True)
    os.system("echo nor what their processes print")
    def generate(prompt, num_tokens, on_token):
        for index in range(num_tokens + settings.get("too_many", 0)):
            if settings.get("dies"):
                print("out of luck", file=sys.stderr)
                os._exit(7)
            time.sleep(settings["token_s"])
            on_token(prompt[-1] + index)
    return generate
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a process that serves it."""
    (tmp_path / "sleeping_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return [sys.executable, str(peers_workers._SERVE), "sleeping_engine"]


def saying(line: str) -> list[str]:
    """The command of a process that answers everything with the same line."""
    return [sys.executable, "-c", f"import sys\nfor _ in sys.stdin: print({line!r}, flush=True)"]


def test_tokens_come_with_the_engines_own_times(engine: list[str], tmp_path: Path) -> None:
    with PeerProcess("slow", engine) as slow, PeerProcess("fast", engine) as fast:
        assert slow.load({"token_s": 0.05}).about == "an engine that sleeps"
        fast.load({"token_s": 0.001})
        # It may have been paused, but not every time.
        assert min(fast.generate([5], 1).first_token_s for _ in range(20)) < 0.05
        for _ in range(2):
            answers = [process.generate([5, 6], 4) for process in (slow, fast)]
            assert all(answer.token_ids == (6, 7, 8, 9) for answer in answers)
            assert answers[0].first_token_s >= 0.05
            assert answers[0].stamps_s[-1] >= 0.2
            speed = answers[0].decode_tokens_per_s
            assert speed is not None
            assert speed <= 20
        assert slow.generate([1], 1).decode_tokens_per_s is None
        slow.prepare({"output": str(tmp_path / "made")})
    assert (tmp_path / "made").read_text() == "made"


def test_a_process_ends_with_its_block(engine: list[str]) -> None:
    with PeerProcess("one", engine) as process:
        process.load({"token_s": 0.0})
        inner = process._process
        assert inner.poll() is None
    assert inner.returncode == 0
    process.close()  # once more does nothing


def test_one_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bench.peers_process._END_TIMEOUT_S", 0.2)
    process = PeerProcess("deaf", [sys.executable, "-c", "import time; time.sleep(600)"])
    started = time.monotonic()
    process.close()
    assert time.monotonic() - started < 300
    assert process._process.returncode != 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"is_broken": True}, "x failed: RuntimeError: no weights in two lines"),
        ({"token_s": 0.001, "dies": True}, "x ended (exit 7): out of luck"),
        ({"token_s": 0.001, "too_many": 1}, "x gave 3 tokens where 2 were asked for"),
        ({}, "x failed: KeyError: 'token_s'"),
    ],
)
def test_what_goes_wrong_is_told_in_a_line(
    engine: list[str], settings: dict[str, object], expected: str
) -> None:
    def load_and_generate() -> None:
        with PeerProcess("x", engine) as process:
            process.load(settings)
            process.generate([1], 2)

    with pytest.raises(PeerError) as raised:
        load_and_generate()
    assert str(raised.value) == expected


def test_after_its_end_nothing_is_answered(engine: list[str]) -> None:
    with PeerProcess("x", engine) as process:
        process.load({"token_s": 0.0, "dies": True})
        for _ in range(2):
            with pytest.raises(PeerError, match="exit 7"):
                process.generate([1], 1)


@pytest.mark.parametrize(
    "line",
    [
        "hello",
        "[]",
        '{"ok": 1}',
        '{"ok": {}}',
        '{"ok": {"token_ids": "ab", "stamps_s": [1, 2]}}',
        '{"ok": {"token_ids": [1, 2], "stamps_s": null}}',
    ],
)
def test_nonsense_is_not_believed(line: str) -> None:
    with PeerProcess("x", saying(line)) as process, pytest.raises(PeerError, match="not understood"):
        process.generate([1], 2)


@pytest.mark.parametrize("stamps", ["[2, 1]", "[0, 1]", "[-1, 1]"])
def test_times_must_follow_each_other(stamps: str) -> None:
    line = f'{{"ok": {{"token_ids": [1, 2], "stamps_s": {stamps}}}}}'
    with PeerProcess("x", saying(line)) as process, pytest.raises(PeerError, match="do not follow"):
        process.generate([1], 2)


def test_waiting_has_an_end() -> None:
    with (
        PeerProcess("x", [sys.executable, "-c", "import sys; sys.stdin.read()"]) as process,
        pytest.raises(PeerError, match=r"no answer in 0\.2 s"),
    ):
        process.generate([1], 1, timeout_s=0.2)


def test_what_cannot_be_started_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"x cannot be started: .*nowhere"):
        PeerProcess("x", [str(tmp_path / "nowhere")])


def test_a_missing_engine_is_an_answer() -> None:
    command = [sys.executable, str(peers_workers._SERVE), "no_such_engine"]
    with PeerProcess("x", command) as process, pytest.raises(PeerError, match="ModuleNotFoundError"):
        process.load({})


def test_workers_import_nothing_of_penstock() -> None:
    for path in peers_workers._SERVE.parent.glob("*.py"):
        assert "import penstock" not in path.read_text()
        assert "from penstock" not in path.read_text()
