"""`penstock verify` on models that keep the laws: what it says, writes, and how it exits."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock.bench.verify as command
from penstock.bench.plot import can_plot
from penstock.bench.verify_runs import Subject, run_chunks
from penstock.engine.llm import LLM
from penstock.frontends.bench import run_program
from tests.bench.verifying import FAMILIES, folder_of, home, plant
from tests.byte_models import CONTEXT
from tests.oracle import run_prompt


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(home()))


@pytest.mark.parametrize(
    ("family", "dtype", "more"),
    [
        ("llama", "float32", ["--reference", "transformers", "--strict"]),
        ("llama", "bfloat16", []),
        ("qwen3_moe", "float32", ["--reference", "transformers"]),
        ("qwen3_5_text", "float32", ["--reference", "transformers"]),
        ("qwen3_5_text", "bfloat16", ["--strict"]),
    ],
)
def test_models_that_keep_the_laws(family: str, dtype: str, more: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    arguments = [
        "--model",
        str(folder_of(family)),
        "--dtype",
        dtype,
        "--tokens",
        "200",
        "--chunks",
        "1,64,100",
    ]
    assert command.main([*arguments, "--max-tokens", "4", "--json", str(output), *more]) == 0
    found = json.loads(output.read_text())
    assert found["passed"]
    assert found["probe"]["same_bits"]
    ways = {each["name"]: each for each in found["comparisons"]}
    is_hybrid = family == "qwen3_5_text"
    for name in ("token by token", "chunks of 64", "chunks of 100", "chunks of 192, overlap 64"):
        must_be_same = ways[name]["law"]["bits_until"] > 0
        assert must_be_same == (not is_hybrid or name not in ("token by token", "chunks of 100"))
        if must_be_same:
            assert ways[name]["logits"]["all_same"]
            assert ways[name]["cache"]["all_same"]
            assert ways[name]["cache"]["largest_absolute"] == 0
        assert ways[name]["logits"]["positions"] == list(range(203))
        assert ways[name]["greedy"]["num_tokens"] == 203
    assert ways["overlap 64: keys, values computed twice"]["cache"]["positions"] == list(range(128, 192))
    assert any(name.startswith("batched against alone") for name in ways)
    assert sum("random chunks" in name for name in ways) == 2
    if "--reference" in more:
        theirs = ways["transformers, float32"]
        assert 0 < theirs["logits"]["largest_relative"] < 1e-4
        assert theirs["greedy"]["num_equal"] == 203


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(folder_of("qwen3_5_text")), "--tokens", "130", "--chunks", "64,100"]
    assert command.main([*arguments, "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    for words in ("same bits: yes", "kernels", "chunks of 64", "within 0.0001", "PASS: all", "torch "):
        assert words in printed
    assert "FAIL" not in printed
    assert "logits differ at" in printed  # chunks of 100, as they may
    assert "token by token" not in printed


@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_the_plot(family: str, tmp_path: Path) -> None:
    plot = tmp_path / "out.png"
    arguments = [
        "--model",
        str(folder_of(family)),
        "--tokens",
        "130",
        "--chunks",
        "64,100",
        "--plot",
        str(plot),
    ]
    assert command.main(arguments) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_prompt_from_a_file(tmp_path: Path) -> None:
    prompt, output = tmp_path / "prompt.txt", tmp_path / "out.json"
    prompt.write_text("Wasser, überall Wasser.")
    arguments = ["--model", str(folder_of("llama")), "--prompt-file", str(prompt), "--json", str(output)]
    assert command.main([*arguments, "--chunks", "1,7,512", "--max-tokens", "2"]) == 0
    found = json.loads(output.read_text())
    assert found["num_prompt"] == len("Wasser, überall Wasser.".encode())
    names = [each["name"] for each in found["comparisons"]]
    assert "chunks of 7" in names
    assert "chunks of 512" not in names  # the whole prompt once more


@pytest.mark.parametrize("num_tokens", ["2", "3", "5"])
def test_prompts_of_a_few_tokens(num_tokens: str) -> None:
    for family in FAMILIES:
        assert (
            command.main(["--model", str(folder_of(family)), "--tokens", num_tokens, "--max-tokens", "1"])
            == 0
        )


def test_nothing_is_claimed_where_the_probe_found_nothing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(monkeypatch, lambda llm: setattr(llm, "probe", replace(llm.probe, attention_holds=False)))
    output = tmp_path / "out.json"
    arguments = [
        "--model",
        str(folder_of("llama")),
        "--tokens",
        "70",
        "--chunks",
        "64",
        "--json",
        str(output),
    ]
    assert command.main(arguments) == 0
    assert all(each["law"]["bits_until"] == 0 for each in json.loads(output.read_text())["comparisons"])
    assert "nothing is claimed bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--tokens", str(CONTEXT)], f"context of {CONTEXT}"),
        (["--tokens", "1"], "at least 2"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
        (["--prompt-file", "/"], "--prompt-file /"),
        (["--tokens", "20", "--overlap", "19"], "at most 18"),
        (["--json", "/no/such/folder/out.json"], "--json"),
        (["--plot", "/"], "--plot"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--model", str(folder_of("llama")), *arguments]) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert printed[-1].startswith("error: ")
    assert words in printed[-1]
    assert "Traceback" not in "".join(printed)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--chunks", "0"],
        ["--chunks", "7,x"],
        ["--tolerance", "0"],
        ["--tolerance", "nan"],
        ["--overlap", "-1"],
    ],
)
def test_options_that_mean_nothing_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments)
    assert exit_.value.code == 2


def test_a_failure_of_the_program_is_no_broken_law(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a kernel\nof two lines")

    plant(monkeypatch, lambda llm: setattr(llm.model.kernels, "attend", fail))
    assert command.main(["--model", str(folder_of("llama")), "--tokens", "20"]) == 2
    assert "RuntimeError: a kernel" in capsys.readouterr().err.splitlines()[-1]


def test_memory_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def verify_memory(arguments: list[str]) -> int:
        given.append(arguments)
        return 7

    monkeypatch.setattr("penstock.bench.verify_memory.main", verify_memory)
    assert command.main(["--quick", "--memory", "--json", "x"]) == 7
    assert given == [["--quick", "--json", "x"]]


def test_the_program_and_its_exit_status() -> None:
    program = [sys.executable, "-m", "penstock.bench.verify", "--model", "/no/such/model"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert run_program([sys.executable, "-c", "raise SystemExit(1)"]) == 1


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_watched_logits_are_those_of_a_prompt_that_ends_there(family: str) -> None:
    llm = LLM(folder_of(family), dtype="float32", chunk=0)
    prompt = [(7 * index) % 250 for index in range(150)]
    subject = Subject(llm.model, llm.canon, llm.tokenizer, tuple(prompt), 2)
    for chunk_size, overlap in ((0, 0), (41, 0), (60, 20)):
        trace = run_chunks(subject, chunk_size=chunk_size, overlap=overlap)
        for position in (0, 1, 40, 63, 64, 127, 149):
            logits = run_prompt(llm.model, prompt[: position + 1], canon=llm.canon).logits
            assert logits is not None
            assert torch.equal(trace.logits[position], logits)


def test_positions_are_few_where_logits_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder_of("llama"), dtype="float32", chunk=0)
    monkeypatch.setattr("penstock.bench.verify_runs._LOGITS_BYTES", 4 * 256 * 100)
    subject = Subject(llm.model, llm.canon, llm.tokenizer, tuple([1] * 1000), 10)
    positions = subject.positions
    assert len(positions) <= 101
    assert list(positions) == sorted(set(positions))
    assert set(positions) >= {0, 255, 256, 257, 511, 512, *range(999, 1009)}
    trace = run_chunks(subject, chunk_size=300)
    assert not math.isnan(float(trace.logits.sum()))
