"""Where a decode step's time goes: what is counted is of the step, and counting leaves nothing behind."""

import json
from pathlib import Path

import pytest

from penstock.bench.__main__ import main
from penstock.bench.decode_profile import StepShares, profile_decodes
from penstock.engine.llm import LLM
from penstock.plan.settings import WeightsName


@pytest.mark.parametrize("weights", ["auto", "bf16"])
def test_parts_make_up_the_step(smollm2_path: Path, weights: WeightsName) -> None:
    llm = LLM(smollm2_path, weights=weights)
    kernels = llm.model.kernels
    first, second = profile_decodes(llm, range(600), [64, 599], 3)
    for step, past in ((first, 64), (second, 599)):
        parts = (step.products_s, step.attention_s, step.small_s, step.rest_s)
        assert step.past == past
        assert min(parts) > 0
        assert max(parts) < step.step_s
        assert 0 < step.share < 1
    assert llm.model.kernels is kernels
    assert llm.model.dense_layers is None or llm.model.dense_layers.spent is None


def test_command(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made" / "decode.json"
    options = ["--model", str(smollm2_path), "--pasts", "32", "--steps", "2", "--json", str(output)]
    assert main(["decode", *options]) == 0
    (step,) = json.loads(output.read_text())["steps"]
    shown = StepShares(**{name: value for name, value in step.items() if name != "share"})
    assert shown.share == step["share"]
    assert f"| 32 tokens | {1e3 * shown.step_s:.2f} ms |" in capsys.readouterr().out
    assert main(["decode", "--model", str(smollm2_path), "--pasts", "100000"]) == 2
    assert "100001 tokens" in capsys.readouterr().err
