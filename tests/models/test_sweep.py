"""Every decoder of text that transformers has runs as there, or is refused in one line before weights are read."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ModelError
from penstock.kernels.interface import select_kernels
from penstock.models.by_transformers.families import TRIED
from penstock.models.hf.families import FAMILIES
from penstock.models.loading import load_decoder
from penstock.models.opened import open_weights
from tests.engine.test_parity import relative_error
from tests.models.sweep import Case, cases, families, outcome, runner
from tests.oracle import random_prompt, run_prompt
from tests.small import make_multimodal, small_config

SEED, NUM_CASES, NUM_ROWS = 5, 6, 12
LARGE = ("gemma4_text", "gemma4_unified_text", "kolibri1")  # whatever their sizes
RUN = ("penstock", "transformers")


def sample() -> list[Case]:
    """Of all cases of the command."""
    chosen = random.Random(SEED)
    names = chosen.sample([name for name in families() if name in TRIED and name not in LARGE], NUM_CASES)
    rows = chosen.sample([name for name in families() if name in FAMILIES], NUM_ROWS)
    return [chosen.choice(list(cases(name))) for name in names + rows]


@pytest.mark.parametrize("case", sample(), ids=str)
def test_a_field_that_is_moved_changes_what_it_changes_there(case: Case) -> None:
    assert outcome(case).split(":")[0] in ("equal", "refused", "transformers")


def test_every_family_runs_or_has_a_reason(tmp_path: Path) -> None:
    """There are no weights here that could be read."""
    assert [name for name in families() if not runner(name)] == []
    assert sum(runner(name) in RUN for name in families()) >= 80
    for name in (name for name in families() if runner(name) not in RUN):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        with pytest.raises(ModelError) as refusal:
            open_weights(tmp_path)
        assert runner(name) in str(refusal.value)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("phi", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("phi", {"quantization_config": {"quant_method": "fp8"}}),
        ("cwm", {"layer_types": ["chunked_attention"] * 3}),
        ("gemma4_unified_text", {"num_kv_shared_layers": 1}),
        ("mimo_v2_flash", {"n_routed_experts": 9, "n_group": 2}),
        ("gpt2", {"add_cross_attention": True}),
        ("phi", {"num_attention_heads": 0}),
        ("mamba", {}),
        ("llama4_text", {}),
    ],
    ids=str,
)
def test_what_would_be_silently_wrong_is_refused_without_weights(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    values = {**small_config(family).to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError) as refusal:
        open_weights(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("outer", ["llava", "smolvlm", "aria", "llava_next_video", "minicpmv4_6"])
def test_the_text_model_within_a_multimodal_one_is_found(outer: str, tmp_path: Path) -> None:
    oracle, prompt, cpu = make_multimodal(outer, tmp_path), random_prompt(70, 256), torch.device("cpu")
    source = open_weights(tmp_path)
    assert bool(source.config.by_transformers) == (source.config.family not in FAMILIES)
    model = load_decoder(source, select_kernels(cpu), torch.float32, cpu)
    logits = run_prompt(model, prompt, canon=model.kernels.law, chunk_ends=(33, 70)).logits
    assert logits is not None
    assert relative_error(logits, oracle.logits(prompt)) < 1e-4
