"""What is read by what: a text by a model of one's choice, or random tokens by a random hybrid."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ContextLengthError
from penstock.measure.prompts import random_tokens, text_tokens
from penstock.measure.random_weights import FAMILIES, Mixture, RandomWeights
from penstock.models.hub import resolve_model
from penstock.models.opened import open_model, open_weights
from penstock.models.source import WeightSource
from penstock.plan.model import ModelConfig

# Qwen3.5-0.8B with fewer layers: three delta nets to one full attention, as it has them.
HYBRID = Path(__file__).parent / "random-qwen3.5.json"
# Qwen3-30B-A3B with fewer and smaller layers and experts.
EXPERTS = Path(__file__).parent / "random-qwen3-moe.json"
# The same with more of them: 64, of which 8 are active.
SPARSE = Path(__file__).parent / "random-64-experts.json"


def qwen3(hidden: int, inner: int, layers: int = 28, vocab: int = 151_936) -> Mapping[str, Any]:
    """A dense model of this family whose embedding is the head, too, in transformers' own names."""
    return {
        **FAMILIES["qwen3-0.6b"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }


SHAPES = {"qwen3-0.6b": qwen3(1024, 3072), "qwen3-1.7b": qwen3(2048, 6144)}


def tied(mixture: Mixture) -> Mixture:
    """The embedding, which is the head, too, has a head's form."""
    return lambda name, layers: mixture("lm_head.weight" if name.startswith("model.embed") else name, layers)


@dataclass(frozen=True)
class Subject:
    """A model, and the prompt of any length that it is to read."""

    path: Path
    description: str
    config: ModelConfig
    prompt: Callable[[int], Sequence[int]]

    def require_room(self, num_prompt: int, num_generated: int, advice: str) -> None:
        context = self.config.max_position
        if num_prompt + num_generated > context:
            raise ContextLengthError(
                f"{num_prompt} tokens and {num_generated} generated after them do not fit into the model's context "
                f"of {context} tokens: give {advice}"
            )


def text_subject(model: str) -> Subject:
    path = resolve_model(model)
    opened = open_model(path)
    with closing(opened.source) as source:
        return Subject(path, source.describe(), source.config, partial(text_tokens, opened.tokenizer))


def random_subject(path: Path) -> Subject:
    """Of a configuration."""
    config = open_source(path).config
    return Subject(path, f"{path.stem} (random weights)", config, partial(random_tokens, config.vocab_size))


def open_source(path: Path, device: torch.device | str = "cpu") -> WeightSource:
    """A model's weights; of a configuration alone (JSON) random ones."""
    if path.suffix != ".json":
        return open_weights(path)
    return RandomWeights(path.stem, json.loads(path.read_text()), device)


def pieces(subject: Subject, lengths: Sequence[int]) -> list[Sequence[int]]:
    """Consecutive parts of one text, so that no two prompts begin alike."""
    text, start, found = subject.prompt(sum(lengths)), 0, []
    for length in lengths:
        found.append(text[start : start + length])
        start += length
    return found
