"""The models that are measured on a GPU: Penstock's and transformers', with the same random weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.cache.space import CacheSpace
from penstock.engine.run import Run
from penstock.kernels.interface import Kernels
from penstock.kernels.probe.probe import ProbeResult, probe
from penstock.kernels.reference.kernels import TorchKernels
from penstock.measure.random_weights import RandomWeights
from penstock.models.decoder import Decoder
from penstock.models.fields import Fields
from penstock.models.hf.config import hf_model_config
from penstock.models.loading import load_decoder
from penstock.plan import ChunkedPrefillConfig
from penstock.plan.grids import RowLaw


@dataclass(frozen=True)
class Subject:
    """A model that is ready to run."""

    model: Decoder
    canon: RowLaw
    found: ProbeResult

    @property
    def device(self) -> torch.device:
        return self.model.device

    def space(self, num_tokens: int, num_sequences: int = 1) -> CacheSpace:
        """Room for sequences of so many tokens together."""
        return CacheSpace.for_tokens(self.model, num_tokens, num_slots=2 * num_sequences)


def random_weights(name: str, settings: Mapping[str, Any], device: torch.device) -> RandomWeights:
    """Settings in transformers' own names."""
    config = hf_model_config(Fields(name, dict(settings)), Fields(name, {}))
    return RandomWeights(name, config, device)


def load_subject(weights: RandomWeights, dtype: torch.dtype, device: torch.device) -> Subject:
    """Load and probe."""
    model = load_decoder(weights, kernels_of(device), dtype, device)
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
    if device.type != "cuda":
        return TorchKernels() if tile_size is None else TorchKernels(tile_size)
    from penstock.kernels.cuda.kernels import CudaKernels  # needs Triton

    return CudaKernels() if tile_size is None else CudaKernels(tile_size)


def first_token(subject: Subject, space: CacheSpace, prompt: Sequence[int], chunk: int) -> int:
    """Read a prompt, of which nothing is cached, and choose the token after it."""
    run = Run(
        subject.model,
        prompt,
        config=ChunkedPrefillConfig(chunk),
        canon=subject.canon,
        max_tokens=1,
        space=space,
    )
    while run.finish_reason is None:
        run.step()
    return run.generated[0]


@torch.inference_mode()
def peer_first_token(model: Any, prompt: Sequence[int], chunk: int) -> int:
    """The same with transformers: slices of the prompt, one after the other, with the cache that it makes itself."""
    token_ids = torch.tensor([prompt], device=model.device)
    cache = None
    for part in torch.split(token_ids, chunk or len(prompt), dim=1):
        output = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
    return int(output.logits[0, -1].argmax())
