"""transformers, as an engine that `peer_workers/serve.py` runs. It writes weights for others that read its files."""

import contextlib
import importlib.metadata
from pathlib import Path
from typing import Any

import torch

from penstock.bench.systems import SystemName, TransformersSystem
from penstock.measure.transformers_model import load_transformers
from penstock.models.opened import open_weights


def describe() -> str:
    return f"transformers {importlib.metadata.version('transformers')}, torch {torch.__version__}"


def prepare(settings: dict[str, Any]) -> None:
    """The weights of `model`, unpacked, as a Hugging Face folder `output`."""
    _open(settings).save_pretrained(settings["output"])


def load(settings: dict[str, Any]) -> Any:
    torch.set_num_threads(settings["threads"])
    return TransformersSystem(SystemName.TRANSFORMERS, _open(settings), None).generate


def _open(settings: dict[str, Any]) -> Any:
    with contextlib.closing(open_weights(Path(settings["model"]))) as source:
        return load_transformers(source, getattr(torch, settings["dtype"]))
