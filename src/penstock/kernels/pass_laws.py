"""Attention, element-wise passes and recurrent states, tried on random data of a model's shapes: a row's bits do not
depend on the other rows."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.cache import TokenRange
from penstock.cache.states import EMPTY
from penstock.cache.tensors import KV, RecurrentCache, RecurrentSpec
from penstock.kernels.elementwise import ACTIVATIONS
from penstock.kernels.interface import Kernels
from penstock.kernels.spans import (
    AttendedSpan,
    AttentionWork,
    DeltaHeads,
    HeadLayout,
    MambaHeads,
    Scoring,
    ShortConv,
    StateNet,
    StateRows,
    StateWork,
    WrittenPlaces,
)
from penstock.plan.grids import (
    STATE_GRID,
    whole_lanes,
)
from penstock.plan.model import (
    DeltaNetConfig,
    LatentConfig,
    RecurrentConfig,
    ShortConvConfig,
    input_size,
)

if TYPE_CHECKING:
    from penstock.kernels.probe import ProbeShapes, Random, Tried
_PASS_ROWS = 512
# More blocks than any implementation takes at once, and a part of one.
_NUM_TOKENS = 9 * STATE_GRID + 13
_SCHEDULES = (
    (STATE_GRID, _NUM_TOKENS),
    (8 * STATE_GRID, _NUM_TOKENS),
    (4 * STATE_GRID, 5 * STATE_GRID, _NUM_TOKENS),
    (*range(STATE_GRID, _NUM_TOKENS, STATE_GRID), _NUM_TOKENS),
)


def attention_holds(kernels: Kernels, shapes: "ProbeShapes", tried: "Tried", random: "Random") -> bool:
    """A query gets the same bits whatever the other queries of its tile hold."""
    tile, kv_shape = kernels.law.tile_size, (shapes.num_kv_heads, shapes.head_dim)
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
            return kernels.attend(
                queries[start:end], AttentionWork((span,)), known, Scoring(shapes.head_dim**-0.5)
            )

        whole = attended(0, tile)
        if not all(torch.equal(attended(start, end), whole[start:end]) for start, end in cuts):
            return False
    return True


def passes_hold(kernels: Kernels, shapes: "ProbeShapes", random: "Random") -> bool:
    """Norm, rotation and activation give a row the same bits whatever the other rows."""
    hidden = random.normal(_PASS_ROWS, shapes.hidden_size)
    heads = random.normal(_PASS_ROWS, shapes.num_heads, shapes.head_dim)
    projected = random.normal(_PASS_ROWS, (shapes.num_heads + 2 * shapes.num_kv_heads) * shapes.head_dim)
    gate_ups = [random.normal(_PASS_ROWS, 2 * width) for width in shapes.mlp_widths]
    function = ACTIVATIONS[shapes.activation]
    other_gate_ups = [] if shapes.activation == "silu" else gate_ups
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

    of_latent = random.normal(*_latent_shape(shapes.latent, shapes.num_heads)) if shapes.latent else None

    def products_of_heads(rows: slice) -> list[Tensor]:
        if of_latent is None:
            return []
        keys = kernels.per_head(heads[rows][..., : of_latent.shape[1]], of_latent, is_canonical=True)
        return [keys, kernels.per_head(keys, of_latent.transpose(1, 2).contiguous(), is_canonical=True)]

    def passes(rows: slice) -> list[Tensor]:
        return [
            *products_of_heads(rows),
            kernels.rms_norm(hidden[rows], weight, 1e-5),
            kernels.rms_norm(hidden[rows], weight.float(), 1e-5),
            *kernels.add_norm(hidden[rows], hidden[rows].flip(1), weight, 1e-5),
            kernels.rms_norm(heads[rows], head_weight, 1e-5),
            kernels.rms_norm(heads[rows], head_weight.float(), 1e-5),
            *placed(rows),
            kernels.sigmoid(heads[rows].flatten(1)),
            torch.softmax(scores[rows], dim=-1),
            *(kernels.silu_and_mul(gate_up[rows].clone()) for gate_up in gate_ups),
            *(kernels.activate(gate_up[rows].clone(), function, is_gated=True) for gate_up in other_gate_ups),
            *((kernels.layer_norm(hidden[rows], weight, weight, 1e-5),) if shapes.layer_norm else ()),
        ]

    whole = passes(slice(0, _PASS_ROWS))
    for num_rows in (1, 2, 3, 7, 61, 100, 333):
        rows = slice(_PASS_ROWS - num_rows, _PASS_ROWS)
        if not all(
            torch.equal(ours, all_rows[rows]) for ours, all_rows in zip(passes(rows), whole, strict=True)
        ):
            return False
    return True


def _latent_shape(latent: LatentConfig, num_heads: int) -> tuple[int, int, int]:
    return num_heads, min(latent.key_dim, latent.rank + latent.rotary_dim), latent.rank


def random_net(sizes: RecurrentConfig, random: "Random") -> StateNet:
    taps = random.normal(sizes.conv_kernel, sizes.conv_size).float()
    bias = random.normal(sizes.conv_size).float()
    if isinstance(sizes, ShortConvConfig):
        return ShortConv(sizes, taps, bias)
    heads, lanes = sizes.num_value_heads, whole_lanes(sizes.num_value_heads)
    decay = -random.normal(lanes).float().exp(), random.normal(lanes).float()
    if isinstance(sizes, DeltaNetConfig):
        return DeltaHeads(sizes, 1e-6, taps, *decay, random.normal(sizes.value_head_dim).float())
    norm = random.normal(sizes.value_size).float().view(max(sizes.norm_groups, 1), -1)
    skip = random.normal(heads).float()
    return MambaHeads(sizes, 1e-6, taps, bias, *decay, skip, norm if sizes.norm_groups else None)


def recurrence_holds(kernels: Kernels, sizes: RecurrentConfig, random: "Random") -> bool:
    """A recurrent layer gives the same outputs and the same state, whether it reads its tokens in one span or in
    several that end on the grid of states."""
    projected = random.normal(_NUM_TOKENS, input_size(sizes))
    net = random_net(sizes, random)
    spec = RecurrentSpec.of(replace(sizes, num_layers=1), projected.dtype)

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
