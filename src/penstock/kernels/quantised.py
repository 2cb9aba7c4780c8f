"""Weights that stay quantised in memory: the blocks that files have, and a weight of them as kernels take it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.spans import HeadLayout

# Inputs to a group of values with one scale, as far as products are concerned.
GROUP = 32
FLOAT8, FLOAT8_MOST = torch.float8_e4m3fn, 448.0
_INT8_MOST = 127
_INT4_MOST = 15


@dataclass(frozen=True)
class BlockForm:
    """A way to store values, `block_size` successive inputs of an output in `block_bytes` bytes. `number` is its own
    in `native/quantised.cpp`; a value takes `resident_bits` in a processor's memory, `device_bits` in a GPU's."""

    name: str
    number: int
    block_size: int
    block_bytes: int
    resident_bits: float
    device_bits: float
    device_part: int = GROUP  # inputs that lie together in a GPU's memory, where rows are whole parts

    def row_bytes(self, num_in: int) -> int:
        return num_in // self.block_size * self.block_bytes

    def device_bits_of(self, num_in: int) -> float:
        """What a value of a row takes on a GPU, with its part of what fills the row."""
        return self.device_bits * -(-num_in // self.device_part) * self.device_part / num_in


Q4_1 = BlockForm("Q4_1", 0, 32, 20, 5.0, 5.0, 256)  # scale, minimum, 16 bytes of two quants
Q4_0 = BlockForm("Q4_0", 1, 32, 18, 4.5, 4.5, 256)
Q8_0 = BlockForm("Q8_0", 2, 32, 34, 8.5, 8.5, 128)  # scale, 32 quants
# The 6 bits of a scale and of a minimum become 8.
Q4_K = BlockForm("Q4_K", 3, 256, 144, 4.625, 4.625)
Q5_K = BlockForm("Q5_K", 4, 256, 176, 5.625, 5.625)
Q6_K = BlockForm("Q6_K", 5, 256, 210, 6.5625, 6.625)
Q5_0 = BlockForm(
    "Q5_0", 10, 32, 22, 5.5, 8.5, 128
)  # scale, fifth bits, 16 bytes of two quants; a GPU's as Q8_0
Q5_1 = BlockForm("Q5_1", 11, 32, 24, 6.0, 16.0)
Q2_K = BlockForm("Q2_K", 15, 256, 84, 3.125, 16.0)
Q3_K = BlockForm("Q3_K", 12, 256, 110, 4.5625, 6.625)  # a GPU's as Q6_K
# Quants are numbers of levels.
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_NL = BlockForm("IQ4_NL", 13, 32, 18, 4.5, 8.5, 128)  # a GPU's as Q8_0
IQ4_XS = BlockForm("IQ4_XS", 14, 256, 136, 4.3125, 16.0)
# Not of a file, and the native library's alone: weights of bfloat16 in its panels.
BFLOAT16 = BlockForm("BF16", 6, 1, 2, 16.0, 16.0)
# The same for products with a model's plain weights, whose bits are those of oneDNN.
PACKED = BlockForm("", 7, 1, 2, 16.0, 16.0)
# An exponent of a power of 2, 16 bytes of two 4-bit floats. The exponent becomes float32.
MXFP4 = BlockForm("MXFP4", 9, 32, 17, 5.0, 16.0)
BLOCK_FORMS = {
    form.name: form
    for form in (Q4_1, Q4_0, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, Q5_0, Q5_1, Q2_K, Q3_K, IQ4_NL, IQ4_XS)
}
# Which a processor alone keeps: on a GPU they become bfloat16.
HOST_FORMS = tuple(form for form in BLOCK_FORMS.values() if form.device_bits == 16)
# 8-bit floats, which a GPU alone keeps: a scale of float32 and 32 of them. A row has one scale, or each 128 inputs.
F8_ROW = BlockForm("F8_ROW", 6, 32, 36, 16.0, 8.0)
F8_BLOCK = BlockForm("F8_BLOCK", 7, 32, 36, 16.0, 8.25)
FLOAT_FORMS = (F8_ROW, F8_BLOCK)
# As Q4_1, with a zero point in place of the minimum: scale * (quant - zero). A GPU alone keeps it, too.
Q4_Z = BlockForm("Q4_Z", 8, 32, 20, 16.0, 5.0, 256)
ALL_FORMS = {form.name: form for form in (*BLOCK_FORMS.values(), *FLOAT_FORMS, Q4_Z)}


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A weight [out, in] in panels, which a device's kernels made and which they alone can read."""

    form: BlockForm
    shape: tuple[int, int]
    panels: Tensor  # uint8
    rounds_rows: bool = False  # to 8 bits by group, before they are multiplied with it

    @property
    def dtype(self) -> torch.dtype:
        """What goes into products with it, and comes out of them."""
        return torch.bfloat16

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes


# A weight as `Kernels.linear` takes it.
Weight = Tensor | QuantisedWeight


@dataclass(frozen=True)
class DenseProduct:
    """A weight [out, in] in parts, each with the outputs after those of the one before, and a bias [out]."""

    parts: tuple[QuantisedWeight, ...]
    bias: Tensor | None


@dataclass(frozen=True)
class DenseLayer:
    """A layer of attention and a feed-forward block, experts, or both, all of whose matrices are quantised."""

    heads: HeadLayout
    qkv: DenseProduct
    out: DenseProduct
    gate_up: DenseProduct | None
    down: DenseProduct | None
    router: DenseProduct | None
    experts: object  # `GroupedExperts`, or None
    mlp_norm: Tensor  # all norms are of one dtype
    next_norm: Tensor


def quantise(values: Tensor, form: BlockForm) -> Tensor:
    """Rows of values [rows, in] as rows of blocks [rows, bytes], each value rounded to the nearest of its block."""
    groups = values.float().view(len(values), -1, GROUP)  # [rows, blocks, 32]
    if form is F8_ROW:
        scale = groups.abs().amax(dim=(1, 2), keepdim=True) / FLOAT8_MOST
        floats = torch.where(scale == 0, 0.0, groups / scale).clamp_(-FLOAT8_MOST, FLOAT8_MOST).to(FLOAT8)
        scales = scale.expand(-1, groups.shape[1], -1).contiguous()
        return torch.cat((scales.view(torch.uint8), floats.view(torch.uint8)), dim=-1).flatten(1)
    if form is Q8_0:
        scale = _half(groups.abs().amax(dim=-1, keepdim=True) / _INT8_MOST)
        quants = _quants(groups, scale, -_INT8_MOST, _INT8_MOST).to(torch.int8).view(torch.uint8)
        return torch.cat((_bytes(scale), quants), dim=-1).flatten(1)
    if form is Q4_1:
        least, most = groups.aminmax(dim=-1, keepdim=True)
        minimum = _half(least)
        scale = _half((most - minimum) / _INT4_MOST)
        quants = _quants(groups - minimum, scale, 0, _INT4_MOST).to(torch.uint8)
        both = quants[..., : GROUP // 2] | quants[..., GROUP // 2 :] << 4
        return torch.cat((_bytes(scale), _bytes(minimum), both), dim=-1).flatten(1)
    raise ValueError(f"there is no quantisation to {form.name}, only to Q8_0, Q4_1 and F8_ROW")


_FLOATS4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_values(blocks: Tensor) -> Tensor:
    """Rows of such blocks [rows, bytes] as values [rows, in], in float32."""
    blocks = blocks.view(len(blocks), -1, MXFP4.block_bytes)
    scales, quants = torch.exp2(blocks[..., :1].float() - 127), blocks[..., 1:]
    table = torch.tensor([sign * value for sign in (1, -1) for value in _FLOATS4])
    return (table[torch.cat((quants & 15, quants >> 4), dim=-1).long()] * scales).flatten(1)


def mxfp4_blocks(pairs: Tensor, exponents: Tensor) -> Tensor:
    """Rows of such blocks from quants whose two in a byte are neighbours [rows, groups, 16], and [rows, groups]."""
    quants = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
    both = quants[..., : GROUP // 2] | quants[..., GROUP // 2 :] << 4
    return torch.cat((exponents[..., None], both), dim=-1).flatten(1)


def _half(values: Tensor) -> Tensor:
    """Rounded to what a block can store of them."""
    return values.half().float()


def _quants(values: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    return torch.where(scale == 0, 0.0, values / scale).round_().clamp_(low, high)


def _bytes(values: Tensor) -> Tensor:
    return values.half().view(torch.uint8)
