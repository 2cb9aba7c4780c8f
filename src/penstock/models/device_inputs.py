"""Numbers of a pass on their way from the host to a device."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors there, with one copy for all of them, which nobody waits for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    together = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        together = together.pin_memory()
    copied = together.to(device, non_blocking=True)
    return list(torch.split(copied, [len(array) for array in arrays]))
