"""A random model: made once, made again where it is broken, and one in which every token matters."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5TextConfig

from benchmarks.models import HYBRID, pieces, random_hybrid, random_subject
from penstock.errors import ContextLengthError, ModelError
from penstock.measure.transformers_model import load_transformers
from penstock.models.hf.config import hf_model_config
from penstock.models.hf.folder import HfFolder
from penstock.models.reading import Fields
from tests.models.hybrids import hybrid_settings
from tests.oracle import random_prompt

SMALL = hybrid_settings("qwen3_5_text", tie_word_embeddings=True)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_it_is_made_once(home: Path) -> None:
    said: list[str] = []
    folder = random_hybrid(said.append, SMALL)
    assert folder.parent == home / "bench"
    made = (folder / "model.safetensors").stat()
    assert random_hybrid(said.append, SMALL) == folder
    assert (folder / "model.safetensors").stat() == made
    assert len(said) == 1
    assert list(folder.parent.iterdir()) == [folder]


def test_the_name_follows_from_what_it_is() -> None:
    folder = random_hybrid(print, SMALL)
    assert random_hybrid(print, SMALL, seed=1) != folder
    assert random_hybrid(print, SMALL | {"intermediate_size": 96}) != folder


@pytest.mark.parametrize("damage", ["cut off", "no weights", "no configuration", "another shape"])
def test_a_broken_one_is_made_again(damage: str) -> None:
    folder = random_hybrid(print, SMALL)
    whole, state = weights(folder), torch.get_rng_state()
    match damage:
        case "cut off":
            (folder / "model.safetensors").write_bytes(whole[:-100])
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "no configuration":
            (folder / "config.json").write_text("{")
        case "another shape":
            config = folder / "config.json"
            config.write_text(
                config.read_text().replace('"intermediate_size": 80', '"intermediate_size": 88')
            )
    assert random_hybrid(print, SMALL) == folder
    # The same bits once more, and nobody else's random numbers were used up.
    assert weights(folder) == whole
    assert torch.equal(torch.get_rng_state(), state)


def test_a_folder_that_cannot_be_written_is_one_line(home: Path) -> None:
    home.write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="cannot keep a model in"):
        random_hybrid(print, SMALL)


def test_nothing_explodes_and_an_early_token_matters() -> None:
    source = HfFolder(random_hybrid(print, SMALL))
    model = load_transformers(source, torch.float32)
    source.close()
    prompt = torch.tensor([random_prompt(200, vocab_size=96)])
    other = prompt.clone()
    other[0, 100] = (other[0, 100] + 1) % 96
    with torch.inference_mode():
        states = model(prompt, output_hidden_states=True).hidden_states
        ends = [model(tokens).logits[0, -1] for tokens in (prompt, other)]
    assert all(0 < state.abs().max() < 100 for state in states)
    assert not torch.equal(*ends)


def test_the_default_has_the_published_shapes() -> None:
    values = Qwen3_5TextConfig(**HYBRID).to_dict()
    config = hf_model_config(Fields("config.json", values), Fields("generation_config.json", {}))
    net = config.delta_net
    assert net is not None
    assert (config.attention_layers, net.layers) == ((3, 7), (0, 1, 2, 4, 5, 6))
    assert (config.rotary_dim, config.rotary.theta, config.tied_head) == (64, 10_000_000.0, True)
    assert (net.conv_size, net.conv_kernel, config.head_dim, config.num_kv_heads) == (6144, 4, 256, 2)


def test_a_subject_gives_parts_of_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.models.random_hybrid", lambda say: random_hybrid(say, SMALL))
    subject = random_subject(print)
    parts = pieces(subject, [5, 3, 4])
    assert [token for part in parts for token in part] == list(subject.prompt(12))
    assert [len(part) for part in parts] == [5, 3, 4]
    longest = subject.config.max_position
    subject.require_room(longest - 1, 1, "less")
    with pytest.raises(ContextLengthError, match="give less"):
        subject.require_room(longest, 1, "less")
