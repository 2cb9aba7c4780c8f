"""Where weights come from: one tensor at a time, straight into its place."""

from collections.abc import Iterator
from typing import Protocol

import torch

from penstock.errors import ModelFileError
from penstock.kernels.quantised import BlockForm
from penstock.plan.model import ModelConfig


class WeightSource(Protocol):
    """A model's weights on disk, with Hugging Face's names and transformers' layout, whatever the file."""

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with the tensor, converted to its dtype. `out` has the tensor's shape and may be a part
        of a larger tensor, so that fused weights are assembled in place. Needs a few MiB besides `out`."""
        ...

    def block_form(self, name: str) -> BlockForm | None:
        """How the rows of a tensor are stored, where they are quantised and `blocks` can give them as they are."""
        ...

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """The rows of such a tensor, in order, as rows of blocks [n, bytes]: some MiB at a time where the file has
        them in that order too. What one gives is overwritten by the next."""
        ...

    def describe(self) -> str:
        """The file and what is in it, in a few words."""
        ...

    def close(self) -> None: ...


def require_shape(name: str, shape: tuple[int, ...], out: torch.Tensor) -> None:
    if tuple(out.shape) != shape:
        raise ModelFileError(
            f"tensor {name} has shape {list(shape)} in the file, but the model needs {list(out.shape)}"
        )
