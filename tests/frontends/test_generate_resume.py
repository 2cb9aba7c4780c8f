"""A prompt whose reading was interrupted goes on where it stopped."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from penstock.cache import BLOCK_TOKENS
from tests.frontends.conftest import INTERRUPTED_AT, INTERRUPTIBLE, Generate

LONG = "Every sluice has its hour. " * 180  # nearly 5,000 tokens of one byte each
TIMEOUT_S = 120


def test_after_an_interrupt_the_rest_is_read(
    start: Callable[..., "subprocess.Popen[bytes]"], generate: Generate, tmp_path: Path
) -> None:
    arguments = ("--prompt", LONG, "--max-tokens", "6", "--json")
    keeping = (*arguments, "--cache-dir", str(tmp_path))
    interrupted = INTERRUPTIBLE + INTERRUPTED_AT.format(num_tokens=2 * BLOCK_TOKENS)
    first = start(*keeping, "--chunk", "8", before=interrupted)
    stdout, _ = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 130
    cancelled = json.loads(stdout)
    assert cancelled["finish_reason"] == "cancelled"
    num_read = sum(record["end"] - record["start"] for record in cancelled["prefill"]["records"])
    num_kept = num_read // BLOCK_TOKENS * BLOCK_TOKENS
    assert num_kept > 0

    stdout, stderr = start(*keeping).communicate(timeout=TIMEOUT_S)
    resumed = json.loads(stdout)
    assert resumed["usage"]["cached_tokens"] == num_kept
    assert resumed["prefill"]["records"][0]["start"] == num_kept
    total = resumed["usage"]["prompt_tokens"]
    assert (
        f"{num_kept:,} of {total:,} tokens were in the cache: reading goes on from there\n" in stderr.decode()
    )
    assert resumed["token_ids"] == json.loads(generate(*arguments).stdout)["token_ids"]
