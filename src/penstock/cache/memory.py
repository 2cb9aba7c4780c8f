"""Zeroed memory for the tensors of a cache."""

from math import prod

import numpy as np
import torch
from torch import Tensor

# What torch's own allocator gives. Kernels may take another path, with other bits, for other alignments.
ALIGNMENT_BYTES = 64
_HOST = torch.device("cpu")


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An aligned tensor of zeros. On CPU, memory is taken only as it is written."""
    if device != _HOST:
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page at once; numpy's zeros are pages that the system commits on first use.
    num_bytes = prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8))
    offset = -memory.data_ptr() % ALIGNMENT_BYTES
    return memory[offset : offset + num_bytes].view(dtype).view(shape)
