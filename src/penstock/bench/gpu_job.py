"""What every section of the measurements on a GPU is given."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.bench.gpu_device import free_memory
from penstock.bench.gpu_models import Subject, load_subject, random_weights
from penstock.bench.gpu_results import Ledger
from penstock.bench.gpu_workload import GpuModel, GpuPlan
from penstock.measure.prompts import random_tokens
from penstock.measure.random_weights import RandomWeights


@dataclass(frozen=True)
class GpuJob:
    """What to measure, on what, how often, and who is told."""

    plan: GpuPlan
    device: torch.device
    ledger: Ledger
    repeats: int
    with_peer: bool = True
    peer_limit: int = 0  # tokens of the longest prompt that transformers reads
    dtype: torch.dtype = torch.bfloat16

    def weights(self, model: GpuModel, **changes: Any) -> RandomWeights:
        """Of a model with some settings changed."""
        return random_weights(str(model), {**self.plan.models[model], **changes}, self.device)

    def subject(self, model: GpuModel, **changes: Any) -> Subject:
        return load_subject(self.weights(model, **changes), self.dtype, self.device)

    def prompt(self, model: GpuModel, num_tokens: int) -> Sequence[int]:
        return random_tokens(self.plan.models[model]["vocab_size"], num_tokens)

    def repeating(self, repeats: int) -> "GpuJob":
        return replace(self, repeats=repeats)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """A part of a section that may fail by itself: that is reported, and the section goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.ledger.failed(what, error)
        free_memory(self.device)
