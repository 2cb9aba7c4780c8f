"""Weights of 4 to 8 bits on a GPU, in Triton: as values, and multiplied by a few rows as they lie.

A row of a weight is a number of tiles, each of GROUP words of 16 bits: slot `j` of word `i` is the quant of input `i`
of the tile's group `j`. What the words of two tiles have no bits for lies in `high`. value = scale * quant +
minimum, out of the group's own of `factors` and, in some forms, one of `wholes` for 256 inputs.
"""

import triton
import triton.language as tl

from penstock.kernels.triton.overlap import await_others
from penstock.kernels.triton.rows import store_sums

_WHOLE = tl.constexpr(256)  # inputs to a scale of scales
# Triton's interpreter knows no assembly.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _load(at, mask):
    """Zeros where there is nothing; without a mask, there is something everywhere."""
    if mask is None:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=mask, other=0)
    return found


@triton.jit
def _load_group(plane, at, mask, GROUP: tl.constexpr):
    """Numbers [n, GROUP], of which each of four threads has as many successive ones."""
    at = tl.max_contiguous((at * GROUP)[:, None] + tl.arange(0, GROUP)[None, :], [1, GROUP // 4])
    return _load(plane + at, mask if mask is None else mask[:, None])


@triton.jit
def load_words(quants, output, tile, num_tiles, mask, GROUP: tl.constexpr):
    """Words [outputs, GROUP] of a tile of each output."""
    return _load_group(quants, output * num_tiles + tile, mask, GROUP)


@triton.jit
def load_high(high, output, part, num_parts, mask, words, BITS: tl.constexpr, GROUP: tl.constexpr):
    """What the words of two tiles have no bits for."""
    more = words
    if BITS == 5 or BITS == 6:
        more = _load_group(high, output * num_parts + part, mask, GROUP)
    return more


@triton.jit
def load_whole(wholes, output, part, num_in, mask, FORM: tl.constexpr, GROUP: tl.constexpr):
    """The scale of the scales of two tiles."""
    whole = output
    if FORM == "Q4_K" or FORM == "Q5_K" or FORM == "Q6_K":
        num_wholes = (num_in + _WHOLE - 1) // _WHOLE
        whole = _load(wholes + output * num_wholes + part * (8 * GROUP) // _WHOLE, mask)
    return whole


@triton.jit
def _half(word):
    """The float16 in the last bits of a word."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _as_float(number):
    """Of a number of few bits, faster than they are converted: the last ones of 2 to the 23rd."""
    return (number.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _scale_and_minimum(factor, whole, FORM: tl.constexpr):
    """Of quants from 0 up."""
    if FORM == "Q4_K" or FORM == "Q5_K":
        scale = _as_float(factor & 0xFF) * _half(whole)
        minimum = _as_float((factor >> 8) & 0xFF) * -_half(whole >> 16)
    elif FORM == "Q6_K":
        scale = (_as_float((factor.to(tl.int32) & 0xFF) ^ 128) - 128.0) * _half(whole)
        minimum = -32.0 * scale
    else:
        scale = _half(factor)
        if FORM == "Q4_0":
            minimum = -8.0 * scale
        elif FORM == "Q8_0":
            minimum = -128.0 * scale
        elif FORM == "Q4_1":
            minimum = _half(factor >> 16)
        else:  # a zero point
            minimum = -_half(factor >> 16) * scale
    return scale, minimum


@triton.jit
def load_factor(factors, output, part, num_parts, mask, group: tl.constexpr, BITS: tl.constexpr):
    """What the scale of one of the groups of two tiles is made of, in the last bits."""
    # A word has those of several groups, where they are small.
    EACH: tl.constexpr = factors.dtype.element_ty.primitive_bitwidth
    GROUPS: tl.constexpr = 4 if BITS == 8 else 8
    at = (output * num_parts + part) * (GROUPS * EACH // 32) + group * EACH // 32
    return _load(factors.to(tl.pointer_type(tl.int32)) + at, mask) >> (group * EACH % 32)


@triton.jit
def group_values(
    words,
    more,
    factors,
    output,
    part,
    num_parts,
    whole,
    mask,
    group: tl.constexpr,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
):
    """Values [outputs, GROUP] of one of the groups of two tiles, in float32. Quants stay where they lie in words, so
    many times as large, as scales are made smaller."""
    WIDTH: tl.constexpr = 8 if BITS == 8 else 4
    SHIFT: tl.constexpr = WIDTH * group % 16
    found = words.to(tl.int32) & (((1 << WIDTH) - 1) << SHIFT)
    if BITS == 5 or BITS == 6:
        UP: tl.constexpr = SHIFT + 4 - (BITS - 4) * group
        above = more.to(tl.int32) << UP if UP >= 0 else more.to(tl.int32) >> -UP
        found |= above & (((1 << (BITS - 4)) - 1) << (SHIFT + 4))
    factor = load_factor(factors, output, part, num_parts, mask, group, BITS)
    scale, minimum = _scale_and_minimum(factor, whole, FORM)
    return found.to(tl.float32) * (scale * (1.0 / (1 << SHIFT)))[:, None] + minimum[:, None]


@triton.jit
def block_values_kernel(
    quants,
    high,
    factors,
    wholes,
    rows,  # [num_rows], the outputs that are wanted; none: the first ones
    out,  # [num_rows, num_in]
    num_rows,
    num_in,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Two tiles of some outputs of a weight as values."""
    SLOTS: tl.constexpr = 2 if BITS == 8 else 4
    num_parts = (num_in + 2 * SLOTS * GROUP - 1) // (2 * SLOTS * GROUP)
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(1)
    is_row = row < num_rows
    output = row
    if rows is not None:
        output = tl.load(rows + row, mask=is_row, other=0)
    output = output.to(tl.int64)
    whole = load_whole(wholes, output, part, num_in, is_row, FORM, GROUP)
    column = part * (2 * SLOTS * GROUP) + tl.arange(0, GROUP)
    to = out + row.to(tl.int64)[:, None] * num_in + column[None, :]
    for i in tl.static_range(2):
        words = load_words(quants, output, 2 * part + i, 2 * num_parts, is_row, GROUP)
        more = load_high(high, output, part, num_parts, is_row, words, BITS, GROUP)
        for j in tl.static_range(SLOTS):
            values = group_values(
                words, more, factors, output, part, num_parts, whole, is_row, i * SLOTS + j, FORM, BITS
            )
            start = (i * SLOTS + j) * GROUP
            is_in = is_row[:, None] & (column + start < num_in)[None, :]
            tl.store(to + start, values.to(out.dtype.element_ty), mask=is_in)


# A row or very few, with quants that are not yet values.


@triton.jit
def _quants(words, more, group: tl.constexpr, BITS: tl.constexpr):
    """Those of one of eight groups, exactly, in bfloat16: plus 128, or of 8 bits less 128. Two words share a
    register, and a mask makes two numbers of them: 128 whose last bits are a quant's is 128 + quant."""
    WIDTH: tl.constexpr = 8 if BITS == 8 else 4
    SHIFT: tl.constexpr = WIDTH * group % 16
    DOWN: tl.constexpr = (BITS - 4) * group - 4  # of bits in `high`, to above the others
    more = more.to(tl.int16)
    if _IS_INTERPRETED:
        found = (words.to(tl.int32) >> SHIFT) & ((1 << WIDTH) - 1)
        if BITS == 5 or BITS == 6:
            found |= (more.to(tl.int32) << 4 >> (DOWN + 4)) & ((1 << BITS) - 16)
        found += -128 if BITS == 8 else 128
        found = found.to(tl.float32).to(tl.bfloat16)
    elif BITS == 8:
        # 128 with the last 7 bits, less 128 or 256, as the first one says: a bit of the exponent.
        found = tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 a, b, one;
            shr.u32 a, $1, {SHIFT};
            lop3.b32 b, a, 0x00800080, 0xC300C300, 0xAE;
            lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
            mov.b32 one, 0x3F803F80;
            fma.rn.bf16x2 $0, a, one, b;
            }}""",
            "=r,r",
            [words],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif BITS == 4:
        found = tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 a;
            shr.u32 a, $1, {SHIFT};
            lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
            }}""",
            "=r,r",
            [words],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        MASK: tl.constexpr = "0x00100010" if BITS == 5 else "0x00300030"
        MOVE: tl.constexpr = f"shl.b32 b, $2, {-DOWN}" if DOWN < 0 else f"shr.u32 b, $2, {DOWN}"
        found = tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 a, b;
            shr.u32 a, $1, {SHIFT};
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
            {MOVE};
            lop3.b32 $0, b, {MASK}, a, 0xEA;
            }}""",
            "=r,r,r",
            [words, more],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return found


@triton.jit
def _by_four(at):
    """Places [n] for each of the four threads of a row."""
    return tl.broadcast_to(at[:, None], at.shape[0], 4)


@triton.jit
def _load_part(
    row_at,
    row_part,
    row_group,
    quants,
    high,
    factors,
    wholes,
    output,
    part,
    num_in,
    IS_WHOLE: tl.constexpr,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Eight groups of each output and as many inputs of rows; zeros beyond the last."""
    SLOTS: tl.constexpr = 2 if BITS == 8 else 4
    TILES: tl.constexpr = 8 // SLOTS
    num_tiles = (num_in + 2 * SLOTS * GROUP - 1) // (2 * SLOTS * GROUP) * 2
    tile, own_group = part * TILES, row_part * 8 + row_group
    group = part[:, None] * 8 + tl.arange(0, 8)[None, :]
    if IS_WHOLE:
        is_input, is_tile, is_later, is_group = None, None, None, None
    else:
        is_input, is_group = own_group * GROUP < num_in, group < num_tiles * SLOTS
        is_tile, is_later = tile < num_tiles, tile + 2 < num_tiles
    own = _load_group(row_at[:, None], own_group, is_input, GROUP)
    words_0 = load_words(quants, output, tile, num_tiles, is_tile, GROUP)
    words_1 = load_words(quants, output, tile + 1, num_tiles, is_tile, GROUP)
    words_2, words_3 = words_0, words_1
    if TILES == 4:
        words_2 = load_words(quants, output, tile + 2, num_tiles, is_later, GROUP)
        words_3 = load_words(quants, output, tile + 3, num_tiles, is_later, GROUP)
    more = load_high(high, output, part, num_tiles // 2, is_tile, words_0, BITS, GROUP)
    # A thread has two neighbours of a product.
    at = tl.max_contiguous((output * num_tiles * SLOTS)[:, None] + group, [1, 2])
    factor = _load(factors + at, is_group)
    whole = load_whole(wholes, output, part, num_in, is_tile, FORM, GROUP)
    return own, (words_0, words_1, words_2, words_3), more, factor, whole


@triton.jit
def _by_thread(values, FIRST: tl.constexpr, WARPS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """[FIRST * WARPS * 8, GROUP] as [WARPS, FIRST * 8, GROUP]: the order of inputs is that in which a thread's are
    where the matrix units take them from. They take 4 bytes at a time, or 8 where something began as a byte."""
    NEXT: tl.constexpr = 4 if BITS == 5 else 2
    values = values.reshape(FIRST, WARPS, 8, 4, GROUP // (8 * NEXT), 2, NEXT)
    return values.permute(1, 0, 2, 4, 5, 3, 6).reshape(WARPS, FIRST * 8, GROUP)


@triton.jit
def _columns(own, EIGHTS: tl.constexpr, WARPS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """[EIGHTS * WARPS * 8, GROUP] as [WARPS, GROUP, EIGHTS * 8], likewise."""
    NEXT: tl.constexpr = 4 if BITS == 5 else 2
    columns = own.reshape(EIGHTS, WARPS, 8, 4, GROUP // (8 * NEXT), 2, NEXT)
    return columns.permute(1, 4, 5, 3, 6, 0, 2).reshape(WARPS, GROUP, 8 * EIGHTS)


@triton.jit
def _for_rows(scales, EIGHTS: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """[EIGHTS * WARPS * 8, 8] as [WARPS, EIGHTS * 8, ROWS * 8]."""
    scales = scales.reshape(EIGHTS, WARPS, 8, 8).permute(1, 0, 2, 3).reshape(WARPS, 8 * EIGHTS, 1, 8)
    return scales.broadcast_to(WARPS, 8 * EIGHTS, ROWS, 8).reshape(WARPS, 8 * EIGHTS, 8 * ROWS)


@triton.jit
def _add_part(
    total,
    own,
    words,
    more,
    factor,
    whole,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    EIGHTS: tl.constexpr,
    WARPS: tl.constexpr,
):
    SLOTS: tl.constexpr = 2 if BITS == 8 else 4
    columns = _columns(own, ROWS, WARPS, BITS, GROUP)
    group = (tl.arange(0, 8 * ROWS) % 8)[None, None, :]
    found = tl.zeros([WARPS, 8 * EIGHTS, 8 * ROWS], tl.float32)
    for i in tl.static_range(8 // SLOTS):
        for j in tl.static_range(SLOTS):
            quants = _by_thread(_quants(words[i], more, i * SLOTS + j, BITS), EIGHTS, WARPS, BITS, GROUP)
            found = tl.where(group == i * SLOTS + j, tl.dot(quants, columns), found)
    scale, minimum = _scale_and_minimum(factor, whole[:, None], FORM)
    total += _for_rows(scale, EIGHTS, WARPS, ROWS) * found
    if BITS != 8:
        ones = tl.full([WARPS, 8 * EIGHTS, GROUP], 1.0, tl.float32).to(tl.bfloat16)
        total += _for_rows(minimum - 128.0 * scale, EIGHTS, WARPS, ROWS) * tl.dot(ones, columns)
    return total


@triton.jit
def _multiply_lot(
    x,
    quants,
    high,
    factors,
    wholes,
    bias,
    out,
    lot,
    x_stride,
    out_stride,
    num_rows,
    num_out,
    num_in,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
):
    """Some outputs of a product of a row, or of very few. A part is eight groups; each warp has every so many-th. The
    columns of a product are not rows but a row's groups, which meet each of the weight's: the own one is chosen. So a
    thread has few sums, each with a scale that no other thread needs, and nothing is empty. Tiles are loaded 16 bytes
    to a thread and never move between threads."""
    EIGHTS: tl.constexpr = OUTPUTS // 8
    at = tl.arange(0, EIGHTS * WARPS * 8)
    output = lot * OUTPUTS + at // (8 * WARPS) * 8 + at % 8
    output = tl.minimum(output, num_out - 1).to(tl.int64)
    part = at // 8 % WARPS
    own_at = tl.arange(0, ROWS * WARPS * 8)
    row_at = x + tl.minimum(own_at // (8 * WARPS), num_rows - 1).to(tl.int64) * x_stride
    row_part, row_group = own_at // 8 % WARPS, own_at % 8
    total = tl.zeros([WARPS, OUTPUTS, 8 * ROWS], tl.float32)
    num_parts = (num_in + 8 * GROUP - 1) // (8 * GROUP)
    STEP: tl.constexpr = 2 * WARPS if IS_DOUBLE else WARPS
    for first in range(0, num_parts, STEP):
        own, words, more, factor, whole = _load_part(
            row_at,
            row_part + first,
            row_group,
            quants,
            high,
            factors,
            wholes,
            output,
            part + first,
            num_in,
            IS_WHOLE,
            FORM,
            BITS,
            GROUP,
        )
        if IS_DOUBLE:
            own_1, words_1, more_1, factor_1, whole_1 = _load_part(
                row_at,
                row_part + first + WARPS,
                row_group,
                quants,
                high,
                factors,
                wholes,
                output,
                part + first + WARPS,
                num_in,
                IS_WHOLE,
                FORM,
                BITS,
                GROUP,
            )
        total = _add_part(total, own, words, more, factor, whole, FORM, BITS, GROUP, ROWS, EIGHTS, WARPS)
        if IS_DOUBLE:
            total = _add_part(
                total, own_1, words_1, more_1, factor_1, whole_1, FORM, BITS, GROUP, ROWS, EIGHTS, WARPS
            )
    total = tl.sum(tl.sum(total.reshape(WARPS, OUTPUTS, ROWS, 8), axis=3), axis=0)
    own_output = lot * OUTPUTS + tl.arange(0, OUTPUTS)
    store_sums(total, bias, out, tl.arange(0, ROWS), own_output, out_stride, num_rows, num_out, HAS_BIAS)


@triton.jit(do_not_specialize=["num_rows"])
def block_row_kernel(
    x,  # [num_rows, num_in]
    quants,
    high,
    factors,
    wholes,
    bias,  # [num_out], or none
    other_quants,  # of a weight whose outputs come after those, or none
    other_high,
    other_factors,
    other_wholes,
    other_bias,
    out,  # [num_rows, num_out]
    x_stride,
    out_stride,
    num_rows,
    num_out,
    other_out,
    num_in,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # all warps have as many whole parts
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_DOUBLE: tl.constexpr,  # two parts are loaded at once
    OTHER_IS_WHOLE: tl.constexpr,
    OTHER_FORM: tl.constexpr,
    OTHER_BITS: tl.constexpr,
    OTHER_GROUP: tl.constexpr,
    OTHER_IS_DOUBLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    IS_EARLY: tl.constexpr = False,
):
    """A product of a row, or of very few, with a weight, or with two that lie in different forms."""
    await_others(IS_EARLY)
    lot = tl.program_id(0)
    num_lots = (num_out + OUTPUTS - 1) // OUTPUTS
    if other_quants is None or lot < num_lots:
        _multiply_lot(
            x,
            quants,
            high,
            factors,
            wholes,
            bias,
            out,
            lot,
            x_stride,
            out_stride,
            num_rows,
            num_out,
            num_in,
            HAS_BIAS,
            IS_WHOLE,
            FORM,
            BITS,
            GROUP,
            ROWS,
            OUTPUTS,
            WARPS,
            IS_DOUBLE,
        )
    else:
        _multiply_lot(
            x,
            other_quants,
            other_high,
            other_factors,
            other_wholes,
            other_bias,
            out + num_out,
            lot - num_lots,
            x_stride,
            out_stride,
            num_rows,
            other_out,
            num_in,
            HAS_BIAS,
            OTHER_IS_WHOLE,
            OTHER_FORM,
            OTHER_BITS,
            OTHER_GROUP,
            ROWS,
            OUTPUTS,
            WARPS,
            OTHER_IS_DOUBLE,
        )


@triton.jit
def _rounded(quants, scale, minimum, BITS: tl.constexpr):
    """Values in bfloat16 of quants [n, GROUP] as `_quants` gives them, with scales [n, 4]."""
    minimum += (128.0 if BITS == 8 else -128.0) * scale
    parts = quants.to(tl.float32).reshape(quants.shape[0], 4, quants.shape[1] // 4)
    values = parts * scale[:, :, None] + minimum[:, :, None]
    return values.to(tl.bfloat16).reshape(quants.shape)


@triton.jit(do_not_specialize=["num_rows"])
def block_rows_kernel(
    x,  # [num_rows, num_in]
    quants,
    high,
    factors,
    wholes,
    bias,  # [num_out], or none
    out,  # [num_rows, num_out]; or sums of float32 [shares, num_rows, num_out]
    x_stride,
    out_stride,
    num_rows,
    num_out,
    num_in,
    share_in,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # inputs are whole parts
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,  # of a warp
    WARPS: tl.constexpr,
    IS_EARLY: tl.constexpr = False,
):
    """Some outputs of a share of a product of a few rows, of values in bfloat16. Each warp has outputs of its own.
    Tiles are loaded 16 bytes to a thread, and never move between threads: they become values where they are, a group
    at a time."""
    SLOTS: tl.constexpr = 2 if BITS == 8 else 4
    SIZE: tl.constexpr = 2 * SLOTS * GROUP
    await_others(IS_EARLY)
    EIGHTS: tl.constexpr = OUTPUTS // 8
    ROW_EIGHTS: tl.constexpr = ROWS // 8
    num_parts = (num_in + SIZE - 1) // SIZE
    at = tl.arange(0, EIGHTS * WARPS * 8)
    output = (tl.program_id(0) * WARPS + at // 8 % WARPS) * OUTPUTS + at // (8 * WARPS) * 8 + at % 8
    output = tl.minimum(output, num_out - 1).to(tl.int64)
    own_at = tl.arange(0, ROW_EIGHTS * WARPS * 8)
    row = tl.minimum(own_at // (8 * WARPS) * 8 + own_at % 8, num_rows - 1)
    row_at = (x + row.to(tl.int64) * x_stride)[:, None]
    total = tl.zeros([WARPS, OUTPUTS, ROWS], tl.float32)
    first = tl.program_id(1) * share_in
    for start in range(first, tl.minimum(first + share_in, num_in), SIZE):
        part = start // SIZE
        whole = load_whole(wholes, _by_four(output), part, num_in, None, FORM, GROUP)
        words_0 = load_words(quants, output, 2 * part, 2 * num_parts, None, GROUP)
        words_1 = load_words(quants, output, 2 * part + 1, 2 * num_parts, None, GROUP)
        more = load_high(high, output, part, num_parts, None, words_0, BITS, GROUP)
        for group in tl.static_range(2 * SLOTS):
            if IS_WHOLE:
                is_input = None
            else:
                is_input = (own_at >= 0) & (start + group * GROUP < num_in)
            own = _load_group(row_at, own_at * 0 + part * 2 * SLOTS + group, is_input, GROUP)
            words = words_0 if group < SLOTS else words_1
            factor = load_factor(factors, _by_four(output), part, num_parts, None, group, BITS)
            scale, minimum = _scale_and_minimum(factor, whole, FORM)
            values = _rounded(_quants(words, more, group, BITS), scale, minimum, BITS)
            values = _by_thread(values, EIGHTS, WARPS, BITS, GROUP)
            total = tl.dot(values, _columns(own, ROW_EIGHTS, WARPS, BITS, GROUP), total)
    own_output = tl.program_id(0) * WARPS * OUTPUTS + tl.arange(0, WARPS * OUTPUTS)
    total = total.reshape(WARPS * OUTPUTS, ROWS)
    store_sums(total, bias, out, tl.arange(0, ROWS), own_output, out_stride, num_rows, num_out, HAS_BIAS)
