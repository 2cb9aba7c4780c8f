"""`penstock verify` on a real model, in a few seconds."""

import json
from pathlib import Path

import penstock.bench.verify as command


def test_smollm2(smollm2_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    arguments = ["--model", str(smollm2_path), "--tokens", "100", "--chunks", "64", "--max-tokens", "2"]
    assert command.main([*arguments, "--overlap", "16", "--json", str(output)]) == 0
    found = json.loads(output.read_text())
    same_bits = found["probe"]["same_bits"]
    for each in found["comparisons"]:
        assert (each["law"]["bits_until"] > 0) == same_bits
        assert each["cache"]["first_different"] is None or not same_bits or "batched" in each["name"]
