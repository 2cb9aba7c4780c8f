"""Which tensors of a file a fused matrix is made of, and which of its outputs are stored alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.quantised import BlockForm
from penstock.models.source import WeightSource


@dataclass(frozen=True)
class Part:
    """A tensor of the file as rows of a larger one: from `start` on, or its row i as row `places[i]`."""

    name: str
    start: int = 0
    places: Tensor | None = None

    def outputs(self, source: WeightSource) -> Tensor:
        """Where its rows go [rows]."""
        if self.places is not None:
            return self.places
        return torch.arange(self.start, self.start + source.shape(self.name)[0])


@dataclass(frozen=True)
class Run:
    """Outputs [start, end) of a matrix, with the tensors that some of them come from, all stored in one form, or none
    of them in blocks."""

    start: int
    end: int
    form: BlockForm | None
    parts: tuple[Part, ...]


def runs_of(source: WeightSource, parts: Sequence[Part], height: int) -> list[Run]:
    """The longest runs that make up a matrix of so many outputs. Outputs that no tensor has, which are zero, go with
    those before them."""
    forms = list(dict.fromkeys(source.block_form(part.name) for part in parts))
    if len(forms) == 1:
        return [Run(0, height, forms[0], tuple(parts))]
    owners: dict[BlockForm | None, list[Part]] = {form: [] for form in forms}
    stored = torch.full((height,), -1)  # by output, the index of its form
    for part in parts:
        form = source.block_form(part.name)
        stored[part.outputs(source)] = forms.index(form)
        owners[form].append(part)
    known = torch.where(stored < 0, 0, torch.arange(height)).cummax(0).values
    kinds, lengths = torch.unique_consecutive(stored[known].clamp_min(0), return_counts=True)
    ends = lengths.cumsum(0).tolist()
    return [
        Run(start, end, forms[kind], tuple(owners[forms[kind]]))
        for start, end, kind in zip([0, *ends[:-1]], ends, kinds.tolist(), strict=True)
    ]


def interleaved(num_heads: int, sizes: Sequence[int], starts: Sequence[int]) -> Tensor:
    """Where rows go that a file has head by head, for each head `sizes` rows of several parts: the parts begin at
    `starts`."""
    parts = [
        start + torch.arange(num_heads * size).view(num_heads, size)
        for size, start in zip(sizes, starts, strict=True)
    ]
    return torch.cat(parts, dim=1).flatten()
