"""How large a cache may be, where nobody says it."""

import torch

from penstock.cache import BLOCK_TOKENS
from penstock.cache.tensors import CacheSpec
from penstock.errors import MemoryExhaustedError
from penstock.kernels.device import device_kind
from penstock.plan import format_bytes

# The share of the free memory that a cache takes: the rest is for activations, and for others.
_SHARE = 0.5
# A GPU is nobody else's, and what steps need there was measured: that is set aside, and more than that, for what was
# not (graphs, plans of libraries, a past that lies in pieces).
_SHARE_ON_GPU = 0.9
_STEP_MARGIN, _MARGIN_BYTES = 1.25, 256 << 20


def cache_tokens_that_fit(
    spec: CacheSpec, num_slots: int, most_tokens: int, device: torch.device, step_bytes: int = 0
) -> int:
    """Places for keys and values in half of the memory that is free, beside the states; no more than are of use. On a
    GPU, in most of what steps leave that were measured to need `step_bytes`."""
    states_bytes = spec.num_bytes(0, num_slots)
    free_bytes = free_memory_bytes(device)
    if free_bytes is None:
        return most_tokens
    is_gpu = device_kind(device).has_own_memory
    needed_bytes = int(_STEP_MARGIN * step_bytes) + _MARGIN_BYTES if is_gpu else 0
    share = _SHARE_ON_GPU if is_gpu else _SHARE
    room_bytes = int(max(free_bytes - needed_bytes, 0) * share) - states_bytes
    num_blocks = room_bytes // (spec.num_bytes(1, 0))
    if num_blocks < 1:
        needed = f" beside {format_bytes(needed_bytes)} that a step needs" if needed_bytes else ""
        raise MemoryExhaustedError(
            f"there is no memory for a cache: {format_bytes(free_bytes)} are free, of which {share:.0%} may be "
            f"used{needed}, and {num_slots} recurrent states take {format_bytes(states_bytes)}; free some, or lower "
            f"max_running"
        )
    return min(num_blocks * BLOCK_TOKENS, most_tokens)


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory that could be taken without others having to give it up; None where the system does not tell. Of a GPU,
    what is free there, and what torch's allocator holds and does not use."""
    return device_kind(device).free_bytes()
