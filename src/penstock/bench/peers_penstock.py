"""Penstock, as an engine that `peer_workers/serve.py` runs."""

from dataclasses import dataclass
from typing import Any

import torch

import penstock
from penstock.bench.sweep_systems import AutoSystem
from penstock.bench.sweep_workload import AUTO
from penstock.bench.systems import OnToken, PenstockSystem, SystemName
from penstock.engine.llm import LLM
from penstock.plan import format_bytes


def describe() -> str:
    return f"penstock {penstock.__version__}, torch {torch.__version__}"


@dataclass(frozen=True)
class Loaded:
    """A model that generates, and how its weights lie in memory."""

    system: AutoSystem | PenstockSystem
    weights: str

    def __call__(self, prompt: list[int], num_tokens: int, on_token: OnToken) -> None:
        self.system.generate(prompt, num_tokens, on_token)


def load(settings: dict[str, Any]) -> Loaded:
    """`weights`, where it is given, is the form that weights are kept in."""
    chunk = settings["chunk"]
    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        chunk=chunk,
        threads=settings["threads"],
        weights=settings.get("weights"),
        device="cpu",  # as the others
    )
    if chunk == AUTO:
        return Loaded(AutoSystem(llm), kept_weights(llm))
    return Loaded(PenstockSystem(SystemName.PENSTOCK, llm.model, llm.canon, chunk), kept_weights(llm))


def kept_weights(llm: LLM) -> str:
    """The forms that a model's matrices came to have, what they take, and why, where that was chosen."""
    shapes = llm.model.probe_shapes
    plain = str(llm.model.dtype).removeprefix("torch.")
    products = (*shapes.products, *shapes.expert_products, shapes.head)
    forms = sorted({product.form or plain for product in products if product})
    why = f" ({llm.weights.reason})" if llm.weights.reason else ""
    return f"{', '.join(forms)}, {format_bytes(llm.model.num_weight_bytes)}{why}"
