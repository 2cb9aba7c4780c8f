"""The experts of a layer as one, where kernels can run them so."""

from typing import Protocol

from torch import Tensor

from penstock.kernels.quantised import Weight


class GroupedExperts(Protocol):
    """All experts of a layer: from a router's scores to what the layer adds to the residual."""

    @property
    def one(self) -> tuple[Weight, Weight]:
        """The weights of an expert, [2 * width, hidden] and [hidden, width]; the others' are as large."""

    def run(self, x: Tensor, scores: Tensor, shared: Tensor | None) -> Tensor:
        """What the experts of each row of x [rows, hidden] make of it, weighted and summed, with what the shared one
        made of it [rows, hidden]. `scores` are [rows, experts | the shared one's gate | ...]. A row's bits do not
        depend on what other rows there are."""
