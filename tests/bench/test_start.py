"""How soon there is progress, and what a loaded model occupies: measured in real processes."""

import json
from pathlib import Path

import pytest

from penstock.bench.__main__ import main
from penstock.measure.growth import can_measure_growth

needs_linux = pytest.mark.skipif(not can_measure_growth(), reason="needs /proc/self/clear_refs")


@needs_linux
def test_command(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "start.json"
    assert main(["start", "--model", str(smollm2_path), "--repeats", "1", "--json", str(output)]) == 0
    written = json.loads(output.read_text())
    (seconds,) = written["progress_s"]
    (resident,) = written["resident_bytes"]
    assert seconds > 0.1
    # The weights are there, and no second copy of them.
    assert 0.9 < resident / smollm2_path.stat().st_size < 1.9
    assert f"after {seconds:.2f} s" in capsys.readouterr().out


def test_a_model_that_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"no model")
    assert main(["start", "--model", str(bad), "--json", str(tmp_path / "start.json")]) == 2
    assert "bad.gguf" in capsys.readouterr().err
