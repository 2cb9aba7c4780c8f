"""`penstock verify` on models that keep the laws: what it finds, writes, and how it exits."""

import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.llm import LLM
from penstock.measure.traces import Subject, run_chunks
from penstock.measure.verify import (
    DEFAULT_CHUNKS,
    DEFAULT_MAX_TOKENS,
    DEFAULT_OVERLAP,
    DEFAULT_TOKENS,
    TOLERANCES,
)
from tests.byte_models import CONTEXT
from tests.measure.verifying import FAMILIES, Verify, assert_refused, folder_of, home, plant, run_command
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
def test_models_that_keep_the_laws(family: str, dtype: str, more: list[str], verify: Verify) -> None:
    found = verify(family, "--dtype", dtype, "--tokens", "200", "--chunks", "1,64,100", *more)
    assert found.plain["probe"]["same_bits"]
    for name in ("token by token", "chunks of 64", "chunks of 100", "chunks of 192, overlap 64"):
        way = found.way(name)
        must_be_same = way["law"]["bits_until"] > 0
        is_hybrid = family == "qwen3_5_text"
        assert must_be_same == (not is_hybrid or name not in ("token by token", "chunks of 100"))
        if must_be_same:
            assert way["logits"]["all_same"]
            assert way["cache"]["all_same"]
            assert way["cache"]["largest_absolute"] == 0
        assert way["logits"]["positions"] == list(range(203))
        assert way["greedy"]["num_tokens"] == 203
    twice = found.way("overlap 64: keys, values computed twice")
    assert twice["cache"]["positions"] == list(range(128, 192))
    assert any(name.startswith("batched against alone") for name in found.names)
    assert sum("random chunks" in name for name in found.names) == 2
    if "--reference" in more:
        theirs = found.way("transformers, float32")
        assert 0 < theirs["logits"]["largest_relative"] < 1e-4
        assert theirs["greedy"]["num_equal"] == 203


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_the_report_and_the_picture(family: str, verify: Verify, tmp_path: Path) -> None:
    plot = tmp_path / "out.png"
    picture = [] if find_spec("matplotlib") is None else ["--plot", str(plot)]
    found = verify(family, "--tokens", "130", "--chunks", "64,100", *picture)
    for words in ("same bits: yes", "kernels", "chunks of 64", "within 0.0001", "PASS: all"):
        assert words in found.printed
    assert "FAIL" not in found.printed
    assert ("logits differ at" in found.printed) == (family == "qwen3_5_text")  # chunks of 100, as they may
    assert "token by token" not in found.printed
    assert not picture or plot.read_bytes().startswith(b"\x89PNG")


def test_a_prompt_from_a_file(verify: Verify, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Wasser, überall Wasser.\n")
    found = verify("llama", "--prompt-file", str(prompt), "--chunks", "1,7,512")
    assert found.plain["num_prompt"] == len("Wasser, überall Wasser.\n".encode())  # as it is
    assert "chunks of 7" in found.names
    assert "chunks of 512" not in found.names  # the whole prompt once more


@pytest.mark.parametrize("num_tokens", ["2", "3", "5"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_a_few_tokens(family: str, num_tokens: str, verify: Verify) -> None:
    verify(family, "--tokens", num_tokens, "--max-tokens", "1")


def test_nothing_is_claimed_where_the_probe_found_nothing(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda llm: setattr(llm, "probe", replace(llm.probe, attention_holds=False)))
    found = verify("llama", "--tokens", "70", "--chunks", "64")
    assert all(each["law"]["bits_until"] == 0 for each in found.plain["comparisons"])
    assert "nothing is claimed bit for bit" in found.printed


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model", "/no/such/model"], 3, "/no/such/model"),
        (["--tokens", str(CONTEXT)], 2, f"context of {CONTEXT}"),
        (["--tokens", "1"], 2, "at least 2"),
        (["--prompt-file", "/no/such/file"], 2, "/no/such/file"),
        (["--prompt-file", "/"], 2, "--prompt-file /"),
        (["--prompt-file", "x", "--tokens", "7"], 2, "--tokens"),
        (["--tokens", "20", "--overlap", "19"], 2, "at most 18"),
        (["--json", "/dev/null/out.json"], 2, "--json"),
        (["--plot", "/"], 2, "--plot"),
        (["--chunks", "0"], 2, "--chunks"),
        (["--chunks", "7,x"], 2, "--chunks"),
        (["--tolerance", "0"], 2, "--tolerance"),
        (["--tolerance", "nan"], 2, "--tolerance"),
        (["--quick"], 2, "--quick needs --memory"),
        (["--memory", "--strict"], 2, "--strict contradicts --memory"),
    ],
)
def test_a_refusal_is_one_line(arguments: list[str], status: int, words: str) -> None:
    assert_refused(words, "verify", "--model", str(folder_of("llama")), *arguments, status=status)


def test_a_negative_overlap_is_refused() -> None:
    done = run_command("verify", "--overlap", "-1")
    assert done.exit_code == 2
    assert "--overlap" in done.stderr


def test_a_failure_of_the_program_is_no_broken_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a kernel\nof two lines")

    plant(monkeypatch, lambda llm: setattr(llm.model.kernels, "attend", fail))
    done = run_command("verify", "--model", str(folder_of("llama")), "--tokens", "20")
    assert done.exit_code == 1  # as of any command
    assert done.stderr.splitlines()[-1].startswith("penstock: it could not be run: RuntimeError: a kernel")


def test_help_names_the_defaults() -> None:
    """It is written without what it describes, so that it comes at once."""
    text = " ".join(run_command("verify", "--help").stdout.replace("\u2502", " ").split())
    chunks = ",".join(map(str, DEFAULT_CHUNKS))
    for value in (chunks, DEFAULT_TOKENS, DEFAULT_MAX_TOKENS, DEFAULT_OVERLAP):
        assert f"{value} by default" in text
    assert all(f"{value:g} in {name}" in text for name, value in TOLERANCES.items() if "with" not in name)


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
    monkeypatch.setattr("penstock.measure.traces._LOGITS_BYTES", 4 * 256 * 100)
    subject = Subject(llm.model, llm.canon, llm.tokenizer, tuple([1] * 1000), 10)
    positions = subject.positions
    assert len(positions) <= 101
    assert list(positions) == sorted(set(positions))
    assert set(positions) >= {0, 255, 256, 257, 511, 512, *range(999, 1009)}
    trace = run_chunks(subject, chunk_size=300)
    assert not math.isnan(float(trace.logits.sum()))


def test_smollm2(smollm2_path: Path, verify: Verify) -> None:
    model = ["--model", str(smollm2_path), "--dtype", "auto"]
    found = verify(
        "llama", *model, "--tokens", "100", "--chunks", "64", "--max-tokens", "2", "--overlap", "16"
    )
    same_bits = found.plain["probe"]["same_bits"]
    for each in found.plain["comparisons"]:
        assert (each["law"]["bits_until"] > 0) == same_bits
        assert each["cache"]["first_different"] is None or not same_bits or "batched" in each["name"]
