"""`penstock generate` on a model with recurrent state, in a checkpoint as it is published."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock import LLM
from penstock.frontends.cli import app
from tests.oracle import make_oracle

DOCUMENT = "Seven sluices, and none of them leaks. " * 8
HybridRun = Callable[..., Result]


@pytest.fixture
def generate(tiny_hybrid: Path) -> HybridRun:
    def run(*arguments: str, **settings: Any) -> Result:
        command = ["generate", "--model", str(tiny_hybrid), "--prompt", DOCUMENT, "--max-tokens", "12"]
        return CliRunner().invoke(app, [*command, *arguments], **settings)

    return run


def test_the_answer_is_transformers_at_any_chunk_size(generate: HybridRun, tiny_hybrid: Path) -> None:
    ids = LLM(tiny_hybrid).tokenize(DOCUMENT)
    expected = make_oracle("qwen3_5_text", vocab_size=256, max_position_embeddings=6000).greedy(ids, 12)
    for chunk in (("--chunk", "0"), ("--chunk", "64"), ("--chunk", "1", "--no-align"), ("--chunk", "100")):
        result = json.loads(generate(*chunk, "--json", "--dtype", "float32").stdout)
        assert result["token_ids"] == expected, chunk


def test_a_size_is_rounded_up_and_the_user_is_told(generate: HybridRun) -> None:
    done = generate("--chunk", "100")
    assert done.exit_code == 0, done.stderr
    assert "128" in done.stderr
    assert "--no-align keeps 100" in done.stderr
    prefill = json.loads(generate("--chunk", "100", "--json").stdout)["prefill"]
    assert (prefill["requested"], prefill["effective"], prefill["same_bits"]) == ("100", 128, True)
    assert "rounded up from 100 to 128" in prefill["reason"]


@pytest.mark.parametrize("chunk", ["1", "3", "100"])
def test_any_size_is_honoured_without_alignment(generate: HybridRun, chunk: str) -> None:
    done = generate("--chunk", chunk, "--no-align", "--json")
    result = json.loads(done.stdout)
    prefill = result["prefill"]
    assert prefill["effective"] == int(chunk)
    assert prefill["chunks"] == -(-result["usage"]["prompt_tokens"] // int(chunk))
    assert not prefill["same_bits"]
    environment = json.loads(generate("--chunk", chunk, "--json", env={"PENSTOCK_PREFILL_ALIGN": "0"}).stdout)
    assert environment["prefill"]["effective"] == int(chunk)


def test_an_overlap_off_the_grid_is_right_too_and_its_bits_are_not_promised(generate: HybridRun) -> None:
    whole = json.loads(generate("--chunk", "0", "--json").stdout)
    overlapping = json.loads(generate("--chunk", "100", "--overlap", "99", "--json").stdout)
    assert overlapping["token_ids"] == whole["token_ids"]
    prefill = overlapping["prefill"]
    assert (prefill["overlap"], prefill["same_bits"]) == (99, False)
    assert "an overlap of 99 is no multiple of 64" in prefill["reason"]


def test_weights_that_are_not_needed_are_named(generate: HybridRun) -> None:
    line = "skipped: 1 multi-token-prediction weight, 1 vision weight"
    assert line in generate().stderr
    assert line not in generate("--quiet").stderr


def test_memory_counts_the_states(generate: HybridRun) -> None:
    memory = json.loads(generate("--json").stdout)["memory"]
    # Three layers: 3 inputs of 160 channels, 4 heads of 16 x 24 in float32; one state is read, one written.
    dtype_bytes = memory["recurrent_bytes"] // 2 // 3 - 4 * 16 * 24 * 4
    assert dtype_bytes in (3 * 160 * 2, 3 * 160 * 4)
