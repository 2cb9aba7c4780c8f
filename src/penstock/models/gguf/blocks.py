"""Blocks of GGUF files for which there are no kernels, as blocks of other forms with the same values, to the bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL
from torch import Tensor

from penstock.kernels.quantised import BLOCK_FORMS, Q6_K, Q8_0, BlockForm


@dataclass(frozen=True)
class KeptKind:
    """A kind of blocks as it is kept: in which form, and how its blocks [blocks, bytes] become blocks of that."""

    form: BlockForm
    convert: Callable[[Tensor], Tensor] | None = None  # None: as they are

    def rows(self, stored: Tensor, block_bytes: int) -> Tensor:
        """Rows [rows, bytes] as they are stored, as rows of the form's blocks."""
        if self.convert is None:
            return stored
        return self.convert(stored.view(-1, block_bytes)).view(len(stored), -1)


def row_bytes(kind: GGMLQuantizationType, num_in: int) -> int:
    """What a row takes in a file."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return num_in // int(block) * int(block_bytes)


def _shifted(packed: Tensor, bits: int, *shape: int) -> Tensor:
    """Numbers of so many bits, of bytes that lie as `shape` says: the lowest of all bytes first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    parts = packed.view(len(packed), *shape[:-1], 1, shape[-1]) >> shifts[:, None]
    return parts & ((1 << bits) - 1)


def _from_q5_0(blocks: Tensor) -> Tensor:
    """A scale, the fifth bits of 32 quants, 16 bytes of two quants: quant - 16, times the scale."""
    fifths = (blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    quants = _shifted(blocks[:, 6:], 4, 16).flatten(1) | fifths.flatten(1) << 4
    return torch.cat((blocks[:, :2], quants - 16), dim=1)  # in 8 bits with a sign


def _from_iq4_nl(blocks: Tensor) -> Tensor:
    """A scale, 16 bytes of two quants: a level each, times the scale."""
    levels = torch.tensor(IQ4_NL.kvalues, dtype=torch.int8).view(torch.uint8)
    return torch.cat((blocks[:, :2], levels[_shifted(blocks[:, 2:], 4, 16).flatten(1).long()]), dim=1)


def _from_q3_k(blocks: Tensor) -> Tensor:
    """256 quants of -4 to 3, their third bits first and 2 bits after that; 16 scales of 6 bits, and theirs."""
    num_blocks = len(blocks)
    thirds, rest, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    quants = _shifted(rest, 2, 2, 32).flatten(1) | _shifted(thirds, 1, 32).flatten(1) << 2
    quants = quants + (32 - 4)
    low = _shifted(scales[:, :8], 4, 8).flatten(1)
    high = _shifted(scales[:, 8:], 2, 4).flatten(1)
    fours, twos = quants.view(num_blocks, 2, 2, 64) & 15, quants.view(num_blocks, 2, 4, 32) >> 4
    tops = twos << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return torch.cat(
        (
            (fours[:, :, 0] | fours[:, :, 1] << 4).flatten(1),
            tops.sum(dim=2, dtype=torch.uint8).flatten(1),
            (low | high << 4) - 32,
            blocks[:, 108:],
        ),
        dim=1,
    )


KEPT: Mapping[GGMLQuantizationType, KeptKind] = {
    **{GGMLQuantizationType[name]: KeptKind(form) for name, form in BLOCK_FORMS.items()},
    GGMLQuantizationType.Q5_0: KeptKind(Q8_0, _from_q5_0),
    GGMLQuantizationType.IQ4_NL: KeptKind(Q8_0, _from_iq4_nl),
    GGMLQuantizationType.Q3_K: KeptKind(Q6_K, _from_q3_k),
}
# Blocks whose values no form has: they become plain numbers.
UNPACKED = tuple(
    GGMLQuantizationType[name]
    for name in (
        *("Q5_1", "Q2_K", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"),
        *("TQ1_0", "TQ2_0"),
    )
)
