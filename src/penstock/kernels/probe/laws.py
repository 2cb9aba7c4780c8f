"""The laws beside that of products: attention, element-wise passes, recurrent state."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.cache import TokenRange
from penstock.cache.kv import KV
from penstock.cache.recurrent import RecurrentCache, RecurrentSpec
from penstock.cache.states import EMPTY
from penstock.kernels.elementwise import whole_lanes
from penstock.kernels.interface import DeltaHeads, HeadLayout, Kernels
from penstock.kernels.probe.data import ProbeShapes, Random
from penstock.kernels.probe.products import Tried
from penstock.kernels.spans import AttendedSpan, AttentionWork, StateRows, StateWork, WrittenPlaces
from penstock.plan.grids import STATE_GRID
from penstock.plan.model import DeltaNetShape

_PASS_ROWS = 512
# More blocks than any implementation takes at once, and a part of one.
_NUM_TOKENS = 9 * STATE_GRID + 13
_SCHEDULES = (
    (STATE_GRID, _NUM_TOKENS),
    (8 * STATE_GRID, _NUM_TOKENS),
    (4 * STATE_GRID, 5 * STATE_GRID, _NUM_TOKENS),
    (*range(STATE_GRID, _NUM_TOKENS, STATE_GRID), _NUM_TOKENS),
)


def attention_holds(kernels: Kernels, shapes: ProbeShapes, tried: Tried, random: Random) -> bool:
    """A query gets the same bits whatever the other queries of its tile hold."""
    tile, kv_shape = kernels.law.tile_size, (shapes.num_kv_heads, shapes.head_dim)
    scale = shapes.head_dim**-0.5
    queries = random.normal(tile, shapes.num_heads, shapes.head_dim)
    cuts = [
        (start, end)
        for end in (*tried.edges, tile - 1, tile)
        for start in {0, end // 2, end - 1}
        if end <= tile
    ]
    for past in (0, tile, 5 * tile):
        kv = random.cancelling_kv(past + tile, *kv_shape)

        def attended(start: int, end: int, past: int = past, kv: KV = kv) -> Tensor:
            # Keys after the last query are not there yet when a chunk ends inside the tile.
            known = KV(kv.keys.clone(), kv.values.clone())
            known.keys[past + end :] = 0
            known.values[past + end :] = 0
            places = (TokenRange(0, past + end),)
            span = AttendedSpan(
                0, end - start, past + start, places, is_prompt=True, tile_size=tile, origin=past
            )
            return kernels.attend(queries[start:end], AttentionWork((span,)), known, scale)

        whole = attended(0, tile)
        if not all(torch.equal(attended(start, end), whole[start:end]) for start, end in cuts):
            return False
    return True


def passes_hold(kernels: Kernels, shapes: ProbeShapes, random: Random) -> bool:
    """Norm, rotation and activation give a row the same bits whatever the other rows."""
    hidden = random.normal(_PASS_ROWS, shapes.hidden_size)
    heads = random.normal(_PASS_ROWS, shapes.num_heads, shapes.head_dim)
    projected = random.normal(_PASS_ROWS, (shapes.num_heads + 2 * shapes.num_kv_heads) * shapes.head_dim)
    gate_ups = [random.normal(_PASS_ROWS, 2 * width) for width in shapes.mlp_widths]
    angles = random.normal(_PASS_ROWS, shapes.rotary_dim)
    weight, head_weight = random.normal(shapes.hidden_size), random.normal(shapes.head_dim)
    scores = random.normal(_PASS_ROWS, max(shapes.num_experts, 1)).float()

    def placed(rows: slice) -> list[Tensor]:
        num_rows = rows.stop - rows.start
        found = []
        for norm in (None, head_weight, head_weight.float()):
            layout = HeadLayout(shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, norm, norm, 1e-5)
            kept = hidden.new_zeros(num_rows, shapes.num_kv_heads, shapes.head_dim)
            kv = KV(kept, kept.clone())
            places = WrittenPlaces((TokenRange(0, num_rows),))
            queries = kernels.place_heads(projected[rows], layout, angles[rows], angles[rows], kv, places)
            found += [queries, kv.keys, kv.values]
        return found

    def passes(rows: slice) -> list[Tensor]:
        return [
            kernels.rms_norm(hidden[rows], weight, 1e-5),
            kernels.rms_norm(hidden[rows], weight.float(), 1e-5),
            *kernels.add_norm(hidden[rows], hidden[rows].flip(1), weight, 1e-5),
            kernels.rms_norm(heads[rows], head_weight, 1e-5),
            kernels.rms_norm(heads[rows], head_weight.float(), 1e-5),
            *placed(rows),
            kernels.sigmoid(heads[rows].flatten(1)),
            torch.softmax(scores[rows], dim=-1),
            *(kernels.silu_and_mul(gate_up[rows].clone()) for gate_up in gate_ups),
        ]

    whole = passes(slice(0, _PASS_ROWS))
    for num_rows in (1, 2, 3, 7, 61, 100, 333):
        rows = slice(_PASS_ROWS - num_rows, _PASS_ROWS)
        if not all(
            torch.equal(ours, all_rows[rows]) for ours, all_rows in zip(passes(rows), whole, strict=True)
        ):
            return False
    return True


def recurrence_holds(kernels: Kernels, shape: DeltaNetShape, normal: Callable[..., Tensor]) -> bool:
    """A delta net gives the same outputs and the same state, whether it reads its tokens in one span or in several
    that end on the grid of states."""
    lanes = whole_lanes(shape.num_value_heads)
    conv_size = 2 * shape.num_key_heads * shape.key_head_dim + shape.value_size
    projected = normal(_NUM_TOKENS, conv_size + shape.value_size + 2 * lanes)
    net = DeltaHeads(
        num_key_heads=shape.num_key_heads,
        num_value_heads=shape.num_value_heads,
        key_head_dim=shape.key_head_dim,
        value_head_dim=shape.value_head_dim,
        norm_eps=1e-6,
        conv_weight=normal(shape.conv_kernel, conv_size).float(),
        decay_rate=-normal(lanes).float().exp(),
        decay_bias=normal(lanes).float(),
        norm=normal(shape.value_head_dim).float(),
    )
    spec = RecurrentSpec(
        1,
        shape.conv_kernel - 1,
        conv_size,
        shape.num_value_heads,
        shape.key_head_dim,
        shape.value_head_dim,
        projected.dtype,
    )

    def run(ends: tuple[int, ...]) -> list[Tensor]:
        """Outputs, then the tail and the matrix after the last token. States go to and fro between two slots."""
        states = RecurrentCache(spec, 2, projected.device).layer(0)
        outs, start, slot = [], 0, EMPTY
        for index, end in enumerate(ends):
            rows = StateRows(0, end - start, slot, index % 2, is_prompt=True)
            outs.append(kernels.carry_states(projected[start:end], net, StateWork((rows,)), states))
            start, slot = end, rows.write
        return [torch.cat(outs), states.tail(slot), states.matrix(slot)]

    whole = run((_NUM_TOKENS,))
    return all(
        all(torch.equal(ours, theirs) for ours, theirs in zip(run(ends), whole, strict=True))
        for ends in _SCHEDULES
    )
