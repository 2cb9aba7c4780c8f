"""A mixture of experts on a GPU, in Triton: routing, grouping by expert, both products, the weighted sum.

How many rows an expert has, only the device knows: launches have the shape of the most that there may be, and
programs without work end. An output is one sum over its inputs in their order, whatever the rows beside it, and
however many outputs and rows a program has.
"""

import triton
import triton.language as tl

from penstock.kernels.triton.blocks import group_values, load_high, load_whole, load_words

# Below every score; what was chosen, or is no expert, lies lower still.
_LEAST = tl.constexpr(-3.0e38)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "tile_rows"])
def route_kernel(
    scores,  # [rows, experts | ...]
    bias,  # [experts], or none
    expert_scales,  # likewise
    weights,  # [rows, active], float32
    chosen,  # [rows, active], int32
    counts,  # [blocks, experts], int32: rows of each block that go to each expert
    order,  # the last three as in `group_kernel`
    places,
    tiles,
    scores_stride,
    num_rows,
    num_tiles,
    tile_rows,
    scale,
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_ACTIVE_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_ALONE: tl.constexpr,
):
    """The experts that each row of a block goes to, the best first, and their weights. A block that is alone is
    grouped at once."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, COLUMNS)
    slots = tl.arange(0, SLOTS)[None, :]
    is_row, is_expert = rows < num_rows, at < NUM_EXPERTS
    mask = is_row[:, None] & is_expert[None, :]
    own = tl.load(scores + rows[:, None].to(tl.int64) * scores_stride + at[None, :], mask=mask, other=0.0)
    own = own.to(tl.float32)
    if IS_SOFTMAX:
        own = tl.where(is_expert[None, :], own, float("-inf"))
        powers = tl.exp(own - tl.max(own, axis=1)[:, None])
        chances = powers / tl.sum(powers, axis=1)[:, None]
    else:
        chances = 1.0 / (1.0 + tl.exp(-own))
    choice = chances
    if bias is not None:
        choice += tl.load(bias + at, mask=is_expert, other=0.0)[None, :]
    # What is no number ranks last: any row chooses as many different experts.
    choice = tl.where(choice == choice, tl.maximum(choice, _LEAST), _LEAST)
    if NUM_GROUPS > 1:
        choice = _of_best_groups(
            choice, at, NUM_EXPERTS // NUM_GROUPS, NUM_GROUPS, NUM_ACTIVE_GROUPS, GROUP_BEST, ROWS, COLUMNS
        )
    choice = tl.where(is_expert[None, :], choice, float("-inf"))
    found = tl.zeros([ROWS, SLOTS], tl.float32)
    experts = tl.zeros([ROWS, SLOTS], tl.int32)
    chooses = tl.zeros([ROWS, COLUMNS], tl.int32)
    for slot in range(NUM_ACTIVE):
        weight, best = tl.max(choice, axis=1, return_indices=True)
        is_best = at[None, :] == best[:, None]
        if bias is not None:
            weight = tl.sum(tl.where(is_best, chances, 0.0), axis=1)
        found = tl.where(slots == slot, weight[:, None], found)
        experts = tl.where(slots == slot, best[:, None], experts)
        chooses += is_best.to(tl.int32)
        choice = tl.where(is_best, float("-inf"), choice)
    if IS_NORMALISED:
        found = found / tl.sum(found, axis=1)[:, None]
    found = found * scale
    if expert_scales is not None:
        found = found * tl.load(expert_scales + experts)
    to = rows[:, None] * NUM_ACTIVE + slots
    tl.store(weights + to, found, mask=is_row[:, None] & (slots < NUM_ACTIVE))
    chooses = tl.where(is_row[:, None], chooses, 0)
    total = tl.sum(chooses, axis=0)
    if IS_ALONE:
        start = tl.cumsum(total, axis=0) - total
        place = tl.cumsum(chooses, axis=0) - chooses + start[None, :]
        for slot in range(NUM_ACTIVE):
            expert = tl.sum(tl.where(slots == slot, experts, 0), axis=1)
            own_place = tl.sum(tl.where(expert[:, None] == at[None, :], place, 0), axis=1)
            tl.store(order + own_place, rows, mask=is_row)
            tl.store(places + rows * NUM_ACTIVE + slot, own_place, mask=is_row)
        _store_tiles(tiles, start, total, at, num_tiles, tile_rows, COLUMNS)
    else:
        tl.store(chosen + to, experts, mask=is_row[:, None] & (slots < NUM_ACTIVE))
        tl.store(counts + tl.program_id(0) * NUM_EXPERTS + at, total, mask=is_expert)


@triton.jit
def _of_best_groups(
    choice,
    at,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_ACTIVE_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Those of the groups whose best experts, one or two, are best together; the others are out of reach."""
    GROUPS: tl.constexpr = triton.next_power_of_2(NUM_GROUPS)
    numbers = tl.arange(0, GROUPS)[None, :]
    best = tl.full([ROWS, GROUPS], float("-inf"), tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        own = tl.where((at // SIZE == group)[None, :], choice, float("-inf"))
        both = tl.max(own, axis=1)
        if SIZE > 1 and GROUP_BEST > 1:
            first = tl.argmax(own, axis=1)
            both += tl.max(tl.where(at[None, :] == first[:, None], float("-inf"), own), axis=1)
        best = tl.where(numbers == group, tl.maximum(both, _LEAST)[:, None], best)
    is_chosen = tl.zeros([ROWS, COLUMNS], tl.int1)
    for _ in tl.static_range(NUM_ACTIVE_GROUPS):
        group = tl.argmax(best, axis=1)
        is_chosen = is_chosen | ((at // SIZE)[None, :] == group[:, None])
        best = tl.where(numbers == group[:, None], float("-inf"), best)
    return tl.where(is_chosen, choice, _LEAST)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_tiles", "tile_rows"])
def group_kernel(
    chosen,  # [rows, active], int32
    counts,  # [blocks, experts], int32
    order,  # [rows * active], int32: the row of each place, those of an expert side by side
    places,  # [rows, active], int32: where each has its place
    tiles,  # [3, num_tiles], int32: of a tile of places its expert, its first place, the end of the expert's
    num_rows,
    num_blocks,
    num_tiles,
    tile_rows,
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Places of the rows of a block, by expert and then by row; of the first block, the table of tiles, too."""
    block = tl.program_id(0)
    at = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    before = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, num_blocks, TOGETHER):
        blocks = first + tl.arange(0, TOGETHER)[:, None]
        mask = (blocks < num_blocks) & (at < NUM_EXPERTS)[None, :]
        some = tl.load(counts + blocks * NUM_EXPERTS + at[None, :], mask=mask, other=0)
        total += tl.sum(some, axis=0)
        before += tl.sum(tl.where(blocks < block, some, 0), axis=0)
    start = tl.cumsum(total, axis=0) - total
    rows = block * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    chooses = tl.zeros([ROWS, COLUMNS], tl.int32)
    for slot in range(NUM_ACTIVE):
        expert = tl.load(chosen + rows * NUM_ACTIVE + slot, mask=is_row, other=-1)
        chooses += (expert[:, None] == at[None, :]).to(tl.int32)
    place = tl.cumsum(chooses, axis=0) - chooses + (start + before)[None, :]
    for slot in range(NUM_ACTIVE):
        expert = tl.load(chosen + rows * NUM_ACTIVE + slot, mask=is_row, other=-1)
        own_place = tl.sum(tl.where(expert[:, None] == at[None, :], place, 0), axis=1)
        tl.store(order + own_place, rows, mask=is_row)
        tl.store(places + rows * NUM_ACTIVE + slot, own_place, mask=is_row)
    if block == 0:
        _store_tiles(tiles, start, total, at, num_tiles, tile_rows, COLUMNS)


@triton.jit
def _store_tiles(tiles, start, total, at, num_tiles, tile_rows, COLUMNS: tl.constexpr):
    """Of experts whose `total` places begin at `start`. Tiles that none has are marked."""
    of_expert = (total + tile_rows - 1) // tile_rows
    end = tl.cumsum(of_expert, axis=0)
    for index in range(tl.max(of_expert, axis=0)):
        to = tiles + end - of_expert + index
        mask = index < of_expert
        tl.store(to, at, mask=mask)
        tl.store(to + num_tiles, start + index * tile_rows, mask=mask)
        tl.store(to + 2 * num_tiles, start + total, mask=mask)
    used = tl.max(end, axis=0)
    for first in range(0, num_tiles, COLUMNS):
        tile = first + at
        tl.store(tiles + tile, tl.full([COLUMNS], -1, tl.int32), mask=(tile >= used) & (tile < num_tiles))


@triton.jit
def _product(rows, weight, total, IS_SWAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """total + rows [ROWS, BLOCK] times weight [OUTPUTS, BLOCK]. The matrix units take no fewer than 64 of what comes
    first: few rows come second, and so do all where weights are made values in registers."""
    if IS_SWAPPED:
        total = tl.dot(weight, tl.trans(rows), total, input_precision=PRECISION)
    else:
        total = tl.dot(rows, tl.trans(weight), total, input_precision=PRECISION)
    return total


@triton.jit
def _scaled(product, of_rows, of_outputs, IS_SWAPPED: tl.constexpr):
    """Products times a scale of each row and of each output."""
    if IS_SWAPPED:
        product *= of_outputs[:, None] * of_rows[None, :]
    else:
        product *= of_rows[:, None] * of_outputs[None, :]
    return product


@triton.jit
def _scales_of_rows(row_scales, row, ROWS: tl.constexpr):
    if row_scales is not None:
        found = tl.load(row_scales + row)
    else:
        found = tl.full([ROWS], 1.0, tl.float32)
    return found


@triton.jit
def _weights(
    weight,
    output,  # [OUTPUTS], int64
    is_output,
    start,
    like,
    NUM_IN: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_RAGGED: tl.constexpr,
):
    """Weights [OUTPUTS, BLOCK] of the inputs from `start` on, in the dtype of `like`; 8-bit floats as multiples of
    their scales."""
    columns = tl.arange(0, BLOCK)[None, :]
    at = weight + output[:, None] * NUM_IN + columns + start
    if IS_RAGGED:
        found = tl.load(at, mask=is_output[:, None] & (start + columns < NUM_IN), other=0.0)
    else:
        found = tl.load(at)
    if found.dtype != like.dtype:
        found = found.to(tl.float32).to(like.dtype)
    return found


@triton.jit(do_not_specialize=["num_tiles", "row_scales_stride"])
def expert_kernel(
    x,  # [rows, inputs]
    row_scales,  # [rows, blocks] of 8-bit floats, rows side by side; or none
    weight,  # [experts, outputs, inputs]; outputs of gates and then as many of what they gate; or words of blocks
    high,  # the last three as in `blocks.py`, or none; `scales` of 8-bit floats: [experts, outputs, blocks]
    scales,
    wholes,
    order,  # [places], the row of each place; or none: rows are places
    tiles,  # [3, num_tiles]
    out,  # [places, outputs]
    x_stride,
    row_scales_stride,  # from block to block
    num_tiles,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    IS_GATED: tl.constexpr,
    FORM: tl.constexpr,  # "": plain
    BITS: tl.constexpr,  # 0: not blocks
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,  # 128 where 8-bit floats have a scale for so many inputs
    IS_SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some outputs of some rows of an expert; gated, silu(gate) * up."""
    NUM_PARTS: tl.constexpr = (NUM_OUT + OUTPUTS - 1) // OUTPUTS
    HEIGHT: tl.constexpr = 2 * NUM_OUT if IS_GATED else NUM_OUT
    IS_RAGGED: tl.constexpr = NUM_IN % BLOCK != 0 or NUM_OUT % OUTPUTS != 0
    HAS_BLOCKS: tl.constexpr = FORM == "F8_BLOCK"
    NUM_SCALES: tl.constexpr = (NUM_IN + 127) // 128 if HAS_BLOCKS else 1
    tile = tl.program_id(0) // NUM_PARTS
    expert = tl.load(tiles + tile)
    if expert >= 0:
        place = tl.load(tiles + num_tiles + tile) + tl.arange(0, ROWS)
        is_row = place < tl.load(tiles + 2 * num_tiles + tile)
        row = tl.where(is_row, place, 0)
        if order is not None:
            row = tl.load(order + row)
        outputs = tl.program_id(0) % NUM_PARTS * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = outputs < NUM_OUT
        own_output = expert.to(tl.int64) * HEIGHT + outputs
        columns = tl.arange(0, BLOCK)[None, :]
        row_at = x + row[:, None].to(tl.int64) * x_stride + columns
        shape: tl.constexpr = [OUTPUTS, ROWS] if IS_SWAPPED else [ROWS, OUTPUTS]
        total = tl.zeros(shape, tl.float32)
        gated = tl.zeros(shape, tl.float32)
        zeros = tl.zeros(shape, tl.float32)
        if BITS:
            SLOTS: tl.constexpr = 2 if BITS == 8 else 4
            SIZE: tl.constexpr = 2 * SLOTS * GROUP
            NUM_PARTS_IN: tl.constexpr = (NUM_IN + SIZE - 1) // SIZE
            inner = tl.arange(0, GROUP)[None, :]
            group_at = x + row[:, None].to(tl.int64) * x_stride + inner
            gated_output = own_output + NUM_OUT
            for part in range(NUM_PARTS_IN):
                whole = load_whole(wholes, own_output, part, NUM_IN, is_output, FORM, GROUP)
                if IS_GATED:
                    whole_1 = load_whole(wholes, gated_output, part, NUM_IN, is_output, FORM, GROUP)
                for i in tl.static_range(2):
                    tile = part * 2 + i
                    words = load_words(weight, own_output, tile, NUM_PARTS_IN * 2, is_output, GROUP)
                    more = load_high(high, own_output, part, NUM_PARTS_IN, is_output, words, BITS, GROUP)
                    if IS_GATED:
                        words_1 = load_words(weight, gated_output, tile, NUM_PARTS_IN * 2, is_output, GROUP)
                        more_1 = load_high(
                            high, gated_output, part, NUM_PARTS_IN, is_output, words_1, BITS, GROUP
                        )
                    for j in tl.static_range(SLOTS):
                        start = part * SIZE + (i * SLOTS + j) * GROUP
                        if NUM_IN % SIZE:
                            own = tl.load(group_at + start, mask=start + inner < NUM_IN, other=0.0)
                        else:
                            own = tl.load(group_at + start)
                        values = group_values(
                            words,
                            more,
                            scales,
                            own_output,
                            part,
                            NUM_PARTS_IN,
                            whole,
                            is_output,
                            i * SLOTS + j,
                            FORM,
                            BITS,
                        )
                        total = _product(own, values.to(own.dtype), total, IS_SWAPPED, PRECISION)
                        if IS_GATED:
                            values = group_values(
                                words_1,
                                more_1,
                                scales,
                                gated_output,
                                part,
                                NUM_PARTS_IN,
                                whole_1,
                                is_output,
                                i * SLOTS + j,
                                FORM,
                                BITS,
                            )
                            gated = _product(own, values.to(own.dtype), gated, IS_SWAPPED, PRECISION)
        else:
            for start in range(0, NUM_IN, BLOCK):
                if IS_RAGGED:
                    own = tl.load(
                        row_at + start, mask=is_row[:, None] & (start + columns < NUM_IN), other=0.0
                    )
                else:
                    own = tl.load(row_at + start)
                part = _weights(weight, own_output, is_output, start, own, NUM_IN, BLOCK, IS_RAGGED)
                if HAS_BLOCKS:
                    of_rows = _scales_of_rows(row_scales, start // 128 * row_scales_stride + row, ROWS)
                    scale_at = scales + own_output * NUM_SCALES + start // 128
                    of_outputs = tl.load(scale_at, mask=is_output, other=0.0)
                    total += _scaled(
                        _product(own, part, zeros, IS_SWAPPED, PRECISION), of_rows, of_outputs, IS_SWAPPED
                    )
                else:
                    total = _product(own, part, total, IS_SWAPPED, PRECISION)
                if IS_GATED:
                    part = _weights(
                        weight, own_output + NUM_OUT, is_output, start, own, NUM_IN, BLOCK, IS_RAGGED
                    )
                    if HAS_BLOCKS:
                        of_outputs = tl.load(scale_at + NUM_OUT * NUM_SCALES, mask=is_output, other=0.0)
                        gated += _scaled(
                            _product(own, part, zeros, IS_SWAPPED, PRECISION), of_rows, of_outputs, IS_SWAPPED
                        )
                    else:
                        gated = _product(own, part, gated, IS_SWAPPED, PRECISION)
        if FORM == "F8_ROW":
            of_rows = _scales_of_rows(row_scales, row, ROWS)
            of_outputs = tl.load(scales + own_output, mask=is_output, other=0.0)
            total = _scaled(total, of_rows, of_outputs, IS_SWAPPED)
            if IS_GATED:
                of_outputs = tl.load(scales + own_output + NUM_OUT, mask=is_output, other=0.0)
                gated = _scaled(gated, of_rows, of_outputs, IS_SWAPPED)
        if IS_SWAPPED:
            total = tl.trans(total)
            gated = tl.trans(gated)
        result = total.to(out.dtype.element_ty)
        if IS_GATED:
            gate = result.to(tl.float32)
            activated = (gate / (1.0 + tl.exp(-gate))).to(result.dtype).to(tl.float32)
            result = (activated * gated.to(result.dtype).to(tl.float32)).to(result.dtype)
        to = out + place[:, None].to(tl.int64) * NUM_OUT + outputs[None, :]
        tl.store(to, result, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def weighted_sum_kernel(
    outputs,  # [places, size]
    weights,  # [rows, active], float32
    places,  # [rows, active], int32
    shared,  # [rows, size], or none
    scores,  # [rows, experts | the shared expert's gate | ...]
    out,  # [rows, size]
    shared_stride,
    scores_stride,
    size,
    GATE: tl.constexpr,  # where it lies in scores; 0: there is none
    NUM_ACTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of a row: its experts' outputs, the best one's first, and the shared expert's."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(NUM_ACTIVE):
        place = tl.load(places + row * NUM_ACTIVE + slot).to(tl.int64)
        weight = tl.load(weights + row * NUM_ACTIVE + slot)
        total += weight * tl.load(outputs + place * size + at, mask=mask, other=0.0).to(tl.float32)
    if shared is not None:
        own = tl.load(shared + row * shared_stride + at, mask=mask, other=0.0).to(tl.float32)
        if GATE:
            score = tl.load(scores + row * scores_stride + GATE).to(tl.float32)
            own = own / (1.0 + tl.exp(-score))
        total += own
    tl.store(out + row * size + at, total.to(out.dtype.element_ty), mask=mask)
