"""The sweep from the command line: small models, end to end, and what is refused."""

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import penstock.bench.__main__ as command
from penstock.bench import sweep, sweep_llama
from penstock.bench.memory import Growth, Job, measure_growth
from penstock.bench.plot import can_plot
from penstock.bench.sweep_options import parse_sweep_options
from penstock.bench.systems import SystemName, load_systems
from penstock.measure.growth import can_measure_growth
from penstock.models.opened import open_weights
from tests.byte_models import model_of_bytes

THREADS = str(torch.get_num_threads())
# On a machine that runs other tests any time is noise: only whether it is refused is a matter of the limit.
PATIENT = ["--max-spread", "0.99", "--threads", THREADS, "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes("llama", tmp_path_factory.mktemp("sweep") / "model")


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))


@pytest.fixture(autouse=True)
def _quick_collection() -> Iterator[None]:
    """Garbage is collected before every turn: among what is loaded by now it need not be looked for."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_a_small_model_end_to_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "growth_in_fresh_process", _growth_in_this_process)
    output = tmp_path / "sweep.json"
    arguments = [
        "sweep",
        "--model",
        str(folder),
        "--chunks",
        "0,32,auto",
        "--lengths",
        "70",
        "--repeats",
        "3",
    ]
    arguments += ["--decode-tokens", "2", "--baseline", "transformers", "--memory", *PATIENT]
    status = command.main([*arguments, "--json", str(output)])
    written = json.loads(output.read_text())
    noisy = [
        cell for cell in written["cells"] if cell["first_token_s"]["is_noisy"] or cell["total_s"]["is_noisy"]
    ]
    assert status == (command.NOISY_STATUS if noisy else 0)
    cells = {(cell["system"], cell["chunk"]) for cell in written["cells"]}
    measured = {("penstock-whole", 0), ("penstock", 32), ("transformers", 0), ("transformers-chunked", 32)}
    assert cells == {*measured, ("penstock-auto", 0)}
    assert all(len(cell["first_token_s"]["values"]) == 3 for cell in written["cells"])
    assert all(turn["total_s"] >= turn["first_token_s"] > 0 for turn in written["turns"])
    for index in range(3):
        turns = [(turn["system"], turn["chunk"]) for turn in written["turns"] if turn["round"] == index]
        assert sorted(turns) == sorted(cells)
    memory = {(each["system"], each["chunk"]): each for each in written["memory"]}
    assert set(memory) == (measured if can_measure_growth() else set())
    assert all(
        each["growth_bytes"] == each["activation_bytes"] + each["cache_bytes"] for each in memory.values()
    )
    printed = capsys.readouterr().out
    assert "Time to first token, s" in printed
    assert "Penstock, auto" in printed
    assert output.with_suffix(".png").exists() == can_plot()


def _growth_in_this_process(job: Job) -> Growth:
    """What a fresh process does, without the seconds that it takes to start one."""
    with contextlib.closing(open_weights(Path(job.model))) as source:
        systems = load_systems([job.system], source, getattr(torch, job.dtype), job.chunk)
    return measure_growth(systems[job.system], job.prompt)


def test_noise_is_an_exit_status(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real times never lie within a millionth of each other."""
    arguments = ["sweep", "--model", str(folder), "--chunks", "64", "--lengths", "40", "--repeats", "3"]
    arguments += ["--max-spread", "0.000001", "--threads", THREADS, "--dtype", "float32"]
    assert command.main([*arguments, "--json", str(tmp_path / "sweep.json")]) == 3
    printed = capsys.readouterr().out
    assert "noisy" in printed
    assert "end other programs, or give more --repeats" in printed
    (cell,) = json.loads((tmp_path / "sweep.json").read_text())["cells"]
    assert len(cell["first_token_s"]["values"]) == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--repeats", "2"], "--repeats 2 is not accepted: give 3 or more"),
        (["--lengths", "6000"], "context of 6000 tokens"),
        (["--json", "."], "cannot be written"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(
    folder: Path, tmp_path: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["sweep", "--model", str(folder), "--json", str(tmp_path / "x.json"), *arguments]
    assert command.main(given) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert expected in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--chunks", "x"),
        ("--chunks", "-1"),
        ("--chunks", "512,,"),
        ("--chunks", "Auto"),
        ("--baseline", "vllm"),
        ("--max-spread", "0"),
        ("--max-spread", "x"),
        ("--lengths", "0"),
    ],
)
def test_values_are_refused_by_name(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["sweep", f"{option}={value}"])
    assert option in capsys.readouterr().err


def test_options_are_put_in_order() -> None:
    options = parse_sweep_options(["--chunks", "512,0,auto,512", "--lengths", "9,3,9", "--json", "--plot"])
    assert options.chunks == (512, 0, "auto")
    assert options.lengths == (3, 9)
    assert str(options.output) == "bench-results/sweep.json"
    assert str(options.plot) == "bench-results/sweep.png"
    twice = parse_sweep_options(["--baseline", "llama.cpp", "--baseline", "transformers"])
    assert twice.baselines == ("llama.cpp", "transformers")


def test_llama_cpp_is_asked_for_by_name_where_it_is_absent(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_llama, "find_spec", lambda name: None)
    arguments = [
        "sweep",
        "--model",
        str(folder),
        "--baseline",
        "llama.cpp",
        "--json",
        str(tmp_path / "x.json"),
    ]
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert "pip install llama-cpp-python" in said
    assert said.count("\n") == 1


def test_llama_cpp_needs_a_gguf_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_llama, "find_spec", lambda name: SimpleNamespace())
    arguments = [
        "sweep",
        "--model",
        str(folder),
        "--baseline",
        "llama.cpp",
        "--json",
        str(tmp_path / "x.json"),
    ]
    assert command.main(arguments) == 2
    assert "reads GGUF files alone" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_llama_cpp_reads_the_prompt_in_batches(smollm2_path: Path) -> None:
    """Its answer does not depend on the batch, and the turns do not on each other."""
    systems = [sweep_llama.LlamaSystem(smollm2_path, chunk, 64) for chunk in (0, 16)]
    answers = []
    for system in (*systems, *systems):
        tokens: list[int] = []
        system.generate(list(range(100, 140)), 3, tokens.append)
        answers.append(tokens)
    assert systems[0].name is SystemName.LLAMA_CPP
    assert all(answer == answers[0] and len(answer) == 3 for answer in answers)


def test_it_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        command.main(["sweep", "--help"])
    assert exit_status.value.code == 0
    assert "Chunk sizes against prompt lengths" in capsys.readouterr().out
    assert "llama_cpp" not in sys.modules or find_spec("llama_cpp") is not None
