"""What of a model is probed, and random data on which a difference in the order of summing shows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cache.kv import KV
from penstock.plan.model import DeltaNetShape

# A device may just hold a weight: what is made beside one is for so many of its rows at a time.
ROWS_TOGETHER = 2048


@dataclass(frozen=True)
class ProductShape:
    """A weight [num_out, num_in], with a bias or without; of blocks, where there is a form."""

    num_out: int
    num_in: int
    bias: bool = False
    form: str = ""


@dataclass(frozen=True)
class ProbeShapes:
    """What is probed: the model's distinct products, its attention's heads, the widths of its other passes."""

    products: tuple[ProductShape, ...]  # but for experts' and the head
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    mlp_widths: tuple[int, ...]
    rotary_dim: int
    head: ProductShape | None  # None: these layers are followed by others
    delta_net: DeltaNetShape | None = None
    num_experts: int = 0
    expert_products: tuple[ProductShape, ...] = ()


class Random:
    """Random tensors, the same in every probe on a device, which draws them itself."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._dtype = dtype
        self._device = device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, generator=self._generator, device=self._device)

    def cancelling(self, num_rows: int, width: int, sign: int, block: int = 1) -> Tensor:
        """Rows whose second half repeats the first in another order of blocks, with a sign.

        The product of two such matrices of opposite sign is zero but for rounding, so that every difference in
        the order of summing shows. In bfloat16 the rounding of the result would hide most of them."""
        rows = self.normal(num_rows, width // block, block)
        self._repeat_half(rows, sign)
        flat = rows.flatten(1)
        return torch.nn.functional.pad(flat, (0, width % block)) if width % block else flat

    def cancelling_blocks(self, num_rows: int, num_blocks: int, block_bytes: int) -> Tensor:
        """The same for rows of quantised blocks of any form: no byte of theirs makes a scale below 0 or above 2."""
        rows = torch.randint(
            64, (num_rows, num_blocks, block_bytes), dtype=torch.uint8, generator=self._generator
        )
        self._repeat_half(rows, 1)
        return rows.flatten(1)

    def _repeat_half(self, rows: Tensor, sign: int) -> None:
        """In rows [rows, blocks, values], write the first half of the blocks over the second."""
        num_blocks = rows.shape[1]
        half = num_blocks // 2
        order = torch.randperm(half, generator=torch.Generator().manual_seed(num_blocks)).to(self._device)
        for part in torch.split(rows, ROWS_TOGETHER):
            part[:, half : 2 * half] = part[:, order].mul_(sign)
        rows[:, 2 * half :] = 0

    def cancelling_kv(self, num_tokens: int, num_heads: int, head_dim: int) -> KV:
        """Pairs of tokens, 32 apart, with equal keys and opposite values, for the same reason."""
        shape = (-1, 2, 32, num_heads, head_dim)
        keys, values = (self.normal(num_tokens, num_heads, head_dim).view(shape) for _ in range(2))
        keys[:, 1] = keys[:, 0]
        values[:, 1] = -values[:, 0]
        return KV(keys.flatten(0, 2), values.flatten(0, 2))
