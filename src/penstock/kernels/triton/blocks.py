"""Weights of 4 to 8 bits on a GPU, in Triton: as values, and multiplied by a few rows as they lie.

A row of a weight is a number of parts of SLOTS groups, each of GROUP inputs. A part has GROUP words: slot `j` of word
`i` is the quant of input `i` of group `j`. What a word has no bits for lies in `high`, by word. Scales of several
groups share a word of `factors`. value = scale * quant + minimum. A slot of all words is a group: made slot by slot,
values stay with the threads that have the words, and meet the inputs as those lie.
"""

import triton
import triton.language as tl

from penstock.kernels.triton.rows import store_sums

_WHOLE = tl.constexpr(256)  # inputs to a scale of scales


@triton.jit
def load_part(
    quants,
    high,
    wholes,
    output,
    part,
    mask,
    num_parts,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Words [outputs, GROUP] of a part, what they have no bits for, and the scale of its scales."""
    SLOTS: tl.constexpr = 4 if BITS == 8 else 8
    word = (output * num_parts + part)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    words = tl.load(quants + word, mask=mask[:, None], other=0)
    more = words
    if BITS == 5 or BITS == 6:
        more = tl.load(high + word, mask=mask[:, None], other=0)
    whole = tl.zeros_like(output).to(tl.int32)
    if FORM == "Q4_K" or FORM == "Q5_K" or FORM == "Q6_K":
        num_wholes = (num_parts * (SLOTS * GROUP) + _WHOLE - 1) // _WHOLE
        whole = tl.load(wholes + output * num_wholes + part * (SLOTS * GROUP) // _WHOLE, mask=mask, other=0)
    return words, more, whole


@triton.jit
def load_factor(
    factors, output, part, mask, num_parts, j: tl.constexpr, BITS: tl.constexpr, PER_WORD: tl.constexpr
):
    """The word [outputs] with the scale of a part's group `j`."""
    SLOTS: tl.constexpr = 4 if BITS == 8 else 8
    at = (output * num_parts + part) * (SLOTS // PER_WORD) + j // PER_WORD
    return tl.load(factors + at, mask=mask, other=0)


@triton.jit
def _half(word):
    """The float16 in the last bits of a word."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def slot_values(
    words,
    more,
    factor,
    whole,
    j: tl.constexpr,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
):
    """Values [outputs, GROUP] of group `j` of a part, in float32. Quants stay where they lie in words, so many
    times as large, as scales are made smaller."""
    WIDTH: tl.constexpr = 8 if BITS == 8 else 4
    IS_LATER: tl.constexpr = WIDTH * j > 16
    SHIFT: tl.constexpr = WIDTH * j - (12 if WIDTH == 4 else 16) * IS_LATER
    if IS_LATER:
        words = words >> (WIDTH * j - SHIFT)
    found = words & (((1 << WIDTH) - 1) << SHIFT)
    if BITS == 5 or BITS == 6:
        MORE: tl.constexpr = BITS - 4
        found |= (more.to(tl.int32) << (SHIFT + 4 - MORE * j)) & (((1 << MORE) - 1) << (SHIFT + 4))
    AT: tl.constexpr = 32 // PER_WORD * (j % PER_WORD)
    own = factor >> AT
    if FORM == "Q4_K" or FORM == "Q5_K":
        scale = (own & 0xFF).to(tl.float32) * _half(whole)
        minimum = ((own >> 8) & 0xFF).to(tl.float32) * -_half(whole >> 16)
    elif FORM == "Q6_K":
        scale = own.to(tl.int8).to(tl.float32) * _half(whole)
        minimum = -32.0 * scale
    else:
        scale = _half(own)
        if FORM == "Q4_0":
            minimum = -8.0 * scale
        elif FORM == "Q8_0":
            minimum = -128.0 * scale
        elif FORM == "Q4_1":
            minimum = _half(own >> 16)
        else:  # a zero point
            minimum = -_half(own >> 16) * scale
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
    PER_WORD: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """A part of some outputs of a weight as values."""
    SLOTS: tl.constexpr = 4 if BITS == 8 else 8
    num_parts = (num_in + SLOTS * GROUP - 1) // (SLOTS * GROUP)
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(1)
    is_row = row < num_rows
    output = row
    if rows is not None:
        output = tl.load(rows + row, mask=is_row, other=0)
    output = output.to(tl.int64)
    words, more, whole = load_part(quants, high, wholes, output, part, is_row, num_parts, FORM, BITS, GROUP)
    column = part * (SLOTS * GROUP) + tl.arange(0, GROUP)
    to = out + row.to(tl.int64)[:, None] * num_in + column[None, :]
    for j in tl.static_range(SLOTS):
        factor = load_factor(factors, output, part, is_row, num_parts, j, BITS, PER_WORD)
        values = slot_values(words, more, factor, whole, j, FORM, BITS, PER_WORD)
        is_in = is_row[:, None] & (column + j * GROUP < num_in)[None, :]
        tl.store(to + j * GROUP, values.to(out.dtype.element_ty), mask=is_in)


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
    PER_WORD: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some outputs of a share of a product of a few rows, of values as `block_values_kernel` gives them."""
    SLOTS: tl.constexpr = 4 if BITS == 8 else 8
    SIZE: tl.constexpr = SLOTS * GROUP
    num_parts = (num_in + SIZE - 1) // SIZE
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    is_output, is_row = own < num_out, rows < num_rows
    output = own.to(tl.int64)
    row_at = x + rows.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first = tl.program_id(1) * share_in
    end = tl.minimum(first + share_in, num_in)
    for start in tl.range(first, end, SIZE, num_stages=STAGES):
        part = start // SIZE
        words, more, whole = load_part(
            quants, high, wholes, output, part, is_output, num_parts, FORM, BITS, GROUP
        )
        for j in tl.static_range(SLOTS):
            column = start + j * GROUP + tl.arange(0, GROUP)
            here = tl.load(
                row_at + column[None, :], mask=is_row[:, None] & (column < num_in)[None, :], other=0.0
            )
            factor = load_factor(factors, output, part, is_output, num_parts, j, BITS, PER_WORD)
            values = slot_values(words, more, factor, whole, j, FORM, BITS, PER_WORD)
            total = tl.dot(values.to(here.dtype), tl.trans(here), total)
    store_sums(total, bias, out, rows, own, out_stride, num_rows, num_out, HAS_BIAS)
