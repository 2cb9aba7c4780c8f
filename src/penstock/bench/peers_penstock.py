"""Penstock, as an engine that `peer_workers/serve.py` runs."""

import inspect
from typing import Any

import torch

import penstock
from penstock.bench.sweep_systems import AutoSystem
from penstock.bench.sweep_workload import AUTO
from penstock.bench.systems import OnToken, PenstockSystem, SystemName
from penstock.engine.llm import LLM
from penstock.errors import SettingError


def describe() -> str:
    return f"penstock {penstock.__version__}, torch {torch.__version__}"


def load(settings: dict[str, Any]) -> Any:
    """`weights`, where it is given, is the form that weights are kept in."""
    more: dict[str, Any] = {}
    if settings.get("weights") is not None:
        if "weights" not in inspect.signature(LLM).parameters:
            raise SettingError("weights is no setting of this version: leave it out")
        more["weights"] = settings["weights"]
    chunk = settings["chunk"]
    llm = LLM(settings["model"], dtype=settings["dtype"], chunk=chunk, threads=settings["threads"], **more)
    system = (
        AutoSystem(llm) if chunk == AUTO else PenstockSystem(SystemName.PENSTOCK, llm.model, llm.canon, chunk)
    )

    def generate(prompt: list[int], num_tokens: int, on_token: OnToken) -> None:
        system.generate(prompt, num_tokens, on_token)

    return generate
