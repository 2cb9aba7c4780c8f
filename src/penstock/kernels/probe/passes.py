"""The law of norm, rotation and activation: a row gets the same bits whatever the other rows."""

import torch
from torch import Tensor

from penstock.cache import TokenRange
from penstock.cache.kv import KV
from penstock.kernels.interface import HeadLayout, Kernels
from penstock.kernels.probe.random import Random
from penstock.kernels.probe.shapes import ProbeShapes
from penstock.kernels.spans import WrittenPlaces

_PASS_ROWS = 512


def passes_hold(kernels: Kernels, shapes: ProbeShapes, random: Random) -> bool:
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
