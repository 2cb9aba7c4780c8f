"""What is read by what: a text by a model of one's choice, or random tokens by a random hybrid, made once."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ContextLengthError, ModelError
from penstock.home import cache_home
from penstock.measure.prompts import random_tokens, text_tokens
from penstock.models.hub import resolve_model
from penstock.models.opened import open_model, open_weights
from penstock.models.weights import check_source
from penstock.plan.model import ModelConfig

# Qwen3.5-0.8B with fewer layers: three delta nets to one full attention, as it has them.
HYBRID: Mapping[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
    },
}
_SEED = 0
# A change of how weights are drawn: it gives the model another name, so that no older file is taken for it.
_RECIPE = 1


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


def random_subject(say: Callable[[str], None]) -> Subject:
    path = random_hybrid(say)
    with closing(open_weights(path)) as source:
        config = source.config
        return Subject(path, source.describe(), config, partial(random_tokens, config.vocab_size))


def pieces(subject: Subject, lengths: Sequence[int]) -> list[Sequence[int]]:
    """Consecutive parts of one text, so that no two prompts begin alike."""
    text, start, found = subject.prompt(sum(lengths)), 0, []
    for length in lengths:
        found.append(text[start : start + length])
        start += length
    return found


def random_hybrid(
    say: Callable[[str], None], settings: Mapping[str, Any] = HYBRID, seed: int = _SEED
) -> Path:
    """The folder of a random Qwen3.5 of these settings (transformers' own names) in bfloat16. It is made where
    it is absent or broken, and stays in the cache folder."""
    key = json.dumps([_RECIPE, seed, dict(settings)], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    num_layers, hidden = settings["num_hidden_layers"], settings["hidden_size"]
    folder = cache_home() / "bench" / f"random-qwen3.5-{num_layers}x{hidden}-{digest}"
    try:
        if not _is_usable(folder):
            say(f"making a random model in {folder}")
            _make(folder, settings, seed)
    except OSError as error:
        raise ModelError(
            f"cannot keep a model in {folder.parent}: {error.strerror or error}; "
            "make room, or set PENSTOCK_HOME to another folder"
        ) from error
    return folder


def _is_usable(folder: Path) -> bool:
    """Whether every tensor is there in its shape, in files as long as they say they are."""
    try:
        source = open_weights(folder)
    except ModelError:
        return False
    try:
        check_source(source)
    except ModelError:
        return False
    finally:
        source.close()
    return True


def _make(folder: Path, settings: Mapping[str, Any], seed: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as name:
        made = Path(name) / "model"
        _random_model(settings, seed).save_pretrained(made)
        shutil.rmtree(folder, ignore_errors=True)  # a broken one
        try:
            os.replace(made, folder)
        except OSError:
            if not _is_usable(folder):  # otherwise another process was quicker
                raise


def _random_model(settings: Mapping[str, Any], seed: int) -> Any:
    """transformers draws narrow weights, with which nothing grows from layer to layer. Of the delta nets' heads, its
    own draw would have most forget a token at once; here some remember a few tokens, some hundreds."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**settings), dtype=torch.bfloat16)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("A_log", "dt_bias")):
                    parameter.uniform_(-4.0, 1.0)
    return model
