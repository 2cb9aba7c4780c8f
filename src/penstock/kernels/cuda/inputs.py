"""Numbers of a pass on their way from the host to a device."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Made = TypeVar("_Made")
_KEPT = "_on_device"


def on_device(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors there, with one copy for all of them, which nobody waits for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    copied = to_device(np.concatenate(arrays), device)
    return list(torch.split(copied, [len(array) for array in arrays]))


def to_device(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """The array as a tensor there, whose copy nobody waits for."""
    return _staged(array, device).to(device, non_blocking=True)


def fill(tensor: Tensor, array: NDArray[np.int64]) -> None:
    """Copy the array into a tensor of its shape, without waiting."""
    tensor.copy_(_staged(array, tensor.device), non_blocking=True)


def made_once(work: object, make: Callable[[], _Made]) -> _Made:
    """What a device is told of a pass's work: made for the first layer, and kept with it for the others."""
    kept = vars(work)
    if _KEPT not in kept:
        kept[_KEPT] = make()
    found: _Made = kept[_KEPT]
    return found


def keep(work: object, made: object) -> None:
    """Let work stand for what a device has already."""
    vars(work)[_KEPT] = made


def _staged(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """Where a GPU can copy it from by itself."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(array))
    pinned = torch.empty(array.shape, dtype=torch.int64, device="cpu", pin_memory=True)
    pinned.numpy()[...] = array  # torch would wake all its threads for a long one, which takes longer
    return pinned
