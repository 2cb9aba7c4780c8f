"""What is read by what: a random hybrid in which every token matters, and parts of one prompt."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.models import HYBRID, open_source, pieces, random_subject
from penstock.errors import ContextLengthError
from penstock.measure.transformers_model import load_transformers
from tests.models.hybrids import hybrid_settings
from tests.oracle import random_prompt


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Nothing but the shape is another."""
    path, settings = tmp_path / "small.json", hybrid_settings("qwen3_5_text", tie_word_embeddings=True)
    path.write_text(json.dumps({**settings, "model_type": "qwen3_5_text"}))
    return path


def test_nothing_explodes_and_an_early_token_matters(small: Path) -> None:
    model = load_transformers(open_source(small), torch.float32)
    prompt = torch.tensor([random_prompt(200, vocab_size=96)])
    other = prompt.clone()
    other[0, 100] = (other[0, 100] + 1) % 96
    with torch.inference_mode():
        states = model(prompt, output_hidden_states=True).hidden_states
        ends = [model(tokens).logits[0, -1] for tokens in (prompt, other)]
    assert all(0 < state.abs().max() < 100 for state in states)
    assert not torch.equal(*ends)


def test_weights_are_the_same_each_time_and_rows_are_not(small: Path) -> None:
    ours, again = torch.empty(2, 3000, 64)
    for out in (ours, again):
        open_source(small).load_into("model.embed_tokens.weight", out)
    assert torch.equal(ours, again)
    assert len(ours.unique(dim=0)) == len(ours)


def test_the_default_has_the_published_shapes() -> None:
    config = open_source(HYBRID).config
    net = config.delta_net
    assert net is not None
    assert (config.attention_layers, net.layers) == ((3, 7), (0, 1, 2, 4, 5, 6))
    assert (config.rotary_dim, config.rotary.theta, config.tied_head) == (64, 10_000_000.0, True)
    assert (net.conv_size, net.conv_kernel, config.head_dim, config.num_kv_heads) == (6144, 4, 256, 2)


def test_a_subject_gives_parts_of_one_prompt(small: Path) -> None:
    subject = random_subject(small)
    parts = pieces(subject, [5, 3, 4])
    assert [token for part in parts for token in part] == list(subject.prompt(12))
    assert [len(part) for part in parts] == [5, 3, 4]
    longest = subject.config.max_position
    subject.require_room(longest - 1, 1, "less")
    with pytest.raises(ContextLengthError, match="give less"):
        subject.require_room(longest, 1, "less")
