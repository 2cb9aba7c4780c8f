"""Weights of 4 to 8 bits on a GPU, in Triton: as values, and multiplied by a few rows as they lie.

A row of a weight is a number of pieces of 32 inputs, and a piece one group or two. A group has LANES words of SLOTS
quants: slot `j` of lane `i` is the quant of the group's input `j * LANES + i`. What a word has no bits for lies in
`high`. value = scale * quant + minimum.
"""

import triton
import triton.language as tl

from penstock.kernels.triton.rows import store_sums


@triton.jit
def _stored_factors(scales, minimums, wholes, at, group, mask, FORM: tl.constexpr, PER_SCALE: tl.constexpr):
    """What scales and minimums of groups are made of, in pieces that lie `at` some places; a scale is that of
    PER_SCALE pieces."""
    if FORM == "Q6_K":
        first = tl.load(scales + 2 * at + group, mask=mask, other=0)
        second = tl.load(wholes + at // 8, mask=mask, other=0.0)
    elif FORM == "Q4_K" or FORM == "Q5_K":
        first = tl.load(scales + at, mask=mask, other=0)
        second = tl.load(wholes + at // 8, mask=mask, other=0)
    else:
        first = tl.load(scales + at // PER_SCALE, mask=mask, other=0.0)
        if FORM == "Q4_0" or FORM == "Q8_0":
            second = first
        else:
            second = tl.load(minimums + at // PER_SCALE, mask=mask, other=0.0)
    return first, second


@triton.jit
def _factors(first, second, FORM: tl.constexpr):
    """Scales and minimums."""
    if FORM == "Q4_K" or FORM == "Q5_K":
        scale = (first & 0xFF).to(tl.float32) * _half(second)
        minimum = ((first >> 8) & 0xFF).to(tl.float32) * -_half(second >> 16)
    else:
        scale, minimum = first.to(tl.float32), second.to(tl.float32)
        if FORM == "Q6_K":
            scale *= minimum
            minimum = -32.0 * scale
        elif FORM == "Q4_0":
            minimum = -8.0 * scale
        elif FORM == "Q8_0":
            minimum = -128.0 * scale
        elif FORM != "Q4_1":  # a zero point
            minimum = -minimum * scale
    return scale, minimum


@triton.jit
def _half(word):
    """The float16 in the last bits of a word."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _loaded(quants, high, at, group, lane, mask, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Words, and what they have no bits for: 1 or 2 bits of each quant, group by group."""
    LANES: tl.constexpr = GROUP // 4 if BITS == 8 else GROUP // 8
    GROUPS: tl.constexpr = 32 // GROUP
    words = tl.load(quants + at * (GROUPS * LANES) + group * LANES + lane, mask=mask, other=0)
    if BITS == 5 or BITS == 6:
        more = tl.load(high + at * GROUPS + group, mask=mask, other=0)
    else:
        more = words
    return words, more


@triton.jit
def _quants(words, more, j, lane, BITS: tl.constexpr, GROUP: tl.constexpr):
    LANES: tl.constexpr = GROUP // 8
    if BITS == 8:
        found = (words >> (8 * j)) & 0xFF
    else:
        found = (words >> (4 * j)) & 0xF
    if BITS == 5 or BITS == 6:
        MASK: tl.constexpr = (1 << (BITS - 4)) - 1
        found |= ((more >> ((BITS - 4) * (LANES * j + lane))) & MASK) << 4
    return found


@triton.jit
def _values(
    quants,
    high,
    scales,
    minimums,
    wholes,
    output,  # [outputs]
    piece,  # [pieces]
    mask,  # [outputs, pieces]
    num_pieces,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    PER_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Values [outputs, pieces, groups, slots, lanes], in the order of inputs."""
    SLOTS: tl.constexpr = 4 if BITS == 8 else 8
    at = (output[:, None] * num_pieces + piece[None, :])[:, :, None, None, None]
    mask = mask[:, :, None, None, None]
    group = tl.arange(0, 32 // GROUP)[None, None, :, None, None]
    lane = tl.arange(0, GROUP // SLOTS)[None, None, None, None, :]
    j = tl.arange(0, SLOTS)[None, None, None, :, None]
    words, more = _loaded(quants, high, at, group, lane, mask, BITS, GROUP)
    first, second = _stored_factors(scales, minimums, wholes, at, group, mask, FORM, PER_SCALE)
    scale, minimum = _factors(first, second, FORM)
    return _quants(words, more, j, lane, BITS, GROUP).to(tl.float32) * scale + minimum


@triton.jit
def block_values_kernel(
    quants,
    high,
    scales,
    minimums,
    wholes,
    rows,  # [num_rows], the outputs that are wanted; none: the first ones
    out,  # [num_rows, num_pieces * 32]
    num_rows,
    num_pieces,
    HAS_ROWS: tl.constexpr,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    PER_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Outputs of a weight as values."""
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = row < num_rows
    output = tl.load(rows + row, mask=is_row, other=0) if HAS_ROWS else row
    piece = tl.program_id(1) * PIECES + tl.arange(0, PIECES)
    mask = is_row[:, None] & (piece < num_pieces)[None, :]
    values = _values(
        quants,
        high,
        scales,
        minimums,
        wholes,
        output.to(tl.int64),
        piece,
        mask,
        num_pieces,
        FORM,
        BITS,
        PER_SCALE,
        GROUP,
    )
    values = tl.reshape(values.to(out.dtype.element_ty), [OUTPUTS, PIECES * 32])
    column = tl.program_id(1) * PIECES * 32 + tl.arange(0, PIECES * 32)
    to = out + row.to(tl.int64)[:, None] * (num_pieces * 32) + column[None, :]
    tl.store(to, values, mask=is_row[:, None] & (column < num_pieces * 32)[None, :])


@triton.jit
def _groups(
    quants,
    high,
    scales,
    minimums,
    wholes,
    output,  # [outputs, 1, 1, 1]
    piece,  # [1, pieces, 1, 1]
    num_out,
    num_pieces,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    PER_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Words, what they have no bits for, and what scales and minimums are made of."""
    group = tl.arange(0, 32 // GROUP)[None, None, :, None]
    lane = tl.arange(0, GROUP // (4 if BITS == 8 else 8))[None, None, None, :]
    mask = (output < num_out) & (piece < num_pieces)
    at = output.to(tl.int64) * num_pieces + piece
    words, more = _loaded(quants, high, at, group, lane, mask, BITS, GROUP)
    first, second = _stored_factors(scales, minimums, wholes, at, group, mask, FORM, PER_SCALE)
    return words, more, first, second


@triton.jit
def _weighed(words, more, j: tl.constexpr, lane, here, raised, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Quants of a slot times inputs. Where it lies in its word, a quant of 4 bits is so many times as large."""
    if BITS == 4:
        found = (words.to(tl.uint32, bitcast=True) & (0xF << (4 * j))).to(tl.float32) * raised
    else:
        found = _quants(words, more, j, lane, BITS, GROUP).to(tl.float32) * here
    return found


@triton.jit
def _store_row(out, bias, total, output, num_out, HAS_BIAS: tl.constexpr):
    found = tl.sum(
        tl.reshape(total, [total.shape[0], total.shape[1] * total.shape[2] * total.shape[3]]), axis=1
    )
    if HAS_BIAS:
        found += tl.load(bias + output, mask=output < num_out, other=0.0).to(tl.float32)
    tl.store(out + output, found.to(out.dtype.element_ty), mask=output < num_out)


@triton.jit
def block_row_kernel(
    x,  # [num_in]
    quants,
    high,
    scales,
    minimums,
    wholes,
    bias,  # [num_out], or none
    out,  # [num_out]
    num_out,
    num_pieces,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    PER_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FOLD: tl.constexpr,  # 1 or 2
    PIECES: tl.constexpr,
):
    """FOLD * OUTPUTS outputs of a product of one row. A group's products are summed, then scaled. Threads have FOLD
    outputs each, for which inputs are made ready once."""
    SLOTS: tl.constexpr = 4 if BITS == 8 else 8
    GROUPS: tl.constexpr = 32 // GROUP
    LANES: tl.constexpr = GROUP // SLOTS
    own = tl.program_id(0) * (FOLD * OUTPUTS) + tl.arange(0, OUTPUTS)
    output = own[:, None, None, None]
    group = tl.arange(0, GROUPS)[None, None, :, None]
    lane = tl.arange(0, LANES)[None, None, None, :]
    total = tl.zeros([OUTPUTS, PIECES, GROUPS, LANES], tl.float32)
    total_1 = total
    piece = tl.arange(0, PIECES)[None, :, None, None]
    # What the next step takes is on its way during each.
    words, more, first, second = _groups(
        quants,
        high,
        scales,
        minimums,
        wholes,
        output,
        piece,
        num_out,
        num_pieces,
        FORM,
        BITS,
        PER_SCALE,
        GROUP,
    )
    if FOLD > 1:
        words_1, more_1, first_1, second_1 = _groups(
            quants, high, scales, minimums, wholes, output + OUTPUTS, piece, num_out, num_pieces,
            FORM, BITS, PER_SCALE, GROUP,
        )  # fmt: skip
    for start in range(0, num_pieces, PIECES):
        piece = (start + tl.arange(0, PIECES))[None, :, None, None]
        next_words, next_more, next_first, next_second = _groups(
            quants, high, scales, minimums, wholes, output, piece + PIECES, num_out, num_pieces,
            FORM, BITS, PER_SCALE, GROUP,
        )  # fmt: skip
        if FOLD > 1:
            next_words_1, next_more_1, next_first_1, next_second_1 = _groups(
                quants, high, scales, minimums, wholes, output + OUTPUTS, piece + PIECES, num_out, num_pieces,
                FORM, BITS, PER_SCALE, GROUP,
            )  # fmt: skip
        products = tl.zeros([OUTPUTS, PIECES, GROUPS, LANES], tl.float32)
        products_1 = products
        inputs_sum = tl.zeros([1, PIECES, GROUPS, LANES], tl.float32)
        for j in tl.static_range(SLOTS):
            column = piece * 32 + group * GROUP + j * LANES + lane
            here = tl.load(x + column, mask=piece < num_pieces, other=0.0).to(tl.float32)
            inputs_sum += here
            raised = here * (1.0 / (1 << (4 * j)))
            products += _weighed(words, more, j, lane, here, raised, BITS, GROUP)
            if FOLD > 1:
                products_1 += _weighed(words_1, more_1, j, lane, here, raised, BITS, GROUP)
        scale, minimum = _factors(first, second, FORM)
        total += products * scale + inputs_sum * minimum
        words, more, first, second = next_words, next_more, next_first, next_second
        if FOLD > 1:
            scale, minimum = _factors(first_1, second_1, FORM)
            total_1 += products_1 * scale + inputs_sum * minimum
            words_1, more_1, first_1, second_1 = next_words_1, next_more_1, next_first_1, next_second_1
    _store_row(out, bias, total, own, num_out, HAS_BIAS)
    if FOLD > 1:
        _store_row(out, bias, total_1, own + OUTPUTS, num_out, HAS_BIAS)


@triton.jit(do_not_specialize=["num_rows"])
def block_rows_kernel(
    x,  # [num_rows, num_in]
    quants,
    high,
    scales,
    minimums,
    wholes,
    bias,  # [num_out], or none
    out,  # [num_rows, num_out]; or sums of float32 [parts, num_rows, num_out]
    x_stride,
    out_stride,
    num_rows,
    num_out,
    num_pieces,
    part_pieces,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    PER_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some outputs of a part of a product of a few rows, of values as `block_values_kernel` gives them."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    is_output, is_row = output < num_out, rows < num_rows
    inner = tl.arange(0, PIECES * 32)
    row_at = rows.to(tl.int64)[None, :] * x_stride
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first = tl.program_id(1) * part_pieces
    end = tl.minimum(first + part_pieces, num_pieces)
    for start in tl.range(first, end, PIECES, num_stages=STAGES):
        piece = start + tl.arange(0, PIECES)
        mask = is_output[:, None] & (piece < end)[None, :]
        values = _values(
            quants,
            high,
            scales,
            minimums,
            wholes,
            output.to(tl.int64),
            piece,
            mask,
            num_pieces,
            FORM,
            BITS,
            PER_SCALE,
            GROUP,
        )
        values = tl.reshape(values.to(x.dtype.element_ty), [OUTPUTS, PIECES * 32])
        column = (start * 32 + inner)[:, None]
        here = tl.load(x + row_at + column, mask=(column < end * 32) & is_row[None, :], other=0.0)
        total = tl.dot(values, here, total)
    store_sums(total, bias, out, rows, output, out_stride, num_rows, num_out, HAS_BIAS)
