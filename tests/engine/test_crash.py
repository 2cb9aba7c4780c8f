"""A prefill that was killed goes on from its last stored chunk."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cache import BLOCK_TOKENS
from penstock.engine.llm import LLM
from tests.byte_models import model_of_bytes
from tests.engine.crashing import CHUNK, MAX_TOKENS, NUM_PROMPT, prompt_of

NUM_KILLS = 20
MOST_BLOCKS = (NUM_PROMPT - 1) // BLOCK_TOKENS


def crash(folder: Path, cache: Path, seed: int) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.crashing", str(folder), str(cache), str(NUM_KILLS), str(seed)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("family", "seed"), [("llama", 1), ("qwen3_5_text", 2)])
def test_killed_at_any_moment_it_goes_on_from_what_is_stored(family: str, seed: int, tmp_path: Path) -> None:
    folder = model_of_bytes(family, tmp_path / "model")
    cold = LLM(folder, dtype="float32", chunk=CHUNK, threads=1)
    expected = cold.generate(prompt_of(seed), max_tokens=MAX_TOKENS)

    starts = crash(folder, tmp_path / "cache", seed)
    assert len(starts) == NUM_KILLS + 1
    for begun in starts:
        # Never does it read a block again that is stored; a state is needed too, where the model has one.
        goes_on = min(begun["num_stored"], MOST_BLOCKS)
        if family == "qwen3_5_text":
            goes_on = max((count for count in begun["states"] if count <= goes_on), default=0)
        if begun["num_cached"] is not None:
            assert begun["num_cached"] == goes_on * BLOCK_TOKENS
    assert tuple(starts[-1]["answer"]) == expected.token_ids
    # The kills struck while it read, and what was stored grew from one start to the next.
    reached = [begun["num_stored"] for begun in starts]
    assert reached == sorted(reached)
    assert len(set(reached)) > 3
