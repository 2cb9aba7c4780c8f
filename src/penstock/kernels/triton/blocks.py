"""Weights of 4 to 8 bits on a GPU, in Triton: as values, and multiplied by a few rows as they lie.

A row of a weight is a number of tiles, each of GROUP words of 16 bits: slot `j` of word `i` is the quant of input `i` of
the tile's group `j`. Eight groups are a part; what their words have no bits for lies in `high`, by input. value = scale *
quant + minimum, out of the group's own of `factors` and, in some forms, one of `wholes` for 256 inputs.

Two neighbours in a tile share a register, and become two numbers of bfloat16 by a mask: 128 with the bits of a quant for
its last ones is 128 + quant.
"""

import triton
import triton.language as tl

from penstock.kernels.triton.rows import store_sums

_WHOLE = tl.constexpr(256)  # inputs to a scale of scales
# Triton's interpreter knows no assembly.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _by_thread(at, GROUP: tl.constexpr):
    """Where a group's inputs lie, of which each of four threads has as many successive ones."""
    return tl.max_contiguous(at[:, None] + tl.arange(0, GROUP)[None, :], [1, GROUP // 4])


@triton.jit
def load_words(quants, output, tile, num_tiles, mask, GROUP: tl.constexpr):
    """Words [outputs, GROUP] of a tile of each output."""
    at = (output * num_tiles + tile) * GROUP
    return tl.load(quants + _by_thread(at, GROUP), mask=mask[:, None], other=0)


@triton.jit
def load_high(high, output, part, num_parts, mask, words, BITS: tl.constexpr, GROUP: tl.constexpr):
    """What words [outputs, GROUP] of a part have no bits for."""
    more = words
    if BITS == 5 or BITS == 6:
        at = (output * num_parts + part) * GROUP
        more = tl.load(high + _by_thread(at, GROUP), mask=mask[:, None], other=0).to(tl.int16)
    return more


@triton.jit
def load_whole(wholes, output, part, num_in, mask, FORM: tl.constexpr, GROUP: tl.constexpr):
    """The scale of a part's scales."""
    whole = output
    if FORM == "Q4_K" or FORM == "Q5_K" or FORM == "Q6_K":
        num_wholes = (num_in + _WHOLE - 1) // _WHOLE
        whole = tl.load(wholes + output * num_wholes + part * (8 * GROUP) // _WHOLE, mask=mask, other=0)
    return whole


@triton.jit
def unpacked(words, more, group: tl.constexpr, BITS: tl.constexpr):
    """Quants of a part's group out of the words of its tile and of `high`, exactly, in bfloat16: plus 128, or of 8
    bits with their sign."""
    WIDTH: tl.constexpr = 8 if BITS == 8 else 4
    SHIFT: tl.constexpr = WIDTH * (group % (16 // WIDTH))
    # From where in `high`, to above the others.
    MORE: tl.constexpr = (BITS - 4) * group - 4
    if _IS_INTERPRETED:
        found = (words.to(tl.int32) >> SHIFT) & ((1 << WIDTH) - 1)
        if BITS == 5 or BITS == 6:
            found |= (more.to(tl.int32) << 4 >> (MORE + 4)) & ((1 << BITS) - 16)
        found += -128 if BITS == 8 else 128
        found = found.to(tl.float32).to(tl.bfloat16)
    elif BITS == 8:
        # 7 bits above 128, less 128 or 256, as the eighth says: a bit of the exponent.
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
        MOVED: tl.constexpr = f"shl.b32 b, $2, {-MORE}" if MORE < 0 else f"shr.u32 b, $2, {MORE}"
        found = tl.inline_asm_elementwise(
            f"""{{
            .reg .b32 a, b;
            shr.u32 a, $1, {SHIFT};
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
            {MOVED};
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
def _half(word):
    """The float16 in the last bits of a word."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(word):
    """The number in the last 8 bits of a word: the last ones of 2^23, which is faster than to convert them."""
    return ((word.to(tl.int32) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def scale_and_minimum(factor, whole, FORM: tl.constexpr):
    """Of quants from 0 up, but those of 8 bits, which have a sign."""
    if FORM == "Q4_K" or FORM == "Q5_K":
        scale = _byte(factor) * _half(whole)
        minimum = _byte(factor >> 8) * -_half(whole >> 16)
    elif FORM == "Q6_K":
        scale = (_byte(factor ^ -128) - 128.0) * _half(whole)
        minimum = -32.0 * scale
    elif FORM == "Q4_1":
        scale = _half(factor)
        minimum = _half(factor >> 16)
    elif FORM == "Q4_Z":  # a zero point
        scale = _half(factor)
        minimum = -_half(factor >> 16) * scale
    else:
        scale = factor.to(tl.float32)
        minimum = (-8.0 if FORM == "Q4_0" else 0.0) * scale
    return scale, minimum


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
    """Values [outputs, GROUP] of one of the groups of two tiles, in float32."""
    GROUPS: tl.constexpr = 4 if BITS == 8 else 8
    factor = tl.load(factors + (output * num_parts + part) * GROUPS + group, mask=mask, other=0)
    scale, minimum = scale_and_minimum(factor, whole, FORM)
    found = unpacked(words, more, group, BITS).to(tl.float32)
    if BITS != 8:
        found -= 128.0
    return found * scale[:, None] + minimum[:, None]


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
    """A part of some outputs of a weight as values; of 8 bits, half a part."""
    SLOTS: tl.constexpr = 16 // BITS if BITS == 8 else 4
    num_parts = (num_in + 2 * SLOTS * GROUP - 1) // (2 * SLOTS * GROUP)
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(1)
    is_row = row < num_rows
    output = tl.minimum(row, num_rows - 1)
    if rows is not None:
        output = tl.load(rows + output)
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
            is_in = is_row[:, None] & (column + (i * SLOTS + j) * GROUP < num_in)[None, :]
            tl.store(to + (i * SLOTS + j) * GROUP, values.to(out.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["num_rows"])
def block_row_kernel(
    x,  # [num_rows, num_in]
    quants,
    high,
    factors,
    wholes,
    bias,  # [num_out], or none
    out,  # [num_rows, num_out]
    x_stride,
    out_stride,
    num_rows,
    num_out,
    num_in,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Some outputs of a product of one row or two. A warp has every so many-th part of the inputs. The matrix units
    multiply all inputs' groups with each of a weight's, as columns, of which the own one is chosen: so a number of a
    product has a group's scale, and no row is empty.

    Tiles are loaded as they lie, 16 bytes to a thread, and never move: the matrix units take inputs in the order that
    threads have them in, and outputs of eight threads each."""
    EIGHTS: tl.constexpr = OUTPUTS // 8
    row = tl.arange(0, OUTPUTS * WARPS)  # [EIGHTS, WARPS, 8]
    output = tl.program_id(0) * OUTPUTS + row // (8 * WARPS) * 8 + row % 8
    output = tl.minimum(output, num_out - 1).to(tl.int64)
    share = row // 8 % WARPS
    of_row = tl.arange(0, 8 * ROWS * WARPS)  # [ROWS, WARPS, 8]
    row_at = x + tl.minimum(of_row // (8 * WARPS), num_rows - 1).to(tl.int64) * x_stride
    row_group = of_row // 8 % WARPS * 8 + of_row % 8
    total = tl.zeros([WARPS, OUTPUTS, 8 * ROWS], tl.float32)
    num_parts = (num_in + 8 * GROUP - 1) // (8 * GROUP)
    for step in range(0, num_parts, DEPTH * WARPS):
        # All is on its way before any of it is multiplied.
        own, words, more, factor, whole = _load_part(
            row_at, row_group + step * 8, quants, high, factors, wholes, output, share + step, num_in, FORM, BITS, GROUP
        )
        if DEPTH == 2:
            later = step + WARPS
            own_1, words_1, more_1, factor_1, whole_1 = _load_part(
                row_at,
                row_group + later * 8,
                quants,
                high,
                factors,
                wholes,
                output,
                share + later,
                num_in,
                FORM,
                BITS,
                GROUP,
            )
        total = _add_part(
            total, own, words, more, factor, whole, FORM, BITS, GROUP, ROWS, EIGHTS, WARPS
        )
        if DEPTH == 2:
            total = _add_part(
                total, own_1, words_1, more_1, factor_1, whole_1, FORM, BITS, GROUP, ROWS, EIGHTS, WARPS
            )
    total = tl.sum(tl.sum(total.reshape(WARPS, OUTPUTS, ROWS, 8), axis=3), axis=0)
    own_output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    store_sums(total, bias, out, tl.arange(0, ROWS), own_output, out_stride, num_rows, num_out, HAS_BIAS)


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
    NEXT: tl.constexpr = 4 if BITS == 5 else 2
    columns = own.reshape(ROWS, WARPS, 8, 4, GROUP // (8 * NEXT), 2, NEXT)
    columns = columns.permute(1, 4, 5, 3, 6, 0, 2).reshape(WARPS, GROUP, 8 * ROWS)
    column_group = tl.arange(0, 8 * ROWS) % 8
    found = tl.zeros([WARPS, 8 * EIGHTS, 8 * ROWS], tl.float32)
    for i in tl.static_range(8 // SLOTS):
        for j in tl.static_range(SLOTS):
            part = unpacked(words[i], more, i * SLOTS + j, BITS)
            part = part.reshape(EIGHTS, WARPS, 8, 4, GROUP // (8 * NEXT), 2, NEXT)
            part = part.permute(1, 0, 2, 4, 5, 3, 6).reshape(WARPS, 8 * EIGHTS, GROUP)
            product = tl.dot(part, columns)
            found = tl.where((column_group == i * SLOTS + j)[None, None, :], product, found)
    scale, minimum = scale_and_minimum(factor, whole[:, None], FORM)
    if BITS == 8:
        total += _of_rows(scale, EIGHTS, WARPS, ROWS) * found
    else:
        ones = tl.full([WARPS, 8 * EIGHTS, GROUP], 1.0, tl.float32).to(tl.bfloat16)
        sums = tl.dot(ones, columns)
        minimum -= 128.0 * scale
        total += _of_rows(scale, EIGHTS, WARPS, ROWS) * found + _of_rows(minimum, EIGHTS, WARPS, ROWS) * sums
    return total


@triton.jit
def _load_part(
    row_at,
    row_group,
    quants,
    high,
    factors,
    wholes,
    output,
    part,
    num_in,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """What a thread needs for its outputs' parts; zeros beyond the last."""
    SLOTS: tl.constexpr = 2 if BITS == 8 else 4
    TILES: tl.constexpr = 8 // SLOTS
    num_tiles = (num_in + 2 * SLOTS * GROUP - 1) // (2 * SLOTS * GROUP) * 2
    num_groups = num_tiles * SLOTS
    is_group = row_group * GROUP < num_in
    own = tl.load(row_at[:, None] + _by_thread(row_group * GROUP, GROUP), mask=is_group[:, None], other=0.0)
    tile, group = part * TILES, part * 8
    words_0 = load_words(quants, output, tile, num_tiles, tile < num_tiles, GROUP)
    words_1 = load_words(quants, output, tile + 1, num_tiles, tile < num_tiles, GROUP)
    words_2, words_3 = words_0, words_1
    if TILES == 4:
        words_2 = load_words(quants, output, tile + 2, num_tiles, tile + 2 < num_tiles, GROUP)
        words_3 = load_words(quants, output, tile + 3, num_tiles, tile + 2 < num_tiles, GROUP)
    more = load_high(high, output, part, num_tiles // 2, tile < num_tiles, words_0, BITS, GROUP)
    # A thread has two neighbours of a product.
    at = tl.max_contiguous((output * num_groups + group)[:, None] + tl.arange(0, 8)[None, :], [1, 2])
    is_factor = (group[:, None] + tl.arange(0, 8)[None, :]) < num_groups
    if BITS != 8:
        is_factor = (group < num_groups)[:, None]
    factor = tl.load(factors + at, mask=is_factor, other=0)
    whole = load_whole(wholes, output, part, num_in, tile < num_tiles, FORM, GROUP)
    return own, (words_0, words_1, words_2, words_3), more, factor, whole


@triton.jit
def _of_rows(scales, EIGHTS: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Of [EIGHTS * WARPS * 8, 8], for each row."""
    scales = scales.reshape(EIGHTS, WARPS, 8, 8).permute(1, 0, 2, 3)
    scales = scales.reshape(WARPS, 8 * EIGHTS, 1, 8).broadcast_to(WARPS, 8 * EIGHTS, ROWS, 8)
    return scales.reshape(WARPS, 8 * EIGHTS, 8 * ROWS)


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
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    METHOD: tl.constexpr,
):
    """Some outputs of a share of a product of a few rows, of values as `block_values_kernel` gives them."""
    SLOTS: tl.constexpr = 2 if BITS == 8 else 4
    SIZE: tl.constexpr = 2 * SLOTS * GROUP
    num_parts = (num_in + SIZE - 1) // SIZE
    own_output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    is_output = own_output < num_out
    output = own_output.to(tl.int64)
    row_at = x + rows.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first = tl.program_id(1) * share_in
    end = tl.minimum(first + share_in, num_in)
    for start in tl.range(first, end, SIZE, num_stages=STAGES):
        part = start // SIZE
        whole = load_whole(wholes, output, part, num_in, is_output, FORM, GROUP)
        for i in tl.static_range(2):
            words = load_words(quants, output, 2 * part + i, 2 * num_parts, is_output, GROUP)
            more = load_high(high, output, part, num_parts, is_output, words, BITS, GROUP)
            for j in tl.static_range(SLOTS):
                column = start + (i * SLOTS + j) * GROUP + tl.arange(0, GROUP)
                mask = (rows < num_rows)[:, None] & (column < num_in)[None, :]
                here = tl.load(row_at + column[None, :], mask=mask, other=0.0)
                factor = tl.load(
                    factors + (output * num_parts + part) * (2 * SLOTS) + (i * SLOTS + j), mask=is_output, other=0
                )
                scale, minimum = scale_and_minimum(factor, whole, FORM)
                found = unpacked(words, more, (i * SLOTS + j), BITS)
                if METHOD == 0:
                    values = found.to(tl.float32) * scale[:, None]
                    if BITS != 8:
                        values += (minimum - 128.0 * scale)[:, None]
                    total = tl.dot(values.to(here.dtype), tl.trans(here), total)
                else:
                    total += scale[:, None] * tl.dot(found, tl.trans(here))
                    if BITS != 8:
                        ones = tl.full([OUTPUTS, GROUP], 1.0, tl.bfloat16)
                        total += (minimum - 128.0 * scale)[:, None] * tl.dot(ones, tl.trans(here))
    store_sums(total, bias, out, rows, own_output, out_stride, num_rows, num_out, HAS_BIAS)
