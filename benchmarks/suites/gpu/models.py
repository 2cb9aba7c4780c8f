"""Random models on a GPU, loaded and probed. A process whose start is timed imports this, and no more."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.cache.space import CacheSpace
from penstock.engine.run import Run
from penstock.kernels.device import device_kind
from penstock.kernels.interface import Kernels, select_kernels
from penstock.kernels.probe import ProbeResult, probe
from penstock.measure.random_weights import RandomWeights
from penstock.models.decoder import Decoder
from penstock.models.loading import load_decoder
from penstock.plan import ChunkedPrefillConfig
from penstock.plan.grids import RowLaw
from penstock.plan.weight_settings import WeightsName


@dataclass(frozen=True)
class Subject:
    """A model that is ready to run."""

    model: Decoder
    canon: RowLaw
    found: ProbeResult

    def space(self, num_tokens: int, num_sequences: int = 1) -> CacheSpace:
        """Room for sequences of so many tokens together, and for their states with steps in flight."""
        num_slots = 1 + device_kind(self.model.device).steps_in_flight
        return CacheSpace.for_tokens(self.model, num_tokens, num_slots=num_slots * num_sequences)

    def first_token(self, space: CacheSpace, prompt: Sequence[int], chunk: int) -> int:
        """Read a prompt, of which nothing is cached, and choose the token after it."""
        config = ChunkedPrefillConfig(chunk)
        run = Run(self.model, prompt, config=config, canon=self.canon, max_tokens=1, space=space)
        while run.finish_reason is None:
            run.step()
        return run.generated[0]


def load_subject(
    weights: RandomWeights, dtype: torch.dtype, device: torch.device, form: WeightsName = "auto"
) -> Subject:
    """Load and probe."""
    model = load_decoder(weights, kernels_of(device), dtype, device, form)
    found = probe(model.kernels, model.probe_shapes, dtype, device)
    return Subject(model, found.bind(model.kernels), found)


def load_untiled(weights: RandomWeights, dtype: torch.dtype, device: torch.device, chunk: int) -> Subject:
    """The same kernels in the fastest way for chunks of this size: each is its own tile, and no product is padded.
    Its bits depend on the chunk."""
    model = load_decoder(weights, kernels_of(device, chunk), dtype, device)
    as_it_is = ProbeResult(
        row_floor=1, row_slab=0, attention_holds=False, passes_hold=False, head_holds=False
    )
    return Subject(model, as_it_is.bind(model.kernels), as_it_is)


def kernels_of(device: torch.device, tile_size: int | None = None) -> Kernels:
    """The device's kernels, with their own tile unless another is given."""
    kernels = select_kernels(device)
    return kernels if tile_size is None else type(kernels)(tile_size)


class ReadyEngine:
    """A process that makes a model ready on a device, and says when it was, by the clock that all processes share."""

    def ready(self, name: str, settings: dict[str, Any], dtype: str, device: str) -> dict[str, float]:
        imported, place = time.monotonic(), torch.device(device)
        load_subject(RandomWeights(name, settings, place), getattr(torch, dtype), place)
        device_kind(place).synchronize()
        return {"imported_s": imported, "ready_s": time.monotonic()}
