"""Systems in this process and in processes of their own: what is asked, what is answered, and what is refused."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import systems
from benchmarks.systems import (
    AUTO,
    Child,
    OnToken,
    PeerError,
    Spec,
    ask,
    growth_of,
    load_systems,
)
from benchmarks.workers import child as child_script
from penstock.engine.llm import LLM
from penstock.measure.growth import MeasurementError, can_measure_growth
from tests.oracle import make_oracle, random_prompt

ENGINE = """
import os, sys, time
class Engine:
    def prepare(self, output):
        open(output, "w").write("made")
    def load(self, token_s, is_broken=False, dies=False, too_many=0):
        if is_broken:
            raise RuntimeError("no weights\\nin two lines")
        print("what engines print is no answer", flush=True)
        os.system("echo nor what their processes print")
        self.token_s, self.dies, self.too_many = token_s, dies, too_many
        return {"about": "an engine that sleeps"}
    def generate(self, prompt, num_tokens, on_token):
        for index in range(num_tokens + self.too_many):
            if self.dies:
                print("out of luck", file=sys.stderr)
                os._exit(7)
            time.sleep(self.token_s)
            on_token(prompt[-1] + index)
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "sleeping_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "sleeping_engine:Engine"


def program(tmp_path: Path, code: str) -> Path:
    """What stands for another environment's interpreter, and does this whatever it is asked."""
    path = tmp_path / "program"
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)
    return path


def saying(tmp_path: Path, line: str) -> Path:
    return program(tmp_path, f"import sys\nfor _ in sys.stdin: print({line!r}, flush=True)")


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        (Spec("Penstock", 512), "Penstock, chunk 512"),
        (Spec("Penstock", 0), "Penstock, whole"),
        (Spec("Penstock", 1), "Penstock, token by token"),
        (Spec("Penstock", AUTO), "Penstock, auto"),
        (Spec("Penstock", 512, False), "Penstock, chunk 512, no tiles"),
        (Spec("transformers", 0), "transformers, whole"),
    ],
)
def test_labels_tell_systems_apart(spec: Spec, label: str) -> None:
    assert spec.label == label


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_all_systems_give_the_same_tokens(family: str) -> None:
    """In float32 all of them are right; and what they say is cached is what is cached."""
    prompt = random_prompt(70)
    specs = [Spec("Penstock", 24), Spec("Penstock", 0), Spec("Penstock", 24, False), Spec("Penstock", 1)]
    specs += [Spec("transformers", 0), Spec("transformers", 24)]
    found = load_systems(specs, make_oracle(family).folder, "float32")
    answers = {spec: ask(system, prompt, 3) for spec, system in found.items()}
    assert len({answer.token_ids for answer in answers.values()}) == 1
    assert all(answer.first_token_s > 0 for answer in answers.values())
    sizes = {answer.cache_bytes for answer in answers.values()}
    assert min(sizes) > 0
    if family == "llama":
        assert sizes == {72 * 2 * 2 * 2 * 16 * 4}  # tokens, K and V, layers, heads of 16, float32


def test_automatic_chunks_are_those_of_an_llm(tiny: Path) -> None:
    llm = LLM(tiny, dtype="float32", chunk=AUTO)
    found = load_systems([Spec("Penstock", AUTO), Spec("Penstock", 32)], tiny, "float32", llm)
    prompt = list(range(100))
    answers = {ask(system, prompt, 3).token_ids for system in found.values()}
    assert len(answers) == 1


class Scripted:
    """A system that does as it is told."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> None:
        for token in self.tokens:
            on_token(token)


def test_a_system_gives_as_many_tokens_as_are_asked_for() -> None:
    answer = ask(Scripted([5, 6]), [1], 2)
    assert answer.token_ids == (5, 6)
    assert answer.decode_tokens_per_s is not None
    assert ask(Scripted([5]), [1], 1).decode_tokens_per_s is None
    with pytest.raises(PeerError, match="gave 2 tokens where 3 were asked for"):
        ask(Scripted([5, 6]), [1], 3)


def test_a_process_stamps_its_tokens_itself(engine: str, tmp_path: Path) -> None:
    with Child(engine, "slow") as slow:
        assert slow.ask("load", token_s=0.02) == {"about": "an engine that sleeps"}
        for _ in range(2):
            answer = ask(slow, [5, 6], 4)
            assert answer.token_ids == (6, 7, 8, 9)
            assert answer.first_token_s >= 0.02
            assert answer.total_s >= 0.08
            assert answer.decode_tokens_per_s is not None
            assert answer.decode_tokens_per_s <= 50
        slow.ask("prepare", output=str(tmp_path / "made"))
        inner = slow._process
        assert inner.poll() is None
    assert (tmp_path / "made").read_text() == "made"
    assert inner.returncode == 0
    slow.close()  # once more does nothing


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"token_s": 0, "is_broken": True}, "x failed: RuntimeError: no weights in two lines"),
        ({"token_s": 0.001, "dies": True}, "x ended (exit 7): out of luck"),
        ({"token_s": 0.001, "too_many": 1}, "x gave 3 tokens where 2 were asked for"),
    ],
)
def test_what_goes_wrong_is_told_in_a_line(engine: str, settings: dict[str, Any], expected: str) -> None:
    def load_and_generate() -> None:
        with Child(engine, "x") as process:
            process.ask("load", **settings)
            ask(process, [1], 2)

    with pytest.raises(PeerError) as raised:
        load_and_generate()
    assert str(raised.value) == expected


def test_a_killed_process_answers_nothing(engine: str) -> None:
    with Child(engine, "x") as process:
        process.ask("load", token_s=0.0)
        process.kill()
        for _ in range(2):
            with pytest.raises(PeerError, match="exit -9"):
                ask(process, [1], 1)


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
def test_nonsense_is_not_believed(line: str, tmp_path: Path) -> None:
    python = saying(tmp_path, line)
    with Child("e:E", "x", python) as process, pytest.raises(PeerError, match="not understood"):
        ask(process, [1], 2)


@pytest.mark.parametrize("stamps", ["[2, 1]", "[0, 1]"])
def test_times_must_follow_each_other(stamps: str, tmp_path: Path) -> None:
    python = saying(tmp_path, f'{{"ok": {{"token_ids": [1, 2], "stamps_s": {stamps}}}}}')
    with Child("e:E", "x", python) as process, pytest.raises(PeerError, match="do not follow"):
        ask(process, [1], 2)


def test_waiting_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "_END_TIMEOUT_S", 0.2)
    process = Child("e:E", "x", program(tmp_path, "import time; time.sleep(600)"))
    with pytest.raises(PeerError, match=r"no answer in 0\.2 s"):
        process.ask("load", timeout_s=0.2)
    started = time.monotonic()
    process.close()  # it does not end by itself, and is ended
    assert time.monotonic() - started < 300
    assert process._process.returncode != 0


def test_what_cannot_be_started_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"x cannot be started: .*nowhere"):
        Child("e:E", "x", tmp_path / "nowhere")
    with (
        Child("no_such_engine:Engine", "x") as process,
        pytest.raises(PeerError, match="ModuleNotFoundError"),
    ):
        process.ask("load")


def test_scripts_for_other_environments_import_nothing_of_ours() -> None:
    for path in Path(child_script.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert not any(
            f"{verb} {name}" in text for verb in ("import", "from") for name in ("penstock", "benchmarks")
        )


@pytest.mark.skipif(not can_measure_growth(), reason="needs Linux's /proc")
def test_growth_is_that_of_a_fresh_process() -> None:
    folder, prompt = make_oracle("llama").folder, random_prompt(128)
    grown = growth_of(Spec("Penstock", 64), folder, "float32", prompt)
    assert grown.cache_bytes == 128 * 2 * 2 * 2 * 16 * 4
    assert grown.activation_mib == (grown.growth_bytes - grown.cache_bytes) / 2**20
    with pytest.raises(MeasurementError, match="the process that measures"):
        growth_of(Spec("Penstock", 64), folder / "nowhere", "float32", prompt)
