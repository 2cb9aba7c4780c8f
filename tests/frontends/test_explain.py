"""`--explain`, and the options that a chunk's size follows from."""

import json
import re

import pytest

from penstock.engine.events import ChunkRecord, auto_reason, usual_size
from penstock.frontends.display import explain_lines
from tests.frontends.conftest import Generate

DOCUMENT = "Seven sluices, and none of them leaks. " * 30  # 1,170 bytes


def test_a_table_by_hand() -> None:
    records = [
        ChunkRecord(0, 512, 0, "default", None, 0.4126, 7 << 20),
        ChunkRecord(512, 600, 512, "latency", 0.0512, 0.0498, 1536, 2048, 3, "step times are being learned"),
    ]
    rows = [re.split(" {2,}", line.strip()) for line in explain_lines(records)]
    assert rows == [
        ["chunk", "tokens", "past", "decodes", "set by", "predicted", "measured", "memory", "measured"],
        ["1", "512", "0", "0", "default", "-", "413 ms", "7.0 MiB", "-"],
        [
            "2",
            "88",
            "512",
            "3",
            "latency",
            "51.2 ms",
            "49.8 ms",
            "1.5 KiB",
            "2.0 KiB",
            "step times are being learned",
        ],
    ]
    assert "measured" not in explain_lines(records[:1])[0].split("memory")[1]
    assert len(explain_lines([])) == 1


def test_why_automatic_chunks_were_as_long() -> None:
    def record(start: int, end: int, rule: str) -> ChunkRecord:
        return ChunkRecord(start, end, start, rule, None, 1.0, None)  # type: ignore[arg-type]

    chunks = [record(0, 64, "latency"), record(64, 192, "latency"), record(192, 200, "end")]
    assert auto_reason(chunks, "") == "auto: 64 to 128 tokens, by the latency target"
    assert usual_size(chunks, 512) == 128
    assert auto_reason([record(0, 100, "end")], "auto: the default") == "auto: the default"
    assert usual_size([record(0, 100, "end")], 512) == 512


def test_explain_tells_of_each_chunk_on_standard_error(generate: Generate) -> None:
    done = generate("--prompt", DOCUMENT, "--max-tokens", "2", "--explain", "--json")
    assert done.exit_code == 0, done.stderr
    prefill = json.loads(done.stdout)["prefill"]
    assert (prefill["requested"], prefill["reason"]) == ("auto", "auto: the default")
    head = next(
        index for index, line in enumerate(done.stderr.splitlines()) if line.startswith("chunk  tokens")
    )
    rows = [line.split() for line in done.stderr.splitlines()[head + 1 :]]
    assert [int(row[1]) for row in rows] == [record["end"] - record["start"] for record in prefill["records"]]
    assert [row[4] for row in rows] == [record["rule"] for record in prefill["records"]]
    assert len(rows) == prefill["chunks"] > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chunk", "256", "--target-itl", "100"), r"target.itl.*contradicts --chunk 256"),
        (("--chunk", "0", "--target-ttft", "100"), r"target.ttft.*contradicts --chunk 0"),
        (("--target-itl", "soon"), r"'?soon'? is not accepted: give a number of milliseconds"),
        (("--max-activation", "8GB"), r"8GB'? is not accepted"),
        (("--max-activation", "2KiB"), r"2.0 KiB.* give at least \d+ bytes$"),
        (("--explain", "--quiet"), r"--explain contradicts --quiet"),
    ],
)
def test_what_cannot_be_kept_is_refused(generate: Generate, options: tuple[str, ...], message: str) -> None:
    done = generate("--prompt", DOCUMENT, "--max-tokens", "2", *options)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert re.search(message, done.stderr.splitlines()[-1]), done.stderr


def test_a_budget_on_the_command_line(generate: Generate) -> None:
    arguments = ("--prompt", DOCUMENT, "--max-tokens", "4", "--json")
    whole = json.loads(generate(*arguments).stdout)
    budget = max(record["predicted_bytes"] for record in whole["prefill"]["records"]) * 9 // 10
    small = json.loads(generate(*arguments, "--max-activation", str(budget)).stdout)
    assert small["token_ids"] == whole["token_ids"]
    assert small["prefill"]["effective"] < 512
    assert all(record["predicted_bytes"] <= budget for record in small["prefill"]["records"])
    refused = generate(*arguments, "--chunk", "512", "--max-activation", str(budget))
    assert refused.exit_code == 2
    assert re.search(
        r"a chunk of 512 needs .* or use a chunk of \d+ at most$", refused.stderr.splitlines()[-1]
    )
